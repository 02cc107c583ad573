"""What the pipeline would take: time, disk and money for each stage, and on what each figure rests.

Pure arithmetic over the project, the target's config.json, what earlier runs of the book measured, and what the user
assumes. Nothing is made up: a stage that never ran here and for which nothing is assumed takes an *unknown* time, and a
total with unknown parts says that it is at least so much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.eagle3.config import DraftConfig, config_for_target
from pipeline.eagle3.sizes import bytes_per_token, file_parameters, parameters, training_parameters
from pipeline.recipe import STAGES, pipeline_of
from state.book import Run
from state.errors import USAGE, RigbookError
from state.project import Project
from state.tables import GenerateTable, PromptsTable, TrainTable

SEEDS = 60  # prompts that ship with rigbook
JSON_BYTES = 10  # of one token in a row of ids and masks: about seven for the id and its comma, three for the mask
CHECKPOINTS = 3  # two are kept, one is being written
VECTORS = 3  # weights and the optimiser's two moments, fp32
# What the rate of a stage is measured in: the key of its result that says how much it did.
AMOUNT = {
    "generate": "response_tokens",
    "tokenize": "tokens",
    "mix": "response_tokens",
    "vocab": "response_tokens",
    "hidden": "tokens",
    "train": "tokens_seen",
}


@dataclass(frozen=True)
class Assumptions:
    """What the user says instead of a measurement. `rates`: tokens/s by stage; `price`: of the machine, an hour."""

    tokens: int | None = None  # of all training rows, prompts included
    price: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Guess:
    """One stage. None is unknown, which is not zero. `tokens`: what the stage works on."""

    stage: str
    tokens: int | None = None
    seconds: float | None = None
    disk: int | None = None  # bytes that it leaves
    money: float | None = None
    basis: tuple[str, ...] = ()
    most: bool = False  # its tokens are a limit, not what is expected


@dataclass(frozen=True)
class Total:
    seconds: float
    disk: int
    money: float | None
    unknown_time: tuple[str, ...]  # stages whose part is missing in the sum
    unknown_disk: tuple[str, ...]


def parse_assumptions(words: Iterable[str]) -> Assumptions:
    """NAME=NUMBER, where NAME is tokens, price or a stage. Raises RigbookError `estimate.assume`."""
    tokens, price = None, None
    rates: dict[str, float] = {}
    stages = {stage.name for stage in STAGES}
    for word in words:
        name, _, text = word.partition("=")
        try:
            value = float(text.replace("_", "").replace(",", ""))
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf") or (name not in stages and name not in ("tokens", "price")):
            raise RigbookError(
                "estimate.assume",
                f"--assume {word}: expected NAME=NUMBER above 0",
                hint="NAME is tokens (of all training rows), price (an hour), or a stage (tokens/s): "
                + ", ".join(sorted(stages)),
                exit_code=USAGE,
            )
        if name == "tokens":
            tokens = round(value)
        elif name == "price":
            price = value
        else:
            rates[name] = value
    return Assumptions(tokens, price, rates)


def short_of(total: Total, free: int, there: int) -> int | None:
    """Bytes that are missing on a disk with so much free and so much written by these stages already; None: none."""
    need = total.disk - there - free
    return need if need > 0 else None


def measured(runs: Iterable[Run]) -> dict[str, tuple[float, str]]:
    """Tokens a second of each stage's newest finished run, and the run that says so."""
    found: dict[str, tuple[float, str]] = {}
    for run in runs:
        amount = run.result.get(AMOUNT.get(run.name, ""))
        if run.what == "stage" and run.status == "done" and run.seconds and isinstance(amount, int | float) and amount:
            found[run.name] = (amount / run.seconds, run.run)
    return found


def draft_config(project: Project, target: Mapping[str, Any] | None) -> DraftConfig | None:
    """The drafter that would be trained, or None where the target's sizes are not known."""
    if target is None:
        return None
    outputs = pipeline_of(project).hidden.layers
    layers = tuple(layer + 1 for layer in outputs)
    size = pipeline_of(project).vocab.size
    try:
        return config_for_target(dict(target), layers, size)
    except ValueError:
        return None


