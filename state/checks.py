"""The registry of checks that doctor, preflight and the alerts share: what each is called, means, and wants done.

A check has the id that `rigbook explain` knows. What was found is data: who shows it decides how.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """`info` is worth knowing and no finding: it does not change an exit code. `reports`: public issues behind it."""

    id: str
    severity: Severity
    title: str
    explain: str
    fix: str
    how: str = ""
    reports: tuple[str, ...] = ()

    def text(self) -> str:
        parts = [f"{self.title}. {self.explain}", f"How it is found: {self.how}" if self.how else ""]
        parts.append(f"What to do: {self.fix}")
        new = [report for report in self.reports if report not in self.explain]
        return " ".join([*filter(None, parts), f"Reported as {', '.join(new)}." if new else ""]).strip()


@dataclass(frozen=True)
class Finding:
    """One check that did not pass, on one host (None: this machine or the project)."""

    check: Check
    host: str | None
    message: str
    evidence: str = ""

    @property
    def counts(self) -> bool:
        return self.check.severity != "info"

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check.id,
            "severity": self.check.severity,
            "host": self.host,
            "message": self.message,
            "evidence": self.evidence,
            "fix": self.check.fix,
        }


def table(checks: Iterable[Check]) -> dict[str, Check]:
    """By id. Raises ValueError when two have the same."""
    found: dict[str, Check] = {}
    for check in checks:
        if check.id in found:
            raise ValueError(f"two checks are called {check.id}")
        found[check.id] = check
    return found


HERE = table(
    [
        Check(
            "local.python", "error", "The Python that runs rigbook is too old",
            "rigbook uses what Python 3.11 brought.",
            "Install it with a Python 3.11 or newer: `uv tool install rigbook`.",
        ),
        Check(
            "local.disk", "error", "The disk with the project is nearly full",
            "The journal refuses to write when there is no room, and mirrored logs stop growing.",
            "Make room: old logs lie under .rigbook/.",
        ),
        Check(
            "local.no-ssh", "info", "There is no `ssh` program here",
            "rigbook speaks SSH itself, but only ssh reads its own configuration without any doubt.",
            "Install an OpenSSH client.",
        ),
        Check(
            "project.wrong", "error", "rigbook.toml is wrong",
            "It is read strictly, so that no setting is believed in that has no effect.", "`rigbook config check`.",
        ),
        Check(
            "journal.damaged", "error", "The journal's chain of hashes is broken",
            "Something other than rigbook changed the file, or the disk lost data; earlier events are sound.",
            "`rigbook book verify` names where it begins; restore a copy and compare.",
        ),
        Check(
            "local.key-open", "warning", "A private key can be read by others",
            "OpenSSH refuses such a key; rigbook does not need to, but whoever can read it can be you.",
            "chmod 600 KEY.",
        ),
    ]
)  # fmt: skip
