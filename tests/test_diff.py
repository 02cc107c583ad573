"""The difference of two versions: by key, nothing missed, nothing invented."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from state import events as e
from state.book import Book, project_book
from state.diff import as_markdown, as_text, diff
from state.outline import Outline
from tests.lab.records import book, records
from tests.lab.rig_journal import everything, fact

ALL = records(*everything())


def at(version: int) -> Book:
    return project_book(ALL, Outline(name="x"), until=version)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(ALL)))
def test_a_version_does_not_differ_from_itself(version: int) -> None:
    assert diff(at(version), at(version)) == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(ALL)), st.integers(0, len(ALL)))
def test_back_and_forth_are_mirror_images(a: int, b: int) -> None:
    flip = {"added": "removed", "removed": "added", "changed": "changed"}
    there = {(c.section, c.key, c.what) for c in diff(at(a), at(b))}
    back = {(c.section, c.key, flip[c.what]) for c in diff(at(b), at(a))}
    assert there == back


def test_every_kind_of_event_leaves_a_trace() -> None:
    """From nothing to everything: each thing that happened is in the difference."""
    text = as_text(diff(at(0), at(len(ALL))))
    for wanted in ("hosts.llm.hw.cpu.model", "stage generate failed", "drafter", "server s1", "plan p1", "disk.low"):
        assert wanted in text
    for wanted in ("Draft vocabulary", "EAGLE is enough (refuted)", "Train longer", "Mind the step", "better: +34"):
        assert wanted in text


def test_a_changed_value_shows_both_and_its_source() -> None:
    key = "hosts.llm.sw.driver"
    (change,) = diff(book(fact(key, "580")), book(fact(key, "580"), fact(key, "590", command="nvidia-smi")))
    assert (change.section, change.what, change.before, change.after) == ("Software", "changed", "580", "590")
    assert "nvidia-smi" in change.source


def test_a_unit_counts_as_a_change() -> None:
    (change,) = diff(book(fact("costs.x", 5, "USD")), book(fact("costs.x", 5, "EUR")))
    assert (change.before, change.after) == ("5 USD", "5 EUR")


def test_a_failed_look_is_a_change() -> None:
    failed = e.ProbeFailed(host="llm", what="system", reason="timed out")
    (change,) = diff(book(fact("hosts.llm.hw.x", 1)), book(fact("hosts.llm.hw.x", 1), failed))
    assert "timed out" in change.after


def test_a_run_that_ended_is_one_change() -> None:
    started = e.RunStarted(run="r1", what="stage", name="mix")
    ended = e.RunFinished(run="r1", status="done", exit=0, result={"rows": {"in": 3, "out": 3}}, seconds=1.5)
    (change,) = diff(book(started), book(started, ended))
    assert change.before == "stage mix running" and "done in 1.5 s" in change.after


def test_a_done_step_and_a_superseded_decision() -> None:
    step, decision = e.NextAdded(title="Train"), e.DecisionMade(title="A")
    before = book(step, decision)
    after = book(step, decision, e.NextDone(next="aaaaaa.1"), e.DecisionMade(title="B", supersedes="aaaaaa.2"))
    text = as_text(diff(before, after))
    assert "Train → Train (done)" in text and "A → A (superseded by aaaaaa.4)" in text


def test_the_markdown_form_is_a_table_per_section() -> None:
    text = as_markdown(diff(at(0), at(len(ALL))), at(0), at(len(ALL)))
    assert text.startswith("# x: version 0 → ")
    assert "## Hardware" in text and "\n\n\n" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 6, line
