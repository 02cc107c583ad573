"""Audit a drafter directory on a host of the project: a job there, recorded like every other run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.runs import Work, job_key, run_job
from state.errors import USAGE, RigbookError


@dataclass(frozen=True)
class Question:
    """What to look at. Paths are the host's. `model`: the target's directory, None where there is none to compare."""

    drafter: str
    against: str | None
    model: str | None
    engine: str
    engine_version: str
    context: int


def env_of(work: Work, name: str | None) -> str:
    """The env to work in: the one named, the pipeline's, or the only one. Raises RigbookError where it is not clear."""
    project = work.project
    if name is not None:
        project.env(name)
        return name
    if project.pipeline is not None:
        return project.pipeline.env
    if len(project.envs) == 1:
        return next(iter(project.envs))
    raise RigbookError(
        "audit.env",
        "it is not clear which Python is to look at the drafter",
        hint=f"name an env with --env (there are: {', '.join(project.envs) or 'none'}); it needs torch and safetensors",
        exit_code=USAGE,
    )


async def audit(work: Work, env: str, question: Question) -> dict[str, Any]:
    """The report of `pipeline.stages.audit_any`. Raises RigbookError where the job fails."""
    chosen = work.project.env(env)
    inputs = {"drafter": question.drafter, "model": question.model, "against": question.against}
    settings = {
        "engine": question.engine,
        "engine_version": question.engine_version,
        "context": question.context,
    }
    wanted = {
        "stage": "audit",
        "out": "out",  # in the job's own folder
        "inputs": {name: path for name, path in inputs.items() if path},
        "settings": settings,
    }
    outcome = await run_job(
        work,
        chosen.host,
        name="audit",
        what="stage",
        argv=[chosen.python, "-m", "pipeline.stages.audit_any", "--spec", "{job}/stage.json"],
        files={"stage.json": json.dumps(wanted).encode()},
        env=dict(chosen.vars),
        settings=settings | {"drafter": question.drafter},
        key=job_key(wanted),
    )
    return outcome.check("audit", chosen.host).result
