"""A hundred random scenarios with real processes; and every rule is there for a reason: without it, one fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from remote.probe import classes, reclaim
from tests.lab.gpu_machine import REPO, Machine, fake_gpu, gpu_machine, holder_program


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with gpu_machine([fake_gpu(at) for at in range(4)]) as machine:
        yield machine


def scenarios(machine: Machine, *words: str) -> list[dict[str, object]]:
    """Run them inside of the machine."""
    env = {"PYTHONPATH": str(REPO)}
    script = str(REPO / "tests/lab/gpu_scenarios.py")
    argv = [sys.executable, script, str(machine.folder), str(holder_program()), *words]
    with (machine.folder / "said").open("wb") as said:
        machine.popen(argv, env, stdout=said, stderr=said).wait(280)
    text = (machine.folder / "said").read_text()
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert rows and "Traceback" not in text, text[-3000:]
    return rows


def test_a_hundred_scenarios(machine: Machine) -> None:
    rows = scenarios(machine, *map(str, range(100)))
    assert len(rows) == 100
    assert not [row for row in rows if row["problem"]]


RULES = [
    *(f"{name}:{rule[0]}" for name in ("PROTECTED", "OURS", "DEAD", "UNCLAIMED") for rule in getattr(classes, name)),
    *(f"CHANGES:{change[0]}" for change in reclaim.CHANGES),
]


def test_without_any_one_rule_a_scenario_fails(machine: Machine) -> None:
    rules = [rule for rule in RULES if rule != "UNCLAIMED:readable"]  # root reads everything; see test_gpus.py
    rows = scenarios(machine, *map(str, range(100)), "--without", *rules)
    caught = {row["rule"] for row in rows if row["problem"]}
    assert caught == set(rules), sorted(set(rules) - caught)
