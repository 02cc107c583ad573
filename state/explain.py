"""What the book's error ids mean, for `rigbook explain ID`."""

EXPLAIN: dict[str, str] = {
    "project.not-found": "rigbook works on a project: a folder with a rigbook.toml in it. It looks in the folder "
    "where you are and above it, or in the one you name with -C. `rigbook init` makes one, `rigbook demo` a whole "
    "example.",
    "project.no-directory": "The folder named with -C does not exist or is a file, or the one we are in was deleted.",
    "project.invalid": "rigbook.toml is read strictly: an unknown key, a wrong type or a name that refers to nothing "
    "would otherwise be a setting that you believe in and that has no effect. Every problem is listed with its line. "
    "`rigbook config explain KEY` says what a key means. The book stays readable meanwhile.",
    "config.unknown-key": "There is no such key in rigbook.toml. `rigbook config explain` alone lists all of them.",
    "profile.unknown": "No [profiles.NAME] table of this name is in rigbook.toml.",
    "host.unknown": "No [hosts.NAME] table of this name is in rigbook.toml.",
    "env.unknown": "No [envs.NAME] table of this name is in rigbook.toml.",
    "journal.absent": "Nothing was recorded in this project yet. The journal is made by the first thing that is.",
    "journal.network-filesystem": "The journal is an SQLite file that several processes write at once. On NFS, SMB "
    "and their like, locks and shared memory do not work well enough: acknowledged events get lost. Keep the project "
    "on a local disk; exports may go anywhere.",
    "journal.not-a-journal": "The file is an SQLite database of something else. rigbook does not touch it.",
    "journal.corrupt": "SQLite cannot read the file. Keep it as it is (with its -wal file), restore a copy, and "
    "compare: `rigbook book verify` says up to which event the chain holds.",
    "journal.no-permission": "The journal or its folder may not be written, or not be read, by this user.",
    "journal.busy": "Writers wait for each other for a few milliseconds as a rule. One that holds the lock for longer "
    "is stopped or stuck; `fuser .rigbook/journal.db` names it.",
    "journal.disk-full": "The disk, or a limit on file size, left no room. The events of this one call were not "
    "recorded; those before are whole. Make room and do it again.",
    "journal.newer-schema": "A newer rigbook has written this journal. This one reads what it understands and writes "
    "nothing, so as not to spoil what it does not understand.",
    "journal.read-only": "A fault in rigbook: something tried to write through a reader.",
    "journal.closed": "A fault in rigbook: something used the journal after it was closed.",
    "journal.no-such-event": "Events are named ORIGIN.NUMBER; `rigbook book log` lists them.",
    "redact.failed": "Before anything is written down, secrets are looked for in it. That search failed, so nothing "
    "was written: better a missing line than a leaked key.",
    "book.no-such-version": "A version of the book is the number of an event; `rigbook book log` lists them.",
    "book.no-such-section": "Sections are named by short ids, which the error message lists.",
    "book.no-such-key": "No fact of this key was ever recorded. `rigbook book search WORD` looks in all of them.",
    "book.damaged": "The journal's hash chain or a stored body does not fit: the file was changed by something other "
    "than rigbook, or the disk lost data. What the message names is where it begins; earlier events are sound.",
    "export.failed": "The file could not be written; what was there before is untouched.",
    "next.unknown": "No open next step has this id or words in its title; `rigbook book show --section next` lists "
    "them.",
    "decision.unknown": "Decisions are named by the id of their event; the hint lists them.",
}