def estimate(
    project: Project, target: Mapping[str, Any] | None, runs: Iterable[Run], assume: Assumptions
) -> list[Guess]:
    """A guess for every stage of the recipe, in its order. `target`: the parsed config.json, None where unknown."""
    p, known, config = pipeline_of(project), list(runs), draft_config(project, target)
    rates = measured(known)
    rows, missing = _rows(p.prompts, known)
    answers, answers_basis = _answers(p.generate.max_tokens, rows, known)
    budgets = sum(source.tokens for source in p.prompts.sources if not source.rows)
    if budgets and not _made(known):
        # Sources are cut at their budgets of response tokens; what else there is has its own number.
        answers, answers_basis = answers + budgets, f"{budgets:,} tokens by the budgets of sources; {answers_basis}"
    if assume.tokens is not None:
        share, answers_basis = _share(assume.tokens, known)
        answers, missing = round(assume.tokens * share), ""
    if p.generate.token_budget and p.generate.token_budget < answers:
        answers, answers_basis = p.generate.token_budget, f"{p.generate.token_budget:,} tokens are the budget"
    answers_basis = "; ".join(filter(None, (answers_basis, missing)))
    total, total_basis = _tokens(rows, answers, answers_basis, p.prompts.max_tokens, known, assume)
    held = (p.prompts.held_self, p.prompts.held_people)

    def timed(stage: str, tokens: int, *, like: str | None = None) -> tuple[float | None, str]:
        if stage in assume.rates:
            return tokens / assume.rates[stage], f"{assume.rates[stage]:,.0f} tokens/s assumed"
        if (like or stage) in rates:
            rate, run = rates[like or stage]
            return tokens / rate, f"{rate:,.0f} tokens/s measured by {run}"
        return None, f"time unknown: no run in the book; --assume {stage}=TOKENS_PER_SECOND"

    guesses: dict[str, Guess] = {}

    def add(stage: str, tokens: int, basis: str, disk: int | None, *why: str, like: str | None = None) -> None:
        seconds, rate = timed(stage, tokens, like=like)
        guesses[stage] = Guess(stage, tokens, seconds, disk, None, tuple(filter(None, (basis, rate, *why))))

    text = JSON_BYTES * 2  # text and ids
    add(
        "prompts", rows * p.prompts.max_tokens, f"{rows:,} prompts of at most {p.prompts.max_tokens} tokens", rows * 400
    )
    add("generate", answers, answers_basis, answers * text)
    for name, count in zip(("held_self", "held_people"), held, strict=True):
        tokens = count * p.bench.max_tokens
        add(name, tokens, f"{count} prompts of at most {p.bench.max_tokens} tokens", tokens * text, like="generate")
    for name in ("tokenize", "mix"):
        add(name, total, total_basis, total * JSON_BYTES)
    add("vocab", answers, "response tokens", 9 * _vocabulary(target) if target else None)
    guesses["hidden"] = _states(timed, total, total_basis, config)
    guesses["train"] = _training(p.train, timed, total, answers, total_basis, config)
    size = 2 * file_parameters(config) if config else None
    why = f"{file_parameters(config) / 1e6:,.1f} M parameters in bf16" if config else _no_config()
    guesses["export"] = Guess("export", None, None, size, None, (why, "time unknown, mostly writing the file"))
    small = ("time unknown, seconds to minutes",)
    guesses["audit"] = Guess("audit", None, None, 0, None, small)
    guesses["predict"] = Guess("predict", sum(held) * p.bench.max_tokens, None, 0, None, small)
    for name in ("generate", "held_self", "held_people"):
        asked = guesses[name].tokens or 0
        prompts = max(0, total - answers) if name == "generate" else sum(held) * p.prompts.max_tokens
        guesses[name] = _asked(guesses[name], p.generate, prompts, asked)
    if answers_basis.startswith("at most"):
        limited = {"generate", "vocab", *(() if assume.tokens is not None else ("tokenize", "mix", "hidden"))}
        guesses |= {name: replace(guesses[name], most=True) for name in limited}
    return [_priced(guesses[stage.name], assume.price) for stage in STAGES if stage.name in guesses]


def _states(timed: Any, total: int, basis: str, config: DraftConfig | None) -> Guess:
    seconds, rate = timed("hidden", total)
    if config is None:
        return Guess("hidden", total, seconds, None, None, (basis, rate, _no_config()))
    per_token = bytes_per_token(config.hidden_size, len(config.aux_layers))
    why = (
        f"{per_token:,} bytes a token: {len(config.aux_layers)} captures and the last state, {config.hidden_size} wide"
    )
    return Guess("hidden", total, seconds, total * per_token, None, (basis, rate, why))


def _training(table: TrainTable, timed: Any, total: int, answers: int, basis: str, config: DraftConfig | None) -> Guess:
    if table.steps:
        passes = table.steps * table.batch_tokens / max(1, total)
        seconds, budget = timed("train", round(answers * passes))
        budget = f"{table.steps:,} steps of {table.batch_tokens:,} tokens (pipeline.train.steps); {budget}"
    elif table.epochs:
        seconds, budget = timed("train", round(answers * table.epochs))
        budget = f"{table.epochs:g} passes (pipeline.train.epochs); {budget}"
    else:
        seconds = 60 * table.minutes
        budget = f"{table.minutes:g} minutes are its budget (pipeline.train.minutes)"
    if config is None:
        return Guess("train", total, seconds, None, None, (basis, budget, _no_config()))
    trained = file_parameters(config) - (0 if table.train_head else parameters(config)["lm_head.weight"])
    disk = 4 * trained * (CHECKPOINTS * VECTORS + 1)
    held = f"{training_parameters(config) / 1e6:,.1f} M parameters in memory, {trained / 1e6:,.1f} M of them trained"
    kept = "checkpoints: two kept and one being written, weights and two moments in fp32"
    return Guess("train", total, seconds, disk, None, (basis, budget, held, kept))


