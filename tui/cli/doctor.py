"""`rigbook doctor`: what is wrong here and on the hosts, and what to do about it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import typer

from state.errors import FINDINGS, UNREACHABLE, USAGE, RigbookError
from tui.cli.common import ctx, emit, root, say, table, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from state.checks import Finding
    from state.project import Project

MARKS = {"info": "note", "warning": "warning", "error": "WRONG"}


def doctor(
    names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out."),
) -> None:
    """Check what rigbook needs here and on the hosts; say what is wrong and what to do.

    Exits with 6 when something is wrong (a note is not), with 4 when hosts do not answer and nothing else is wrong.
    `rigbook explain ID` says more about each.

    Example:  rigbook doctor llm
    """
    findings, passed = wait_for(_look(names or []))
    if ctx.json:
        emit([*passed, *({**finding.as_dict(), "state": finding.check.severity} for finding in findings)])
    else:
        emit(None, _told(findings, passed))
    wrong = [finding for finding in findings if finding.counts]
    if wrong:
        raise typer.Exit(UNREACHABLE if all(each.check.id == "host.unreachable" for each in wrong) else FINDINGS)


def _told(findings: list[Finding], passed: list[dict[str, Any]]) -> str:
    order = ("error", "warning", "info")
    lines = [table([["ok", row["host"] or "here", row["message"]] for row in passed], ["", "", ""]).lstrip("\n")]
    for finding in sorted(findings, key=lambda each: (order.index(each.check.severity), each.host or "")):
        lines += [
            "",
            f"{MARKS[finding.check.severity]}  {finding.host or 'here'}: {finding.message}  [{finding.check.id}]",
        ]
        lines += [f"  seen: {' / '.join(finding.evidence.splitlines())}"] if finding.evidence else []
        lines += [f"  {finding.check.fix}"]
    count = sum(finding.counts for finding in findings)
    notes = len(findings) - count
    lines += ["", f"{count or 'nothing'} wrong, {notes} note{'' if notes == 1 else 's'}"]
    return "\n".join(lines)


async def _look(names: list[str]) -> tuple[list[Finding], list[dict[str, Any]]]:
    findings: list[Finding] = []
    passed: list[dict[str, Any]] = []
    loaded = _here(findings, passed)
    if loaded is None:
        if names:
            say("the hosts were not looked at")
        return findings, passed
    hosts = chosen(loaded, names or None)
    from remote.checks import config, look, unreachable
    from remote.gpu_checks import findings as gpu_findings
    from tui.cli.gpus import look_at

    file = loaded.root / loaded.project.ssh_config if loaded.project.ssh_config else None

    whole: set[str] = set()  # where a probe can run

    async with rig_of(loaded) as rig:

        async def one(name: str) -> list[Finding]:
            host = loaded.hosts[name]
            found = await asyncio.to_thread(config, name, host.ssh, file) if host.ssh and not host.played else []
            try:
                link = await rig.link(name)
            except RigbookError as error:
                if error.exit_code == USAGE and error.id == "host.not-declared":
                    raise
                return [*found, unreachable(name, error)]
            if link.route()["route"] == "agent":
                passed.append(_ok(name, "host.reached", "by its guest agent; set ssh for the rest"))
                return found
            looked = await look(link)
            if host.played:  # it is this machine: what it lacks is not the rig's
                looked = [each for each in looked if each.check.severity == "error"]
            bad = {each.check.id for each in looked}
            if not bad & {"host.unreachable", "host.key", "host.login", "host.failed"}:
                played = ", played" if host.played else ""
                passed.append(_ok(name, "host.reached", f"{host.kind}{played}, by {link.route()['route']}"))
                if not host.played:
                    if "host.no-python" not in bad:
                        whole.add(name)
                    passed.extend(_ok(name, id, words) for id, words in LOOKED.items() if id not in bad)
            return [*found, *looked]

        for part in await asyncio.gather(*map(one, hosts)):
            findings += part
        looks, failures = await look_at(rig, loaded, sorted(whole))
        for name, why in failures.items():
            say(f"{name}: its GPUs were not looked at: {why}")
        for seen in looks:
            wrong = gpu_findings(seen)
            findings += wrong
            if seen.gpus and not wrong:
                passed.append(_ok(seen.host, "gpu.held", f"GPUs: {len(seen.gpus)}, and no memory held by dead work"))
    passed.sort(key=lambda row: (row["host"] is not None, row["host"] or ""))
    return list(dict.fromkeys(findings)), passed


# What is said to be in order when it is.
LOOKED = {
    "host.no-python": "has a Python for jobs and probes",
    "host.state-unwritable": "the state directory can be written",
    "host.clock-skew": "its clock agrees with ours",
    "host.max-sessions": "eight sessions on one connection",
    "host.kill-user-processes": "what is started stays when we leave",
}


def _ok(host: str | None, check: str, message: str) -> dict[str, Any]:
    return {"check": check, "state": "ok", "host": host, "message": message}


def _here(findings: list[Finding], passed: list[dict[str, Any]]) -> Project | None:
    """This machine, the project file, the journal."""
    import shutil

    from state.checks import HERE, Finding
    from state.journal import Journal
    from state.project import journal_path, load

    def add(id: str, good: bool, message: str, evidence: str = "") -> None:
        if good:
            passed.append(_ok(None, id, message))
        else:
            findings.append(Finding(HERE[id], None, message, evidence))

    add("local.python", sys.version_info >= (3, 11), sys.version.split()[0])
    free = shutil.disk_usage(root()).free
    add("local.disk", free > 1 << 30, f"{free / (1 << 30):.1f} GiB free in {root()}")
    try:
        loaded = load(root())
    except RigbookError as error:
        add("project.wrong", False, error.message, error.id)
        return None
    add(
        "project.wrong", True,
        f"{loaded.project.name}: {len(loaded.hosts)} hosts, {len(loaded.profiles)} profiles",
    )  # fmt: skip
    path = journal_path(loaded.root)
    if path.exists():
        try:
            journal = Journal.open(path, read_only=True)
        except RigbookError as error:
            add("journal.damaged", False, error.message, error.id)
            return loaded
        try:
            verified = journal.verify()
            add("journal.damaged", verified.ok, verified.text)
        finally:
            journal.close()
    return loaded
