"""Plain against speculative, honestly: the same held-out prompts, interleaved launches, every round kept.

A round is one launch of one arm's server: it is started, asked every prompt of every kind one at a time by a job on its
own host, and stopped. The order of the arms turns from round to round (A B, B A, A B, …), so that a machine that grows
slower favours neither. Nothing is dropped: a round that failed is in the record with its reason.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any, Literal

from pipeline import server
from pipeline.recipe import folder, pipeline_of
from pipeline.runs import Update, Work
from pipeline.stage_runner import read_json, read_jsonl, run_module
from state import benchmarks as book
from state import events
from state.benchmarks import Arm, BenchRecord, Dataset, DatasetKind, Round, Settings
from state.ngrams import lookup_accept_length, repetition_rate

KINDS: tuple[Literal["self", "people"], ...] = ("self", "people")
TROUBLE = {"warning", "error", "failed", "lost", "unreachable"}


async def compare(work: Work, baseline: str, speculative: str) -> list[BenchRecord]:
    """Benchmark two profiles against each other on both kinds of held-out prompts, and record it.

    Returns one record a kind of prompt. Servers of the two profiles that run already are stopped first: a round is a
    launch. Raises what `server.start` raises; a failed round is recorded, and the others go on.
    """
    pipeline = pipeline_of(work.project)
    run = f"bench-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    work.journal.append(
        events.RunStarted(
            run=run,
            what="bench",
            name=f"{baseline} against {speculative}",
            host=pipeline.host,
            settings=pipeline.bench.model_dump(),
        )
    )
    began = time.monotonic()
    try:
        records = await _measure(work, run, (baseline, speculative))
    except BaseException as error:
        # An interrupted benchmark is a result too: the book says that it was started and did not end.
        work.journal.append(
            events.RunFinished(
                run=run,
                status="failed" if isinstance(error, Exception) else "stopped",
                result={"error": str(error) or type(error).__name__},
                seconds=time.monotonic() - began,
            )
        )
        raise
    work.journal.append(
        *(events.BenchmarkRecorded(run=run, bench=record) for record in records),
        events.RunFinished(
            run=run,
            status="done",
            exit=0,
            result={record.dataset.kind: record.verdict.text if record.verdict else "" for record in records},
            seconds=time.monotonic() - began,
        ),
    )
    return records


async def _measure(work: Work, run: str, names: tuple[str, str]) -> list[BenchRecord]:
    settings = pipeline_of(work.project).bench
    # Twelve launches would say what one launch says: only trouble and the rounds themselves are told.
    quiet = replace(work, report=lambda update: work.report(update) if update.kind in TROUBLE else None)
    arms = {kind: {name: Arm(profile=name) for name in names} for kind in KINDS}
    outputs: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {name: [] for name in names} for kind in KINDS}
    infos: dict[str, dict[str, Any]] = {}
    order = 0
    for number in range(settings.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            await server.stop(quiet, name)
            await server.start(quiet, name)
            infos[name] = (await server.status(work, name))["info"]
            for kind in KINDS:
                one, rows = await _round(quiet, run, name, kind, number, order)
                arms[kind][name].rounds.append(one)
                outputs[kind][name] += rows
                work.report(Update(run, f"{kind} round {number + 1}", "round", {"arm": name, **asdict(one)}))
            await server.stop(quiet, name)
            order += 1
    return [await _record(work, run, kind, arms[kind], outputs[kind], infos) for kind in KINDS]


async def _round(
    work: Work, run: str, name: str, kind: DatasetKind, number: int, order: int
) -> tuple[Round, list[dict[str, Any]]]:
    """One kind of prompt, asked of one launch. A round that failed is excluded with its reason, not dropped."""
    settings = pipeline_of(work.project).bench
    out = f"{folder(work.project, 'bench')}/{run}/{name}-{kind}-{number}"
    wanted = {
        "stage": "load",
        "out": out,
        "inputs": {
            "model": work.project.target.path if work.project.target else "",
            "prompts": f"{folder(work.project, 'prompts')}/held_{kind}.jsonl",
        },
        "settings": {
            "base_url": f"http://127.0.0.1:{work.project.profile(name).port}",
            "limit": settings.prompts,
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
            "concurrency": 1,
            "warmup": 1,
            "ignore_eos": False,
        },
    }
    outcome = await run_module(work, f"load-{name}-{kind}", "load", wanted, what="bench")
    if outcome.status != "done":
        return Round(order=order, run=outcome.run, excluded=outcome.error or outcome.status), []
    result = outcome.result
    one = Round(
        order=order,
        run=outcome.run,
        requests=result["requests"],
        errors=result["errors"],
        output_tokens=result["output_tokens"],
        seconds=result["seconds"],
        tok_s=result["tok_s"],
        verify_steps=result.get("verify_steps"),
        accepted_drafts=result.get("accepted_drafts"),
        proposed_drafts=result.get("proposed_drafts"),
        accept_len=result.get("accept_len"),
        accept_histogram=result.get("accept_histogram") or [],
        per_position=result.get("per_position") or [],
    )
    link = await work.rig.link(pipeline_of(work.project).host)
    return one, await read_jsonl(link, f"{out}/rows.jsonl")


async def _record(
    work: Work,
    run: str,
    kind: DatasetKind,
    arms: dict[str, Arm],
    outputs: dict[str, list[dict[str, Any]]],
    infos: dict[str, dict[str, Any]],
) -> BenchRecord:
    pipeline = pipeline_of(work.project)
    assert work.project.target is not None
    link = await work.rig.link(pipeline.host)
    prompts = await read_json(link, f"{folder(work.project, 'prompts')}/manifest.json") or {}
    target = await read_json(link, f"{work.project.target.path}/../manifest.json") or {}
    drafter = await read_json(link, f"{folder(work.project, 'export')}/manifest.json") or {}
    for name, arm in arms.items():
        profile = work.project.profile(name)
        arm.engine = profile.engine
        arm.engine_version = str(infos.get(name, {}).get("version", ""))
        arm.dtype = str(profile.args.get("dtype", ""))
        arm.speculative = profile.speculative.model_dump() if profile.speculative else None
        arm.draft = _digest(drafter, "drafter") if profile.draft else None
        arm.args = dict(profile.args)
    plain, speculative = list(arms.values())
    ids = [row["output_ids"] for row in outputs[plain.profile] if row.get("output_ids")]
    record = BenchRecord(
        name=f"{plain.profile} against {speculative.profile}",
        arms=[plain, speculative],
        dataset=Dataset(
            id=f"held_{kind}", sha256=_digest(prompts, f"held_{kind}"), kind=kind, n=pipeline.bench.prompts
        ),
        settings=Settings(max_tokens=pipeline.bench.max_tokens, temperature=0.0, concurrency=1, warmup=1, cache="none"),
        target={"name": work.project.target.name or work.project.target.path, "sha256": _digest(target, "model")},
        host=pipeline.host,
        system=_system(infos),
        client="pipeline.stages.load",
        ngram_accept_len=lookup_accept_length(ids, steps=pipeline.bench.steps) if ids else None,
        repetition_rate=repetition_rate(ids) if ids else None,
    )
    record.verdict = book.judge(record)
    length, slow, fast = book.accept_len(speculative), book.tok_s(plain), book.tok_s(speculative)
    if length is not None and slow is not None and fast is not None:
        record.break_even = book.break_even_accept_len(length, slow.value, fast.value)
    record.notes = _why(record, length)
    return record


def _why(record: BenchRecord, length: float | None) -> list[str]:
    """What the figures say, in words: also when they say that speculation does not pay here."""
    if length is None or record.break_even is None or record.verdict is None:
        return []
    notes = [
        f"Speculation pays here from an accept length of {record.break_even:.2f} on; this drafter reaches {length:.2f}."
    ]
    if record.verdict.kind == "worse":
        notes.append(
            "It is slower than plain decoding: verifying and drafting cost more than the accepted drafts save."
        )
    if record.ngram_accept_len is not None and record.ngram_accept_len >= length:
        notes.append(
            f"Looking up repeated n-grams would reach {record.ngram_accept_len:.2f} on the same output: "
            "the text repeats itself, and the drafter is not to thank."
        )
    return notes


def _digest(manifest: dict[str, Any], artifact: str) -> str:
    return str(manifest.get("artifacts", {}).get(artifact, {}).get("sha256", ""))


def _system(infos: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the server says about the machine that it runs on; the same for both arms."""
    info = next(iter(infos.values()), {})
    return {key: info[key] for key in ("cpu", "threads", "torch", "device", "gpu") if key in info}
