"""The target's own responses to prompts, through any OpenAI-compatible servers, several at once.

A drafter learns what its target says, so responses are generated anew, never taken from a data set. Rows are appended
as they come, in the order of completion, durable before they are counted; a killed stage asks only for those that are
missing. What a row is depends on the target, the prompt, its seed and the sampling; never on which server answered,
beside which others, or in what order: so servers may be changed between two starts, and what is there stays.

inputs    prompts (rows of `prompts`); budgets ({source: response tokens}), where there are any; model (the target's
          directory), to know whether it thinks
settings  max_tokens, temperature; seed (0), extra ({}: more fields of every request), token_budget (0: none; response
          tokens in all), reasoning (auto, yes, no)
transient base_url, profile, concurrency: the project's own server ("": none), its name, requests at once (0: find out)
          endpoints ([]): further servers {name, base_url, model, key, headers, body, price_in, price_out (dollars per
          million tokens), concurrency, stream}; `key` says where the key is: {"file": path} or {"env": name}
          max_cost (none): dollars that this folder may cost in all; max_unfinished (1): share of responses that may
          end at max_tokens
output    rows.jsonl    the prompt's row + response, reasoning (where there was any), finish_reason, completion_tokens,
                        prompt_tokens, endpoint; output_ids, prompt_ids and usd (where they are known)
          errors.jsonl  the rows without an answer, each with the reason; asked again by a resumed run
          spent.jsonl   money that no row bears (`purse`)
result    rows, response_tokens, prompt_tokens, finish_reasons, with_ids, with_reasoning, left_out (rows by source, for
          their budget; they are the skipped ones), overshoot (tokens over a budget), usd, seconds, tok_s, endpoints
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.stages.allot import Allotment, Row
from pipeline.stages.answers import split_reasoning
from pipeline.stages.client import run_async
from pipeline.stages.dispatch import Dispatch, Lane
from pipeline.stages.durable import Appended
from pipeline.stages.endpoint import Busy, Denied, Endpoint, Gone, Rejected, read_key, session
from pipeline.stages.pace import Pace
from pipeline.stages.protocol import Stage, log, main, read_json, read_jsonl, write_jsonl
from pipeline.stages.purse import FREE, Price, Purse
from pipeline.stages.reasons import Thinking, thinking

PROBATION = 16  # answers of a server that are kept back until one of them holds the reasoning of a model that thinks
REFUSALS = 32  # rows refused by the servers before any was answered: it is the request, not the rows
FEW = 200  # responses before their share of unfinished ones, or their mean price, is judged
WARN_UNFINISHED = 0.1


@dataclass
class Totals:
    """What the rows on the disk add up to."""

    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    with_ids: int = 0
    with_reasoning: int = 0
    usd: float = 0.0
    finish: Counter[str] = field(default_factory=Counter)
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)  # source -> (rows, response tokens)

    def add(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self.tokens += row["completion_tokens"]
        self.prompt_tokens += row.get("prompt_tokens", 0)
        self.with_ids += "output_ids" in row
        self.with_reasoning += "reasoning" in row
        self.usd += row.get("usd", 0.0)
        self.finish[str(row["finish_reason"])] += 1
        source = str(row.get("source", "?"))
        rows, tokens = self.sources.get(source, (0, 0))
        self.sources[source] = rows + 1, tokens + row["completion_tokens"]

    @property
    def unfinished(self) -> float:
        """Share of responses that ended at the token limit."""
        return self.finish["length"] / self.rows if self.rows else 0.0


def run(stage: Stage) -> dict[str, Any]:
    rows = list(read_jsonl(stage.inputs["prompts"]))
    ids = Counter(row["id"] for row in rows)
    if twice := [name for name, count in ids.items() if count > 1]:
        stage.refuse("generate.ids", f"prompt ids are not unique: {twice[:3]}")
    lanes = [Lane(endpoint, Pace(endpoint.concurrency)) for endpoint in endpoints(stage)]
    had = Totals()
    out = Appended(stage.out / "rows.jsonl", had.add)
    work = _Work(stage, rows, lanes, had, out)
    began, before = time.monotonic(), had.tokens
    try:
        run_async(work.run())
    finally:
        out.close()
        work.purse.close()
    seconds = time.monotonic() - began
    return work.result() | {
        "seconds": seconds,
        "tok_s": (had.tokens - before) / seconds,
        "endpoints": {lane.endpoint.name: _told(lane) for lane in lanes},
    }


def endpoints(stage: Stage) -> list[Endpoint]:
    """The servers to ask, their keys read. Raises Refused where a setting or a key makes no sense."""
    settings = stage.settings
    found = []
    if settings.get("base_url"):
        name = settings.get("profile") or "server"
        found.append(Endpoint(name, settings["base_url"], concurrency=int(settings["concurrency"])))
    for given in settings.get("endpoints", ()):
        key = read_key(given["name"], given["key"]) if given.get("key") else None
        price = Price(given.get("price_in"), given.get("price_out"))
        found.append(
            Endpoint(
                name=given["name"],
                base_url=given["base_url"],
                model=given.get("model", "default"),
                key=key,
                headers=dict(given.get("headers", {})),
                body=dict(given.get("body", {})),
                price=price,
                concurrency=int(given.get("concurrency", 0)),
                stream=bool(given.get("stream", True)),
            )
        )
        if settings.get("max_cost") is not None and not price.known:
            stage.refuse(
                "generate.no-price",
                f"max_cost is set, but what endpoint {given['name']!r} costs is not known: give its price_in and "
                "price_out in dollars per million tokens (0 where it is free)",
            )
    if not found:
        stage.refuse("generate.no-endpoint", "there is no server to ask: neither a profile nor an endpoint is given")
    if len({endpoint.name for endpoint in found}) < len(found):
        stage.refuse("generate.endpoint-twice", "two endpoints have the same name (the profile's is one of them)")
    return found


class _Work:
    """The stage at work: what is judged about answers, beside how they are got (`dispatch`)."""

    def __init__(self, stage: Stage, rows: list[dict[str, Any]], lanes: list[Lane], had: Totals, out: Appended) -> None:
        self.stage, self.lanes, self.totals, self.out = stage, lanes, had, out
        self.count = len(rows)
        settings = stage.settings
        self.max_tokens = int(settings["max_tokens"])
        self.max_unfinished = float(settings.get("max_unfinished", 1.0))
        self.body = {"max_tokens": self.max_tokens, "temperature": float(settings["temperature"])}
        self.body |= settings.get("extra", {})
        self.seed = int(settings.get("seed", 0))
        self.thinking: Thinking | None = thinking(stage.inputs.get("model"), settings.get("reasoning", "auto"))
        self.kept_back: dict[str, list[dict[str, Any]]] = {lane.endpoint.name: [] for lane in lanes}
        self.proven: set[str] = set() if self.thinking else set(self.kept_back)
        self.errors: list[dict[str, Any]] = []
        self.answers = 0  # of this start
        self.dispatch: Dispatch | None = None
        # Rows that are not on the disk yet: dollars that are set aside for each, and that it cost.
        self.set_aside: dict[str, tuple[float, float]] = {}
        budgets = read_json(stage.inputs["budgets"]) if "budgets" in stage.inputs else None
        self.budget = int(settings.get("token_budget", 0))
        missing = [row for row in rows if row["id"] not in out.done]
        cap = settings.get("max_cost")
        self.purse = Purse(stage.out / "spent.jsonl", None if cap is None else float(cap), self.max_tokens)
        self.purse.spent += had.usd
        self.allotment = Allotment(missing, dict(had.sources), self.budget, budgets or {}, self.max_tokens)
        self.out.seen = self.durable

    async def run(self) -> None:
        if not self.allotment.pending:
            return
        _many_sockets()
        self._affordable(self.allotment.expected() if self.budget else 0.0, "before the first request")
        async with session() as http:
            await self._greet(http)
            self.dispatch = Dispatch(
                self.lanes,
                self.allotment,
                self.purse,
                lambda lane, row: lane.endpoint.ask(http, self.request(row), self.max_tokens),
                self.answered,
                self.failed,
                http,
            )
            keeper, work = asyncio.ensure_future(self.out.keep()), asyncio.ensure_future(self.dispatch.run())
            try:
                # The disk's trouble ends the work as well as the work's own.
                await asyncio.wait({keeper, work}, return_when=asyncio.FIRST_COMPLETED)
                for task in (keeper, work):
                    if task.done():
                        task.result()
            finally:
                for task in (work, keeper):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task
        for lane in self.lanes:
            self._released(lane, at_the_end=True)

    def request(self, row: Row) -> dict[str, Any]:
        # The seed is the row's own: an answer does not depend on which others were asked, or in what order.
        return {"messages": row.data["messages"], "seed": seed_of(self.seed, row.data["id"])} | self.body

    def answered(self, lane: Lane, row: Row, fields: dict[str, Any], most: float) -> bool:
        """Judge an answer. Returns whether it is kept. `most`: dollars set aside for it."""
        if self.thinking is not None:
            fields = split_reasoning(fields, self.thinking.opening, self.thinking.closing, self.thinking.opened)
        if not fields["response"].strip() and not fields.get("reasoning", "").strip():
            tokens, finish = fields["completion_tokens"], fields["finish_reason"]
            self.allotment.settle(row, None)
            self.failed(row, f"the answer is empty ({tokens} tokens, finish_reason {finish})")
            return False
        self.answers += 1
        self.set_aside[row.data["id"]] = most, fields.get("usd", 0.0)
        self.allotment.settle(row, fields["completion_tokens"])
        self.kept_back[lane.endpoint.name].append(row.data | fields | {"endpoint": lane.endpoint.name})
        self._released(lane, at_the_end=False)
        if self.answers == FEW:
            mean = self.allotment.expected()
            self._affordable(mean, f"after {FEW} answers")
        return True

    def failed(self, row: Row, reason: str) -> None:
        self.errors.append(row.data | {"error": reason})
        self._progress()
        if len(self.errors) >= REFUSALS and not self.answers and not self.totals.rows:
            self.stage.refuse("generate.nothing", f"the first {REFUSALS} prompts got no response: {reason}")

    def durable(self, row: dict[str, Any]) -> None:
        """A row is on the disk."""
        self.totals.add(row)
        # Only now: a row that a kill would lose is money that only the purse's file knows of.
        if row["id"] in self.set_aside:
            self.purse.back(*self.set_aside.pop(row["id"]))
        if self.dispatch is not None:
            self.dispatch.wake()
        self._progress()
        total = self.totals
        if total.rows >= FEW and self.max_unfinished < 1:
            # Two standard errors: the first responses to come are not a fair sample.
            doubt = 2 * (max(total.unfinished * (1 - total.unfinished), 0.01) / total.rows) ** 0.5
            if total.unfinished - doubt > self.max_unfinished:
                self._unfinished()

    def result(self) -> dict[str, Any]:
        stage, total = self.stage, self.totals
        self.errors.sort(key=lambda row: str(row["id"]))
        write_jsonl(stage.out / "errors.jsonl", self.errors)
        first = self.errors[0]["error"] if self.errors else "-"
        if not total.rows:
            stage.refuse("generate.nothing", f"no prompt got a response: {first}")
        if self.errors:
            stage.warn("generate.errors", f"{len(self.errors)} of {self.count} prompts got no response: {first}")
        if total.unfinished > self.max_unfinished:
            self._unfinished()
        if total.unfinished > WARN_UNFINISHED:
            stage.warn(
                "generate.unfinished",
                f"{total.unfinished:.0%} of the responses hit max_tokens ({self.max_tokens}) before they ended",
            )
        for source, tokens in self.allotment.overshoot().items():
            log(f"generate: the budget of {source or 'all sources'} is reached, and {tokens} tokens over it")
        skipped = sum(self.allotment.left_out.values())
        stage.artifact("rows", stage.out / "rows.jsonl")
        stage.artifact("errors", stage.out / "errors.jsonl")
        return {
            "rows": {"in": self.count, "out": total.rows, "errors": len(self.errors), "skipped": skipped},
            "response_tokens": total.tokens,
            "prompt_tokens": total.prompt_tokens,
            "finish_reasons": dict(sorted(total.finish.items())),
            "with_ids": total.with_ids,
            "with_reasoning": total.with_reasoning,
            "left_out": dict(sorted(self.allotment.left_out.items())),
            "overshoot": self.allotment.overshoot(),
            "usd": self.purse.spent,
        }

    async def _greet(self, http: Any) -> None:
        """Ask every server whether it serves. Refuses where none does; one that does not is told, and tried again."""
        words = []
        for lane in self.lanes:
            name, url = lane.endpoint.name, lane.endpoint.base_url
            try:
                await lane.endpoint.look(http)
            except Denied as error:
                lane.closed = str(error)
                words.append(f"{name} at {url} refuses us: {error}")
            except (Busy, Gone, Rejected) as error:
                lane.aside = lane.since = time.monotonic()
                lane.trouble, lane.words = 1, str(error)
                words.append(f"no server answers as {name} at {url}: {error}")
        if len(words) == len(self.lanes):
            self.stage.refuse("server.unreachable", "; ".join(words))
        for said in words:
            self.stage.warn("generate.endpoint", f"{said}; the others are asked")

    def _released(self, lane: Lane, at_the_end: bool) -> None:
        """Hand on what a server answered, once it is known to tell the reasoning of a model that thinks."""
        name = lane.endpoint.name
        rows = self.kept_back[name]
        if self.thinking is not None and name not in self.proven and rows:
            if any("reasoning" in row for row in rows):
                self.proven.add(name)
            elif len(rows) >= PROBATION or at_the_end:
                what = f"none of the first {len(rows)} responses of {name} holds any reasoning"
                if self.thinking.sure:
                    self.stage.refuse(
                        "generate.no-reasoning",
                        f"{what}, and the target thinks before it answers: start its server with the reasoning parser "
                        'of this model, or say reasoning = "no" under [pipeline.generate]. None of them was kept',
                    )
                self.stage.warn(
                    "generate.no-reasoning",
                    f"{what}. The target's template knows {self.thinking.opening}: if it is to think, start the server "
                    'with its reasoning parser and say reasoning = "yes" under [pipeline.generate]; else say "no"',
                )
                self.proven.add(name)
        if name in self.proven:
            for row in rows:
                self.out.put(row)
            rows.clear()

    def _affordable(self, tokens: float, when: str) -> None:
        """Refuse where what is still to come would cost more than the cap leaves. `tokens`: of responses to come."""
        if self.purse.cap is None:
            return
        paid = [lane.endpoint.price for lane in self.lanes if not lane.closed and lane.endpoint.price != FREE]
        if not paid or len(paid) < len(self.lanes):
            return  # free ones go on when the money is at its end
        prompts = self.allotment.pending * self._mean_prompt()
        spent = self.purse.spent + sum(usd for _, usd in self.set_aside.values())
        dollars = spent + min(price.of(prompts, tokens) for price in paid)
        if dollars > self.purse.cap:
            self.stage.refuse(
                "generate.estimate",
                f"{when}: about ${dollars:,.2f} in all ({self.allotment.pending} prompts and {tokens:,.0f} response "
                f"tokens to come, ${spent:,.4f} spent), and max_cost is ${self.purse.cap:,.2f}. Raise it, "
                "or set token_budget",
            )

    def _mean_prompt(self) -> float:
        """Tokens of a prompt: as measured, or a quarter of its bytes."""
        if self.totals.rows:
            return self.totals.prompt_tokens / self.totals.rows
        row = self.allotment.peek()
        return sum(len(str(m.get("content", ""))) for m in row.data["messages"]) / 4 if row else 0.0

    def _unfinished(self) -> None:
        self.stage.refuse(
            "generate.unfinished",
            f"{self.totals.unfinished:.0%} of {self.totals.rows} responses hit max_tokens ({self.max_tokens}) before "
            f"they ended, and max_unfinished allows {self.max_unfinished:.0%}: raise max_tokens (in a new folder)",
        )

    def _progress(self) -> None:
        extra: dict[str, Any] = {"tokens": self.totals.tokens, "at_once": sum(lane.in_flight for lane in self.lanes)}
        extra |= {f"limit_{lane.endpoint.name}": f"{lane.pace.limit} ({lane.pace.why})" for lane in self.lanes}
        if self.purse.spent:
            extra["usd"] = self.purse.spent
        if self.budget:
            self.stage.progress(min(self.totals.tokens, self.budget), self.budget, "tokens", **extra)
        else:
            total = self.count - sum(self.allotment.left_out.values())
            effort = (self.totals.tokens, self.allotment.expected())
            self.stage.progress(self.totals.rows + len(self.errors), total, "responses", effort, **extra)


def seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")


def _told(lane: Lane) -> dict[str, Any]:
    names = ("answers", "tokens", "lost", "busy", "usd")
    said = {name: value for name, value in asdict(lane).items() if name in names}
    return said | {"limit": lane.pace.limit, "why": lane.pace.why, "closed": lane.closed}


def _many_sockets() -> None:
    """As many open files as the system gives: each request in flight is one, and 1,024 is a common default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main(run)
