"""What the command's own error ids mean, for `rigbook explain ID`."""

EXPLAIN: dict[str, str] = {
    "usage": "The command line has a word or flag that the command does not know; `--help` shows what it does.",
    "project.no-directory": "The directory given with -C does not exist, or the one we are in was deleted.",
    "confirm.unattended": "The command changes something and nobody is at the terminal to agree. Give --yes.",
    "confirm.declined": "The question was answered with no.",
    "explain.unknown": "No error or check has this id.",
    "output.failed": "What stdout goes to is full or broken, so the answer is cut. What was asked may have been done.",
    "bug": "An exception that rigbook did not expect: a fault in rigbook. The file named holds the traceback.",
}
