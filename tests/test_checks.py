"""The registry of checks: every id that a stage names is in it, and says what is meant, how it is found, what to do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pipeline.checks import CHECKS
from pipeline.explain import EXPLAIN
from tui.cli.status import explanations

ROOT = Path(__file__).parents[1]
NAMES = {"warn", "refuse", "failed", "Refused"}
HANDED_ON = {
    ("protocol.py", "id"),
    ("protocol.py", "refusal.id"),
    ("audit_any.py", "finding['check']"),
}  # not made there


def named() -> dict[str, set[str]]:
    """id -> the files that use it, of every check that a stage warns of or refuses with."""
    found: dict[str, set[str]] = {}
    for path in sorted([*(ROOT / "pipeline/stages").rglob("*.py"), *(ROOT / "pipeline/eagle3").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            if name not in NAMES or (name == "failed" and not owner.endswith("stage")):
                continue
            first = node.args[0]
            if not isinstance(first, ast.Constant):
                assert (path.name, ast.unparse(first)) in HANDED_ON, (
                    f"{path}: an id that cannot be read from the source"
                )
                continue
            found.setdefault(str(first.value), set()).add(path.name)
    return found


def test_every_check_of_a_stage_is_in_the_registry() -> None:
    found = named()
    assert len(found) > 40, "the search finds nothing any more"
    missing = {id: sorted(files) for id, files in found.items() if id not in CHECKS}
    assert not missing, f"give each an entry in pipeline/checks.py: {missing}"


@pytest.mark.parametrize("id", CHECKS)
def test_each_entry_is_whole_and_explained_once(id: str) -> None:
    check = CHECKS[id]
    assert check.title and check.explain.endswith(".") and check.how and check.fix
    assert id not in EXPLAIN, "explained in two places"
    text = explanations()[id]
    assert check.title in text and check.fix in text and check.how in text
    assert all(report in text for report in check.reports)
