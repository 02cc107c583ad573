"""Facts: who owns them, what replaces them, and what makes them doubtful."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from state import events as e
from state.book import project_book
from state.condense import append_observations
from state.journal import Journal
from state.outline import Outline
from state.render import json as as_json
from state.render import markdown
from tests.lab.records import START, book, records, stamp
from tests.lab.rig_journal import benches, fact, people, pipeline, probes

CPU = "hosts.llm.hw.cpu.threads"


def claim(value: Any, **more: Any) -> e.FactObserved:
    return e.FactObserved(key=CPU, value=value, owner="person", **more)


def test_the_latest_look_is_believed() -> None:
    told = book(fact(CPU, 2), fact(CPU, 4)).facts[CPU]
    assert (told.value, told.previous, told.changes, told.changed_at) == (4, 2, 1, stamp(1))


def test_seeing_the_same_again_is_no_change() -> None:
    told = book(fact(CPU, 2), fact(CPU, 2)).facts[CPU]
    assert (told.changes, told.changed_at, told.observed_at) == (0, stamp(0), stamp(1))


def test_a_person_is_not_overruled_and_the_conflict_shows() -> None:
    told = book(fact(CPU, 2), claim(4), fact(CPU, 2)).facts[CPU]
    assert (told.value, told.owner, told.state) == (4, "person", "conflict")
    assert told.contrary is not None and told.contrary.value == 2


def test_a_person_whom_the_machine_confirms_is_in_no_conflict() -> None:
    told = book(claim(4), fact(CPU, 4))
    assert told.conflicts == [] and told.facts[CPU].owner == "person"


def test_a_failed_look_replaces_nothing() -> None:
    failed = e.ProbeFailed(host="llm", what="system", reason="timed out")
    told = book(fact(CPU, 2), fact("hosts.vm.hw.x", 1, host="vm"), failed)
    assert told.facts[CPU].value == 2
    assert told.facts[CPU].failure == "timed out"
    assert told.facts["hosts.vm.hw.x"].failure == ""
    assert told.failures["llm"].reason == "timed out"


def test_a_look_that_works_again_clears_the_failure() -> None:
    failed = e.ProbeFailed(host="llm", what="system", reason="timed out")
    told = book(fact(CPU, 2), failed, fact(CPU, 2))
    assert told.facts[CPU].failure == "" and told.failures == {}


def test_a_failed_look_at_an_env_reaches_its_facts() -> None:
    toml = '[envs.work]\nhost = "llm"\npython = "x"\n'
    failed = e.ProbeFailed(host="llm", what="system", reason="timed out")
    assert book(fact("envs.work.torch", "2.13"), failed, toml=toml).facts["envs.work.torch"].failure == "timed out"


def test_a_failed_look_at_one_part_says_nothing_of_the_others() -> None:
    gpus, cores = "hosts.llm.hw.gpus", "hosts.llm.hw.cores"
    failed = e.ProbeFailed(host="llm", what="gpus", reason="no driver")
    told = book(fact(gpus, 8), fact(cores, 2), failed)
    assert told.facts[gpus].failure == "no driver" and told.facts[cores].failure == ""
    assert told.failures == {}, "the host answered"
    assert "Looking at gpus on llm failed" in markdown.render(told)
    again = book(fact(gpus, 8), failed, fact(cores, 2), fact(gpus, 8))
    assert again.failed_looks == {} and "Looking at gpus" not in markdown.render(again)


def test_a_failed_look_at_an_env_is_told_by_its_name() -> None:
    toml = '[envs.work]\nhost = "llm"\npython = "x"\n'
    failed = e.ProbeFailed(host="llm", what="envs.work", reason="no such file")
    told = book(fact("envs.work.torch", "2.13"), fact("hosts.llm.hw.cores", 2), failed, toml=toml)
    assert told.facts["envs.work.torch"].failure == "no such file"
    assert told.facts["hosts.llm.hw.cores"].failure == ""


def test_looking_again_is_one_event_and_keeps_values_fresh(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    look = [fact(CPU, 2), fact("hosts.llm.sw.kernel", "6.1"), fact("hosts.vm.hw.x", 1, host="vm")]
    with Journal.open(path) as journal:
        append_observations(journal, look)
        again = append_observations(journal, look)
        assert [record.kind for record in again] == ["facts.confirmed"] * 2
        changed = append_observations(journal, [fact(CPU, 4), look[1]])
        assert [record.kind for record in changed] == ["fact.observed", "facts.confirmed"]
        back = append_observations(journal, [fact(CPU, 2)])
        assert [record.kind for record in back] == ["fact.observed"], "an old value that came back is news"
        told = project_book(journal.records(), Outline(name="x"))
    assert told.facts[CPU].value == 2 and told.facts[CPU].changes == 2
    assert told.facts["hosts.llm.sw.kernel"].observed_at >= told.facts["hosts.vm.hw.x"].observed_at


def test_another_command_or_a_person_s_word_is_no_confirmation(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal.db") as journal:
        append_observations(journal, [fact(CPU, 2)])
        other = append_observations(journal, [fact(CPU, 2, command="lscpu"), claim(2)])
    assert [record.kind for record in other] == ["fact.observed", "fact.observed"]


def test_a_confirmation_clears_a_failed_look() -> None:
    failed = e.ProbeFailed(host="llm", what="system", reason="timed out")
    seen = e.FactsConfirmed(host="llm", facts={CPU: "aaaaaa.1"}, observed_at=START + timedelta(minutes=2))
    told = book(fact(CPU, 2), failed, seen)
    assert told.facts[CPU].failure == "" and told.failures == {}
    assert told.facts[CPU].observed_at == "2026-05-01T08:02:00Z"


def test_a_confirmation_of_a_value_that_was_replaced_says_nothing() -> None:
    seen = e.FactsConfirmed(host="llm", facts={CPU: "aaaaaa.1"}, observed_at=START + timedelta(minutes=9))
    told = book(fact(CPU, 2), fact(CPU, 4), seen)
    assert (told.facts[CPU].value, told.facts[CPU].observed_at) == (4, stamp(1))


def test_unknown_is_not_zero() -> None:
    told = book(fact(CPU, 0), fact("hosts.llm.hw.gpus", None))
    text = markdown.render(told)
    assert "| cpu threads | 0 |" in text and "| gpus | unknown |" in text


def test_true_is_not_one() -> None:
    assert book(fact(CPU, 1), fact(CPU, True)).facts[CPU].changes == 1


def test_what_has_no_source_is_a_claim() -> None:
    told = book(e.FactObserved(key=CPU, value=2)).facts[CPU]
    assert told.confidence == "claimed"


def test_values_age() -> None:
    def state(days: float) -> str:
        return book(fact("hosts.llm.sw.driver", "590"), now=stamp(days * 1440)).facts["hosts.llm.sw.driver"].state

    assert (state(1), state(10), state(100)) == ("fresh", "aging", "stale")


def test_a_person_s_value_does_not_age() -> None:
    assert book(claim(4), now=stamp(1000 * 1440)).facts[CPU].state == "fresh"


def test_a_new_driver_invalidates_what_was_profiled_before_it() -> None:
    driver = "hosts.llm.sw.driver"
    told = book(fact(driver, "580"), fact("profiles.base.decode", 24.0, "ms"), fact(driver, "590"))
    assert told.facts["profiles.base.decode"].state == "invalidated"
    assert driver in told.facts["profiles.base.decode"].because
    again = book(
        fact(driver, "580"), fact("profiles.base.decode", 24.0), fact(driver, "590"), fact("profiles.base.decode", 22.0)
    )
    assert again.facts["profiles.base.decode"].state == "fresh"


def test_a_reboot_of_one_host_says_nothing_of_another() -> None:
    told = book(
        fact("hosts.a.sw.boot_id", "1"),
        fact("hosts.a.sw.kernel", "6.1"),
        fact("hosts.b.sw.kernel", "6.1"),
        fact("hosts.a.sw.boot_id", "2"),
    )
    assert told.facts["hosts.a.sw.kernel"].state == "invalidated"
    assert told.facts["hosts.b.sw.kernel"].state == "fresh"


def test_an_observation_that_was_made_earlier_does_not_win_by_arriving_later() -> None:
    late = fact(CPU, 2, observed_at="2026-04-01T00:00:00Z")
    assert book(fact(CPU, 4), late).facts[CPU].value == 4


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(random: Any) -> None:
    """Two copies of a journal exchange what they lack: both must end with the same document."""
    here = records(*probes(), *benches(), origin="aaaaaa")
    there = records(*people(), *pipeline(), fact(CPU, 8), origin="bbbbbb", start=0.5)
    merged = [*here, *there]
    expected = project_book(merged, Outline(name="x"))
    random.shuffle(merged)
    shuffled = project_book(merged, Outline(name="x"))

    def content(found: Any) -> str:
        document = as_json.render(found)
        return json.dumps(document, sort_keys=True)

    assert content(shuffled) == content(expected)
