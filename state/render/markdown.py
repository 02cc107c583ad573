"""The book as Markdown for people: headline first, then every section, each number with its source.

Deterministic: the same book gives the same bytes; nothing here looks at a clock or at the machine.
"""

from __future__ import annotations

from collections.abc import Callable

from state.book import Book
from state.errors import USAGE, RigbookError
from state.harmless import harmless
from state.render import bench, people, work
from state.render.facts import fact_table
from state.render.text import code, escape, host, prose, results, table, when

# Section id (as in `rigbook note --section`), title, its body, and what is said when there is nothing.
SECTIONS: tuple[tuple[str, str, Callable[[Book], list[str]], str], ...] = (
    ("goal", "Goal", lambda book: prose(book.goal), "No goal is written down yet: `[project] goal` in rigbook.toml."),
    ("instructions", "Instructions", people.instructions, "No standing instructions."),
    ("hosts", "Hosts and access", lambda book: _hosts(book), "No hosts are declared in rigbook.toml."),
    ("hardware", "Hardware", lambda book: _per_host(book, "hw"), "Not looked at yet: `rigbook probe`."),
    ("software", "Software", lambda book: _software(book), "Not looked at yet: `rigbook probe`."),
    ("target", "Target model and tokenizer", lambda book: _target(book), "Nothing is known of the target yet."),
    ("discoveries", "Discoveries", work.discoveries, "No discoveries yet, and nothing has failed."),
    ("patches", "Patches", lambda book: _facts(book, "patches."), "No patches are recorded."),
    ("benchmarks", "Benchmarks", bench.section, "Nothing was measured yet: `rigbook bench run`."),
    ("profiling", "Profiling", lambda book: _facts(book, "profiles."), "Nothing was profiled yet."),
    ("peers", "Peers", lambda book: _facts(book, "peers."), "No figures of others are recorded."),
    ("drafters", "Drafters and training", work.drafters, "No drafter was trained yet."),
    ("decisions", "Decisions", people.decisions, "No decisions are recorded: `rigbook decide`."),
    ("progress", "Done / In progress / Not started", work.progress, "Nothing was run yet."),
    ("files", "Files", work.files, "No files are recorded."),
    ("costs", "Costs", work.costs, "No costs are recorded."),
    ("next", "Next steps", people.next_steps, "No next steps are written down: `rigbook next`."),
    ("conflicts", "Open conflicts", people.conflicts, "None: nobody and nothing contradicts what a person wrote."),
)

_KNOWN_PREFIXES = ("hosts.", "envs.", "target.", "drafters.", "profiles.", "files.", "costs.", "patches.", "peers.")


def render(book: Book) -> str:
    """The whole document."""
    lines = [f"# {escape(book.project.name or 'unnamed project')}: state of the project", "", *_preface(book)]
    lines += ["## At a glance", "", *_glance(book)]
    for ident, title, body, nothing in SECTIONS:
        lines += [f"## {title}", ""]
        content = [*section_prose(book, ident), *body(book)]
        lines += [*content, ""] if any(content) else [f"_{nothing}_", ""]
    lines += ["---", "", *_colophon(book)]
    return _tidy(lines)


def render_section(book: Book, ident: str) -> str:
    """One section. Raises RigbookError `book.no-such-section` (exit code 2)."""
    for known, title, body, nothing in SECTIONS:
        if known == ident:
            content = [*section_prose(book, ident), *body(book)]
            return _tidy([f"## {title}", "", *(content if any(content) else [f"_{nothing}_"])])
    names = ", ".join(known for known, *_ in SECTIONS)
    raise RigbookError(
        "book.no-such-section", f"the book has no section {ident!r}", hint=f"sections: {names}", exit_code=USAGE
    )


def headline(book: Book) -> str:
    """The headline table alone; empty when nothing was measured."""
    return _tidy(bench.headline(book)) if book.benchmarks else ""


def section_prose(book: Book, ident: str) -> list[str]:
    """What people wrote into a section: its prose, and notes put there."""
    lines = [*prose(book.prose[ident]), ""] if book.prose.get(ident) else []
    notes = [note for note in book.notes if note.section == ident]
    lines += [line for note in notes for line in people.item(note, note.text)]
    return [*lines, ""] if lines else []


def _preface(book: Book) -> list[str]:
    lines = [
        f"Version {book.seq}, as of {when(book.generated_at)}. What rigbook saw and measured, each value with its"
        f" source, and what people wrote. Head of the journal: {code(book.head[:12])}."
        if book.events
        else "Nothing is recorded yet. `rigbook probe` looks at the hosts; `rigbook run all` starts the work.",
        "",
    ]
    played = sorted(name for name in book.project.hosts if book.played(name))
    if played:
        names = ", ".join(f"**{escape(name)}**" for name in played)
        lines += [
            f"> {names} {'is' if len(played) == 1 else 'are'} *played*: stand-ins that the demo runs on one machine,"
            " reached over real SSH. What is measured on them is really measured, on that machine.",
            "",
        ]
    if book.project.problem:
        lines += [f"> {escape(book.project.problem)}. What the file declares is missing below.", ""]
    return lines