def _rows(table: PromptsTable, runs: list[Run]) -> tuple[int, str]:
    """(prompts to answer, what is missing in that number). Rows of a source are counted by `prompts`, not before."""
    if made := _made(runs):
        return made, ""
    rows = table.self_written + (SEEDS if table.seeds else 0) + sum(source.rows for source in table.sources)
    unknown = [source.name for source in table.sources if not source.rows and not source.tokens]
    if not unknown:
        return rows, ""
    return rows, f"without {', '.join(unknown)}: its rows are counted by `prompts` (until then --assume tokens=N)"


def _made(runs: list[Run]) -> int:
    """Prompts that the newest run of `prompts` has made; 0: none has."""
    for run in reversed(runs):
        told = run.result.get("train") if run.name == "prompts" and run.status == "done" else None
        if isinstance(told, int) and told:
            return told
    return 0


def _share(tokens: int, runs: list[Run]) -> tuple[float, str]:
    """(share of response tokens in so many tokens, why)."""
    for run in reversed(runs):
        if run.name == "tokenize" and run.status == "done" and run.result.get("tokens"):
            share = run.result["response_tokens"] / run.result["tokens"]
            return share, f"{tokens:,} tokens assumed, {share:.0%} of them responses, as in {run.run}"
    return 1.0, f"at most: all of the {tokens:,} tokens assumed"


def _asked(guess: Guess, table: GenerateTable, prompts: int, responses: int) -> Guess:
    """Money for other people's servers: all tokens at the dearest price, and no more than the cap."""
    if not table.endpoints:
        return guess
    costs = [
        (e.price_in * prompts + e.price_out * responses) / 1e6
        for e in table.endpoints
        if e.price_in is not None and e.price_out is not None
    ]
    dearest = max(costs) if len(costs) == len(table.endpoints) else None
    if dearest is None and table.max_cost is None:
        return replace(guess, basis=(*guess.basis, "money unknown: an endpoint has no price"))
    if dearest is None or (table.max_cost is not None and table.max_cost < dearest):
        return replace(guess, money=table.max_cost, basis=(*guess.basis, "money: at most max_cost"))
    return replace(guess, money=dearest, basis=(*guess.basis, "money: at most, all tokens at the dearest endpoint"))


def _answers(longest: int, rows: int, runs: list[Run]) -> tuple[int, str]:
    """(response tokens, why)."""
    for run in reversed(runs):
        told = run.result.get("rows", {}).get("out") if run.name == "generate" and run.status == "done" else None
        if told:
            mean = run.result["response_tokens"] / told
            return round(rows * mean), f"{rows:,} answers of {mean:,.0f} tokens, the mean of {run.run}"
    return rows * longest, f"at most: {rows:,} answers of {longest:,} tokens, each as long as max_tokens"


def _tokens(
    rows: int, answers: int, basis: str, longest_prompt: int, runs: list[Run], assume: Assumptions
) -> tuple[int, str]:
    """(tokens of all training rows, why)."""
    if assume.tokens is not None:
        return assume.tokens, f"{assume.tokens:,} tokens assumed"
    for run in reversed(runs):
        told = run.result.get("rows", {}).get("out") if run.name == "tokenize" and run.status == "done" else None
        if told:
            prompts = (run.result["tokens"] - run.result["response_tokens"]) / told
            return answers + round(rows * prompts), f"{basis}; prompts of {prompts:,.0f} tokens, the mean of {run.run}"
    return answers + rows * longest_prompt, f"{basis}; prompts of at most {longest_prompt} tokens"


def _vocabulary(target: Mapping[str, Any]) -> int:
    return int((target.get("text_config") or target).get("vocab_size", 0))


def _no_config() -> str:
    return "size unknown: the target's config.json was not read (--target-config FILE)"


def _priced(guess: Guess, price: float | None) -> Guess:
    """The machine's hours beside what others ask."""
    if price is None or guess.seconds is None:
        return guess
    return replace(guess, money=(guess.money or 0.0) + guess.seconds / 3600 * price)


def total(guesses: Iterable[Guess]) -> Total:
    """The sums of what is known, and whose part is missing."""
    all_ = list(guesses)
    prices = [guess.money for guess in all_ if guess.money is not None]
    return Total(
        seconds=sum(guess.seconds or 0.0 for guess in all_),
        disk=sum(guess.disk or 0 for guess in all_),
        money=sum(prices) if prices else None,
        unknown_time=tuple(guess.stage for guess in all_ if guess.seconds is None),
        unknown_disk=tuple(guess.stage for guess in all_ if guess.disk is None),
    )
