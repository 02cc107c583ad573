"""Plain against speculative, honestly: the same held-out prompts, interleaved launches, every round kept.

A round is one launch of one arm's server: it is started, asked every prompt of every kind one at a time by a job on its
own host, and stopped. The order of the arms turns from round to round (A B, B A, A B, …), so that a machine that grows
slower favours neither. Nothing is dropped: a round that failed is in the record with its reason.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any, Literal

from msgspec import to_builtins

from pipeline import server
from pipeline.recipe import folder, pipeline_of
from pipeline.runs import Update, Work, alone, finished_runs, run_folder, started_runs
from pipeline.stage_runner import read_json, read_jsonl, run_module
from pipeline.stages.protocol import write_json
from state import benchmarks as book
from state import events
from state.benchmarks import Arm, BenchRecord, Dataset, DatasetKind, Round, Settings
from state.errors import REFUSED, UNREACHABLE, RigbookError
from state.ngrams import lookup_accept_length, repetition_rate

KINDS: tuple[Literal["self", "people"], ...] = ("self", "people")
TROUBLE = {"warning", "error", "failed", "lost", "unreachable"}


async def compare(work: Work, baseline: str, speculative: str) -> list[BenchRecord]:
    """Benchmark two profiles against each other on both kinds of held-out prompts, and record it.

    Returns one record a kind of prompt. Servers of the two profiles that run already are stopped first: a round is a
    launch. One that was interrupted goes on after its last whole launch, if nothing that it compares has changed.
    Raises what `server.start` raises, and `bench.running`; a failed round is recorded, and the others go on.
    """
    pipeline = pipeline_of(work.project)
    names = (baseline, speculative)
    busy = RigbookError("bench.running", "another benchmark of this project is at work", exit_code=REFUSED)
    with alone(work.project.root / ".rigbook" / "bench.lock", busy):
        settings = await _settings(work, names)
        run = _interrupted(work, settings)
        resumed = run is not None
        if run is None:
            run = f"bench-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
            work.journal.append(
                events.RunStarted(
                    run=run,
                    what="bench",
                    name=f"{baseline} against {speculative}",
                    host=pipeline.host,
                    settings=settings,
                )
            )
        began = time.monotonic()
        try:
            records = await _measure(work, run, names)
        except RigbookError as error:
            if error.exit_code == UNREACHABLE:
                raise  # the same as an interruption: the next call goes on
            result = {"error": str(error)}
            seconds = time.monotonic() - began
            work.journal.append(events.RunFinished(run=run, status="failed", result=result, seconds=seconds))
            raise
        forecast = await read_json(
            await work.rig.link(pipeline.host), f"{folder(work.project, 'predict')}/manifest.json"
        )
        gaps = [gap for record in records if (gap := prediction_gap(record, forecast)) is not None]
        for record in records:
            if resumed:
                record.notes = [*record.notes, "Interrupted, and gone on with later: the launches are not of one time."]
        work.journal.append(
            *(events.BenchmarkRecorded(run=run, bench=record) for record in records),
            *(events.Warned(where=run, check="predict.gap", message=gap) for gap in gaps),
            events.RunFinished(
                run=run,
                status="done",
                exit=0,
                result={record.dataset.kind: record.verdict.text if record.verdict else "" for record in records},
                seconds=time.monotonic() - began,
            ),
        )
        return records


def prediction_gap(record: BenchRecord, forecast: dict[str, Any] | None) -> str | None:
    """What `predict` foretold for this kind of prompts against what the server reached, in a note too."""
    if forecast is None or not forecast.get("complete"):
        return None
    predicted = forecast["result"].get(record.dataset.kind, {}).get("accept_len")
    if not isinstance(predicted, int | float):
        return None
    gap = book.prediction_gap(record.arms[-1], predicted, int(forecast["settings"].get("steps", 3)))
    if gap is not None:
        record.notes = [*record.notes, f"{gap[0].upper()}{gap[1:]}."]
    return gap


async def _settings(work: Work, names: tuple[str, str]) -> dict[str, Any]:
    """All that the comparison depends on: equal settings, same benchmark."""
    pipeline = pipeline_of(work.project)
    link = await work.rig.link(pipeline.host)
    made = {}
    for stage in ("prompts", "export"):
        manifest = await read_json(link, f"{folder(work.project, stage)}/manifest.json") or {}
        made[stage] = {name: one["sha256"] for name, one in manifest.get("artifacts", {}).items()}
    profiles = {name: server.plan(work.project, name).settings for name in names}
    return {**to_builtins(pipeline.bench), "profiles": profiles, "made": made}


def _interrupted(work: Work, settings: dict[str, Any]) -> str | None:
    """The run to go on with. Others that never ended are recorded as lost: we hold the lock, nobody works on them."""
    finished = finished_runs(work.journal)
    found = None
    for run, started in started_runs(work.journal).items():
        if started.what != "bench" or run in finished:
            continue
        if started.settings == settings:
            found = run
        else:
            lost = {"error": "interrupted, and what it compares has changed since"}
            work.journal.append(events.RunFinished(run=run, status="lost", result=lost))
    return found


async def _measure(work: Work, run: str, names: tuple[str, str]) -> list[BenchRecord]:
    settings = pipeline_of(work.project).bench
    # Twelve launches would say what one launch says: only trouble and the rounds themselves are told.
    quiet = replace(work, report=lambda update: work.report(update) if update.kind in TROUBLE else None)
    kept = run_folder(work.project, run) / "launches.json"
    launches: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    order = [name for number in range(settings.rounds) for name in (names if number % 2 == 0 else names[::-1])]
    for place, name in list(enumerate(order))[len(launches) :]:
        launches.append(await _launch(work, quiet, run, name, place))
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, launches)
    return [await _record(work, run, kind, names, launches) for kind in KINDS]


async def _launch(work: Work, quiet: Work, run: str, name: str, order: int) -> dict[str, Any]:
    """One launch of one arm, asked both kinds of prompts. Plain data, so that an interrupted benchmark keeps it."""
    await server.stop(quiet, name)
    launched = await server.start(quiet, name)
    info = (await server.status(work, name))["info"]
    rounds, folders = {}, {}
    for kind in KINDS:
        folders[kind] = f"{folder(work.project, 'bench')}/{run}/{order}-{launched}-{kind}"
        one = await _round(quiet, folders[kind], name, kind, order)
        rounds[kind] = asdict(one)
        work.report(Update(run, f"{kind} round {order // 2 + 1}", "round", {"arm": name, **rounds[kind]}))
    await server.stop(quiet, name)
    return {"profile": name, "info": info, "rounds": rounds, "folders": folders}


async def _round(work: Work, out: str, name: str, kind: DatasetKind, order: int) -> Round:
    """One kind of prompt, asked of one launch. A round that failed is excluded with its reason, not dropped."""
    settings = pipeline_of(work.project).bench
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
        return Round(order=order, run=outcome.run, excluded=outcome.error or outcome.status)
    result = outcome.result
    return Round(
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


async def _record(
    work: Work,
    run: str,
    kind: DatasetKind,
    names: tuple[str, str],
    launches: list[dict[str, Any]],
) -> BenchRecord:
    pipeline = pipeline_of(work.project)
    assert work.project.target is not None
    link = await work.rig.link(pipeline.host)
    arms = {name: Arm(profile=name) for name in names}
    infos = {launch["profile"]: launch["info"] for launch in launches}
    ids: list[list[int]] = []
    for launch in launches:
        one = Round(**launch["rounds"][kind])
        arms[launch["profile"]].rounds.append(one)
        if launch["profile"] == names[0] and not one.excluded:
            # What n-gram lookup would reach on the same output: plain decoding's, which no drafter touched.
            rows = await read_jsonl(link, f"{launch['folders'][kind]}/rows.jsonl")
            ids += [row["output_ids"] for row in rows if row.get("output_ids")]
    prompts = await read_json(link, f"{folder(work.project, 'prompts')}/manifest.json") or {}
    target = await read_json(link, f"{work.project.target.path}/../manifest.json") or {}
    drafter = await read_json(link, f"{folder(work.project, 'export')}/manifest.json") or {}
    for name, arm in arms.items():
        profile = work.project.profile(name)
        arm.engine = profile.engine
        arm.engine_version = str(infos.get(name, {}).get("version", ""))
        arm.dtype = str(profile.args.get("dtype", ""))
        arm.speculative = to_builtins(profile.speculative) if profile.speculative else None
        arm.draft = _digest(drafter, "drafter") if profile.draft else None
        arm.args = dict(profile.args)
    plain, speculative = list(arms.values())
    record = BenchRecord(
        name=f"{plain.profile} against {speculative.profile}",
        arms=[plain, speculative],
        dataset=Dataset(
            id=f"held_{kind}", sha256=_digest(prompts, f"held_{kind}"), kind=kind, n=pipeline.bench.prompts
        ),
        settings=Settings(max_tokens=pipeline.bench.max_tokens, temperature=0.0, concurrency=1, warmup=1, cache="no"),
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
    notes = []
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