def _glance(book: Book) -> list[str]:
    lines = bench.headline(book)
    said = [*work.glance(book), *people.glance(book)]
    if book.conflicts:
        count = "1 open conflict" if len(book.conflicts) == 1 else f"{len(book.conflicts)} open conflicts"
        said.append(f"**{count}** between what people wrote and what machines saw: see the last section.")
    doubtful = [fact for fact in book.facts.values() if fact.state in ("stale", "invalidated")]
    if doubtful:
        said.append(f"Stale or invalidated, and marked so: {len(doubtful)} of {len(book.facts)} values.")
    lines += [f"- {line}" for line in said]
    return [*lines, ""] if lines else ["_Nothing to tell yet._", ""]


# ── sections that show facts ─────────────────────────────────────────────────────────────────────────────────────


def _hosts(book: Book) -> list[str]:
    rows = []
    for name, declared in book.project.hosts.items():
        failure = book.failures.get(name)
        seen = max((fact.observed_at for fact in book.facts_under(f"hosts.{name}.")), default="")
        if failure:
            state = f"**no answer** at {when(failure.at)}: {escape(failure.reason)}"
            state += f"; last seen {when(seen)}" if seen else ""
        else:
            state = f"answered, {when(seen)}" if seen else "not looked at yet"
        guest = " ".join(str(declared[key]) for key in ("on", "vmid") if key in declared)
        route = str(declared.get("ssh") or ("this machine" if declared.get("kind") == "local" else "through its host"))
        kind = str(declared.get("kind", "unknown"))
        rows.append([host(book, name), escape(kind), escape(guest), code(route), state])
    lines = table(["host", "kind", "guest of", "reached by", "state"], rows)
    for name in _host_names(book):
        prefix = f"hosts.{name}.access."
        facts = book.facts_under(prefix)
        lines += [f"### Access to {host(book, name)}", "", *fact_table(book, facts, prefix)] if facts else []
    return lines


def _host_names(book: Book) -> list[str]:
    """Declared hosts first, then those that only facts know."""
    seen = (fact.key.split(".")[1] for fact in book.facts_under("hosts.") if fact.key.count(".") > 1)
    return list(dict.fromkeys([*book.project.hosts, *seen]))


def _per_host(book: Book, branch: str) -> list[str]:
    lines: list[str] = []
    for name in _host_names(book):
        prefix = f"hosts.{name}.{branch}."
        facts = book.facts_under(prefix)
        if facts:
            lines += [f"### {host(book, name)}", "", *fact_table(book, facts, prefix)]
    return lines


def _software(book: Book) -> list[str]:
    lines = _per_host(book, "sw")
    names = list(dict.fromkeys([*book.project.envs, *(f.key.split(".")[1] for f in book.facts_under("envs."))]))
    for name in names:
        facts = book.facts_under(f"envs.{name}.")
        if facts:
            declared = book.project.envs.get(name, {})
            where = f" on {host(book, str(declared['host']))}" if declared.get("host") else ""
            lines += [f"### Environment {escape(name)}{where}", "", *fact_table(book, facts, f"envs.{name}.")]
    known = ("access.", "hw.", "sw.")
    other = [
        fact
        for fact in book.facts_under("")
        if not fact.key.startswith(_KNOWN_PREFIXES)
        or (fact.key.startswith("hosts.") and not fact.key.split(".", 2)[-1].startswith(known))
    ]
    if other:
        lines += ["### Other facts", "", *fact_table(book, other, "")]
    return lines


def _target(book: Book) -> list[str]:
    lines = []
    declared = book.project.target
    if declared:
        lines += [f"Declared in rigbook.toml: {results(declared)}.", ""]
    lines += _facts(book, "target.")
    run = work.last_run(book, "target")
    if run and run.result:
        lines += [f"Made by {work.run_source(book, run)}: {results(run.result)}.", ""]
    return lines


def _facts(book: Book, prefix: str) -> list[str]:
    """Facts under `prefix`, one table per name behind it where there are several levels."""
    return fact_table(book, book.facts_under(prefix), prefix)


def _colophon(book: Book) -> list[str]:
    said = [f"{book.events} events."]
    if book.purged:
        said.append(f"{book.purged} of them had their content taken out.")
    if book.unknown_events:
        said.append(f"{book.unknown_events} were written by a newer rigbook and are not shown; update to see them.")
    said.append(f"`rigbook book show --at {book.seq}` prints this version again; `rigbook book log` lists all.")
    return [" ".join(said)]


def _tidy(lines: list[str]) -> str:
    """One blank line between blocks, one newline at the end, and nothing that a terminal would obey."""
    kept: list[str] = []
    for line in lines:
        if line.strip() or (kept and kept[-1].strip()):
            kept.append(line.rstrip())
    return harmless("\n".join(kept).strip("\n") + "\n")
