"""Running stages of the recipe: skip what is done, bring up the server that a stage needs, follow it to its end."""

from __future__ import annotations

import json
from typing import Any

from pipeline import server
from pipeline.recipe import StageDef, pipeline_of, spec
from pipeline.runs import Outcome, Update, Work, job_key, run_job, settle_all
from pipeline.stages.protocol import Refused, lasting, parse_object
from remote.connect import Link
from state.errors import REFUSED, RigbookError
from state.events import RunKind


async def run_stages(work: Work, stages: list[StageDef]) -> dict[str, Outcome]:
    """Run stages in order. Raises at the first that fails; what was done before stays done."""
    await settle_all(work)
    outcomes = {}
    for stage in stages:
        outcomes[stage.name] = await run_stage(work, stage)
    return outcomes


async def run_stage(work: Work, stage: StageDef) -> Outcome:
    """Run one stage of the recipe to its end, or find it done."""
    profile = stage.server(pipeline_of(work.project)) if stage.server is not None else None
    return await run_once(work, stage.module, spec(work.project, stage), profile)


async def run_once(work: Work, module: str, wanted: dict[str, Any], profile: str | None = None) -> Outcome:
    """Run a stage module to its end, or find its folder done. `profile`: the server that must answer while it runs."""
    name, host = wanted["stage"], pipeline_of(work.project).host
    manifest = await done_manifest(await work.rig.link(host), wanted)
    if manifest is not None:
        work.report(Update("", name, "skipped", {"result": manifest["result"]}))
        return Outcome("", "skipped", 0, manifest["result"], 0.0)
    if profile is not None:
        await server.start(work, profile)
    return (await run_module(work, name, module, wanted, what="stage")).check(name, host)


async def run_module(work: Work, name: str, module: str, wanted: dict[str, Any], *, what: RunKind) -> Outcome:
    """Run a stage module as a job on the pipeline's host, with `wanted` as its spec."""
    pipeline = pipeline_of(work.project)
    env = work.project.env(pipeline.env)
    document = json.dumps(wanted).encode()
    return await run_job(
        work,
        pipeline.host,
        name=name,
        what=what,
        argv=[env.python, *launcher(wanted), "-m", f"pipeline.stages.{module}", "--spec", "{job}/stage.json"],
        files={"stage.json": document},
        env=dict(env.vars),
        settings=wanted["settings"],
        key=job_key({**wanted, "settings": lasting(wanted)}),  # a job that asks elsewhere is the same work
    )


def launcher(wanted: dict[str, Any]) -> list[str]:
    """What starts a stage that runs as several processes, one a GPU: torchrun, on one machine."""
    processes = int(wanted["settings"].get("processes") or 1)
    if processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


async def done_manifest(link: Link, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished stage folder, if it is of this very configuration and its inputs are unchanged."""
    manifest = await read_json(link, f"{wanted['out']}/manifest.json")
    if manifest is None or not manifest.get("complete") or lasting(manifest) != lasting(wanted):
        return None
    for name, path in wanted["inputs"].items():
        if manifest["inputs"].get(name, {}).get("path") != path:
            return None
        upstream = await read_json(link, f"{path.rpartition('/')[0]}/manifest.json")
        for artifact in (upstream or {}).get("artifacts", {}).values():
            if artifact["path"] == path and artifact["sha256"] != manifest["inputs"][name]["sha256"]:
                return None
    return manifest


async def read_json(link: Link, path: str) -> dict[str, Any] | None:
    """A JSON file of a host, or None where there is none."""
    try:
        data = await link.read(path)
    except RigbookError as error:
        if error.id == "file.not-found":
            return None
        raise
    try:
        value: dict[str, Any] = parse_object(data, path)
    except Refused as refusal:
        raise RigbookError(refusal.id, str(refusal), host=link.name, exit_code=REFUSED) from None
    return value


async def read_jsonl(link: Link, path: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file of a host."""
    return [json.loads(line) for line in (await link.read(path)).splitlines() if line.strip()]
