"""What a plan says it will take: real numbers for a real target, unknown where nothing is known, never made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.estimate import Assumptions, estimate, measured, parse_assumptions, total
from pipeline.recipe import STAGES
from state.book import Run, open_book
from state.errors import REFUSED, RigbookError
from state.events import RunFinished, RunStarted
from state.journal import Journal
from state.outline import journal_path
from state.project import Project, loads
from tests.lab.kimi import KIMI
from tests.test_rig_commands import rigbook

RIG = """[project]
name = "kimi"
[hosts.llm]
kind = "local"
state_dir = "{root}/state"
[envs.train]
host = "llm"
python = "/usr/bin/python3"
[profiles.baseline]
env = "train"
engine = "sglang"
port = 8000
[target]
path = "{root}/models/Kimi-K2.5"
[pipeline]
host = "llm"
env = "train"
workdir = "{root}/eagle3"
[pipeline.prompts]
self_written = 88000
[pipeline.generate]
max_tokens = 4096
[pipeline.vocab]
size = 32000
[pipeline.train]
minutes = 1200
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    text = RIG.format(root=tmp_path)
    (tmp_path / "rigbook.toml").write_text(text)
    return loads(text, tmp_path)


def run(name: str, seconds: float, result: dict[str, Any], status: str = "done", seq: int = 1) -> Run:
    return Run(f"{name}-1", seq, name=name, status=status, seconds=seconds, result=result)


@pytest.mark.training_report(26)
def test_the_whole_pipeline_for_kimi_k2_5(project: Project) -> None:
    assume = Assumptions(61_330_000, 20.0, {"hidden": 1000.0, "generate": 1100.0})
    guesses = {guess.stage: guess for guess in estimate(project, KIMI, [], assume)}
    assert list(guesses) == [stage.name for stage in STAGES]
    states, training, exported = guesses["hidden"], guesses["train"], guesses["export"]
    assert states.disk == 61_330_000 * 57_344 and round(states.disk / 1e9) == 3517
    assert states.seconds == 61_330 and states.money == pytest.approx(61_330 / 3600 * 20)
    assert exported.disk is not None and exported.disk // 2 == 1_190_948_864
    assert training.seconds == 72_000 and any("2,594.7 M parameters in memory" in why for why in training.basis)
    # Two checkpoints kept and one being written, three fp32 vectors of what is trained each, and the result.
    assert training.disk == 961_572_864 * 4 * 10
    assert guesses["generate"].tokens == 61_330_000 and guesses["generate"].most
    assert any("at most: all of the 61,330,000 tokens" in why for why in guesses["generate"].basis)
    longest = {guess.stage: guess for guess in estimate(project, KIMI, [], Assumptions())}["generate"]
    assert any("at most: 88,060 answers of 4,096 tokens" in why for why in longest.basis)
    assert any("1,000 tokens/s assumed" in why for why in states.basis)
    everything = total(guesses.values())
    assert set(everything.unknown_time) == {"prompts", "tokenize", "mix", "vocab", "held_self", "held_people", *LATE}
    assert everything.disk > 3517e9 and everything.money == pytest.approx(sum(g.money or 0 for g in guesses.values()))


LATE = ("export", "audit", "predict")


def test_nothing_is_known_of_a_target_whose_config_was_not_read(project: Project) -> None:
    guesses = {guess.stage: guess for guess in estimate(project, None, [], Assumptions())}
    for stage in ("hidden", "train", "export", "vocab"):
        assert guesses[stage].disk is None, "unknown is not zero"
    assert guesses["hidden"].seconds is None and guesses["generate"].money is None
    assert {"hidden", "train", "export", "vocab"} <= set(total(guesses.values()).unknown_disk)


def test_what_the_book_measured_counts_and_what_failed_does_not(project: Project) -> None:
    runs = [
        run("generate", 100.0, {"response_tokens": 50_000, "rows": {"out": 100}}),
        run("tokenize", 10.0, {"tokens": 60_000, "response_tokens": 50_000, "rows": {"out": 100}}),
        run("hidden", 20.0, {"tokens": 60_000}),
        run("hidden", 1.0, {"tokens": 60_000}, status="failed"),
        run("train", 0.0, {"tokens_seen": 1}),
    ]
    assert measured(runs) == {
        "generate": (500.0, "generate-1"),
        "tokenize": (6000.0, "tokenize-1"),
        "hidden": (3000.0, "hidden-1"),
    }
    guesses = {guess.stage: guess for guess in estimate(project, KIMI, runs, Assumptions())}
    rows = 88_060
    assert guesses["generate"].tokens == rows * 500 and guesses["generate"].seconds == rows
    assert guesses["hidden"].tokens == rows * 600 and guesses["hidden"].seconds == rows * 600 / 3000
    assert any("measured by hidden-1" in why for why in guesses["hidden"].basis)
    again = {g.stage: g for g in estimate(project, KIMI, runs, Assumptions(rates={"hidden": 60_000.0}))}
    assert again["hidden"].seconds == rows / 100, "what is assumed stands above what was measured"


@pytest.mark.parametrize("word", ["hidden", "hidden=", "hidden=0", "hidden=-1", "hidden=fast", "hiden=5", "price=inf"])
def test_an_assumption_that_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(RigbookError) as error:
        parse_assumptions([word])
    assert error.value.id == "estimate.assume" and word in error.value.message


