"""Whether the disk of the workdir can hold what the stages will write: asked before the first of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import estimate as e
from pipeline import recipe
from pipeline.runs import Work
from pipeline.stage_runner import done_manifest, read_json
from remote.connect import Link
from state.book import open_book
from state.errors import REFUSED, RigbookError
from state.events import DecisionMade

# Free kilobytes where $1 lies or will lie (its nearest folder that is there), then what each other folder holds.
ROOM = """d=$1; while [ ! -d "$d" ] && [ "$d" != / ]; do d=$(dirname "$d"); done
df -Pk "$d" | awk 'NR==2 {print $4}'
shift; for f do if [ -d "$f" ]; then du -sk "$f" | awk '{print $1}'; else echo 0; fi; done
"""


async def room(link: Link, workdir: str, folders: Sequence[str]) -> tuple[int, int] | None:
    """(bytes free, bytes that the folders hold already); None where the host cannot tell."""
    told = await link.run(["sh", "-c", ROOM, "sh", workdir, *folders])
    words = told.stdout.split()
    if told.code != 0 or len(words) != len(folders) + 1 or not all(word.isdigit() for word in words):
        return None
    free, *used = (int(word) * 1024 for word in words)
    return free, sum(used)


async def check_room(work: Work, chosen: Sequence[recipe.StageDef], anyway: str | None) -> str | None:
    """Refuses (`run.disk`) stages that cannot fit. Returns a sentence where only a limit does not fit, or where
    somebody goes on all the same: `anyway` is their reason, and the book has it as a decision."""
    project = work.project
    pipeline = recipe.pipeline_of(project)
    link = await work.rig.link(pipeline.host)
    target = await read_json(link, f"{project.target.path}/config.json") if project.target else None
    runs = open_book(project.root).runs.values()
    guesses = {guess.stage: guess for guess in e.estimate(project, target, runs, e.Assumptions())}
    todo = [s.name for s in chosen if await done_manifest(link, recipe.spec(project, s)) is None and s.name in guesses]
    told = await room(link, pipeline.workdir, [recipe.folder(project, name) for name in todo])
    if told is None or (short := e.short_of(e.total(guesses[name] for name in todo), *told)) is None:
        return None
    largest = max((guesses[name] for name in todo), key=lambda guess: guess.disk or 0)
    numbers = (
        f"the stages to do write {_gb(sum(told) + short)}, {_gb(largest.disk or 0)} of it {largest.stage}; "
        f"{_gb(told[0])} are free on {pipeline.host}, {_gb(told[1])} are written already"
    )
    if largest.most:
        return f"{numbers}. That is if every response is as long as it may be: watch the disk"
    if anyway is None:
        raise RigbookError(
            "run.disk",
            numbers,
            host=pipeline.host,
            hint="make room or train on less; `rigbook run all --dry-run` has each stage; --disk-anyway REASON goes on",
            exit_code=REFUSED,
        )
    work.journal.append(DecisionMade(title="Stages run although the disk is too small", text=numbers, because=anyway))
    return f"{numbers}. Going on, because: {anyway}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