def test_the_command_shows_it_before_anything_exists(project: Project, tmp_path: Path) -> None:
    unread = rigbook(tmp_path, "--dry-run", "run", "all")
    assert unread.returncode == 0 and b"size unknown" in unread.stdout, unread.stderr
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    words = ("run", "all", "--target-config", str(tmp_path / "config.json"), "--assume", "tokens=61_330_000")
    shown = rigbook(tmp_path, "--dry-run", *words, "--assume", "hidden=1000", "--assume", "price=20")
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout.decode()
    assert "3,517 GB" in text and "57,344 bytes a token" in text and "NOT ENOUGH" in text
    assert "1,190.9 M parameters" in text and "at least" in text
    told = json.loads(rigbook(tmp_path, "--json", "--dry-run", *words).stdout)
    hidden = next(stage for stage in told["stages"] if stage["stage"] == "hidden")
    assert hidden["estimate"]["disk"] == 61_330_000 * 57_344 and hidden["state"] == "to do"
    assert told["enough_disk"] is False and "hidden" in told["total"]["unknown_time"]
    assert not (tmp_path / "eagle3").exists(), "a plan changes nothing"
    assert rigbook(tmp_path, "--dry-run", "run", "all", "--target-config", "nowhere.json").returncode == 2
    assert rigbook(tmp_path, "--dry-run", "run", "all", "--assume", "x=1").returncode == 2


def test_a_plan_that_cannot_fit_is_refused_before_anything_starts(project: Project, tmp_path: Path) -> None:
    """Half as many prompts as a disk of any size holds states for; lengths are known from the book."""
    model = tmp_path / "models/Kimi-K2.5"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(KIMI))
    with Journal.open(journal_path(tmp_path)) as journal:
        result = {"response_tokens": 400_000_000, "rows": {"in": 100, "out": 100, "errors": 0, "skipped": 0}}
        journal.append(
            RunStarted(run="generate-1", what="stage", name="generate", host="llm", job=None, key="k", settings={}),
            RunFinished(run="generate-1", status="done", exit=0, result=result, seconds=10.0),
        )
    done = rigbook(tmp_path, "--yes", "run", "hidden")
    assert done.returncode == REFUSED and b"error[run.disk]" in done.stderr, done.stderr
    assert b"of it hidden" in done.stderr and b"are free on llm" in done.stderr
    assert not (tmp_path / "eagle3").exists()
    forced = rigbook(tmp_path, "--yes", "run", "hidden", "--disk-anyway", "the disk grows tonight")
    assert b"Going on, because: the disk grows tonight" in forced.stderr and b"run.disk" not in forced.stderr
    (decision,) = open_book(tmp_path).decisions
    assert decision.because == "the disk grows tonight" and "hidden" in decision.text


def test_a_limit_that_does_not_fit_is_told_and_not_refused(project: Project, tmp_path: Path) -> None:
    model = tmp_path / "models/Kimi-K2.5"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(KIMI))
    done = rigbook(tmp_path, "--yes", "run", "hidden")
    assert b"if every response is as long as it may be" in done.stderr and b"run.disk" not in done.stderr


def test_budgets_prices_and_passes_are_what_rigbook_toml_says(tmp_path: Path) -> None:
    text = RIG.format(root=tmp_path).replace("minutes = 1200", "epochs = 2.0")
    text = text.replace("max_tokens = 4096", "max_tokens = 4096\ntoken_budget = 50_000_000\nmax_cost = 90.0")
    text += '[[pipeline.generate.endpoints]]\nname = "a"\nbase_url = "https://a/v1"\nprice_in = 1.0\nprice_out = 2.0\n'
    rates = Assumptions(rates={"generate": 1000.0, "train": 100_000.0})
    guesses = {g.stage: g for g in estimate(loads(text, tmp_path), KIMI, [], rates)}
    assert guesses["generate"].tokens == 50_000_000 and not guesses["generate"].most
    assert guesses["generate"].money == 90.0, "capped: 100 dollars of answers, and prompts"
    assert guesses["train"].seconds == 1000.0
    free = loads(text.replace("max_cost = 90.0", ""), tmp_path)
    asked = {g.stage: g for g in estimate(free, KIMI, [], rates)}["generate"].money
    assert asked is not None and 100 < asked < 110
    unknown = loads(text.replace("max_cost = 90.0", "").replace("price_in = 1.0\n", ""), tmp_path)
    assert {g.stage: g for g in estimate(unknown, KIMI, [], rates)}["generate"].money is None


def test_budgets_of_sources_are_answers_and_a_source_without_one_is_told_as_missing(tmp_path: Path) -> None:
    text = RIG.format(root=tmp_path).replace("self_written = 88000", "self_written = 0\nseeds = false")
    source = '[[pipeline.prompts.sources]]\nname = "{}"\npath = "/x"\n{}\n'
    bounded = text + source.format("chat", "tokens = 40_000_000") + source.format("code", "tokens = 20_000_000")
    guess = {g.stage: g for g in estimate(loads(bounded, tmp_path), KIMI, [], Assumptions())}["generate"]
    assert guess.tokens == 60_000_000 and not any("without" in why for why in guess.basis)
    free = bounded + source.format("rest", "")
    guess = {g.stage: g for g in estimate(loads(free, tmp_path), KIMI, [], Assumptions())}["generate"]
    assert any("without rest" in why for why in guess.basis)
    made = [run("prompts", 5.0, {"train": 1000})]
    guess = {g.stage: g for g in estimate(loads(free, tmp_path), KIMI, made, Assumptions())}["generate"]
    assert guess.tokens == 1000 * 4096 and not any("without" in why for why in guess.basis)
