"""Runs: recorded exactly once, whatever dies; a stage in a job on a real host (the local route, real processes)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.runs import Outcome, Update, open_work, run_folder, settle_all
from pipeline.stage_runner import done_manifest, run_module
from remote import jobs
from state import events
from state.errors import RigbookError
from state.journal import Journal
from state.project import journal_path

REPOSITORY = Path(__file__).parents[1]
TOML = """
[project]
name = "runs"
[hosts.here]
kind = "local"
state_dir = "{root}/jobs"
[envs.train]
host = "here"
python = "{python}"
[target]
path = "{root}/model"
[pipeline]
host = "here"
env = "train"
workdir = "{root}/data"
"""
# Stands for a stage of the pipeline: rows one by one, a fact, a warning, a result.
TOY = '''
"""Toy stage."""
import time
from pipeline.stages.protocol import JsonlAppender, main
def run(stage):
    rows = JsonlAppender(stage.out / "rows.jsonl")
    for i in range(stage.settings["rows"]):
        if i not in rows.done:
            time.sleep(stage.settings["pause"])
            rows.append({"id": i})
            stage.progress(len(rows.rows), stage.settings["rows"], "rows")
    stage.fact("target.toy", 42, "things")
    stage.warn("toy.check", "look at this")
    stage.artifact("rows.jsonl", stage.out / "rows.jsonl")
    if stage.settings.get("refuse"):
        stage.refuse("toy.refused", "because the test says so")
    return {"rows": {"in": stage.settings["rows"], "out": len(rows.rows), "errors": 0, "skipped": 0}}
main(run)
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rigbook.toml").write_text(TOML.format(root=tmp_path, python=sys.executable))
    return tmp_path


def wanted(root: Path, **settings: Any) -> dict[str, Any]:
    return {
        "stage": "toy",
        "out": f"{root}/data/toy",
        "inputs": {},
        "settings": {"rows": 5, "pause": 0.0, **settings},
    }


@pytest.fixture(autouse=True)
def toy_module(tmp_path: Path) -> Any:
    """The toy ships like any stage: from the package's own folder."""
    path = REPOSITORY / "pipeline" / "stages" / "toy_for_tests.py"
    path.write_text(TOY)
    yield
    path.unlink()


def go(root: Path, spec: dict[str, Any]) -> tuple[Outcome, list[Update]]:
    seen: list[Update] = []

    async def work() -> Outcome:
        async with open_work(root, seen.append) as opened:
            return await run_module(opened, "toy", "toy_for_tests", spec, what="stage")

    return asyncio.run(work()), seen


def recorded(root: Path) -> list[events.Event]:
    journal = Journal.open(journal_path(root), read_only=True)
    try:
        assert journal.verify().ok
        return [record.event for record in journal.records()]
    finally:
        journal.close()


def test_a_run_is_in_the_book_with_what_it_said(root: Path) -> None:
    outcome, seen = go(root, wanted(root))
    assert (outcome.status, outcome.exit) == ("done", 0)
    kinds = [type(e).__name__ for e in recorded(root)]
    assert kinds == ["RunStarted", "FactObserved", "Warned", "ArtifactMade", "RunFinished"]
    fact = next(e for e in recorded(root) if isinstance(e, events.FactObserved))
    assert (fact.key, fact.value, fact.unit, fact.source.run, fact.source.host) == (
        "target.toy",
        42,
        "things",
        outcome.run,
        "here",
    )
    assert {"started", "progress", "result", "done"} <= {u.kind for u in seen}


def test_a_failure_is_recorded_with_its_sentence_and_the_next_run_is_a_new_one(root: Path) -> None:
    outcome, _ = go(root, wanted(root, refuse=True))
    assert (outcome.status, outcome.exit) == ("failed", 3)
    with pytest.raises(RigbookError) as caught:
        outcome.check("toy", "here")
    assert caught.value.exit_code == 3 and "because the test says so" in str(caught.value)
    finished = [e for e in recorded(root) if isinstance(e, events.RunFinished)]
    assert finished[0].result["error"] == "because the test says so"
    again, _ = go(root, wanted(root, refuse=True))
    assert again.run != outcome.run


def test_done_is_found_done_until_something_changes(root: Path) -> None:
    go(root, wanted(root))

    async def found(spec: dict[str, Any]) -> bool:
        async with open_work(root) as work:
            return await done_manifest(await work.rig.link("here"), spec) is not None

    assert asyncio.run(found(wanted(root)))
    assert not asyncio.run(found(wanted(root, rows=6)))


CONTROLLER = """
import asyncio, json, sys
from pathlib import Path
from pipeline.runs import open_work
from pipeline.stage_runner import run_module
async def work():
    async with open_work(Path(sys.argv[1])) as opened:
        await run_module(opened, "toy", "toy_for_tests", json.loads(sys.argv[2]), what="stage")
asyncio.run(work())
"""


def controller(root: Path, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", CONTROLLER, str(root), json.dumps(spec)], env=env)


def until(condition: Any, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None or condition(), "the controller ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("moment", ["submitted", "working", "ended"])
def test_a_killed_controller_loses_nothing_and_records_once(root: Path, moment: str) -> None:
    spec = wanted(root, rows=30, pause=0.1 if moment != "ended" else 0.02)
    rows, manifest = root / "data" / "toy" / "rows.jsonl", root / "data" / "toy" / "manifest.json"
    first = controller(root, spec)
    reached = {
        "submitted": lambda: any((root / "jobs" / "jobs").glob("toy-*/spec.json")),
        "working": lambda: rows.exists() and rows.stat().st_size > 60,
        "ended": manifest.exists,
    }[moment]
    until(reached, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    outcome, _ = go(root, spec)
    assert outcome.status == "done"
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()] == list(range(30))
    found = recorded(root)
    assert [e.status for e in found if isinstance(e, events.RunFinished)] == ["done"]
    assert len([e for e in found if isinstance(e, events.FactObserved)]) == 1


def test_a_killed_stage_is_recorded_as_failed_and_the_next_attempt_goes_on(root: Path) -> None:
    spec = wanted(root, rows=30, pause=0.1)
    rows = root / "data" / "toy" / "rows.jsonl"
    first = controller(root, spec)
    until(lambda: rows.exists() and rows.stat().st_size > 60, first)
    (start,) = (root / "jobs" / "jobs").glob("toy-*/start.json")
    os.kill(json.loads(start.read_text())["pid"], signal.SIGKILL)
    assert first.wait(60) == 0
    outcome, _ = go(root, spec)
    assert outcome.status == "done"
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()] == list(range(30))
    assert [e.status for e in recorded(root) if isinstance(e, events.RunFinished)] == ["failed", "done"]


def test_what_ended_while_nobody_looked_is_settled_once(root: Path) -> None:
    spec = wanted(root, rows=10, pause=0.05)
    first = controller(root, spec)
    until(lambda: any((root / "jobs" / "jobs").glob("toy-*/start.json")), first)
    first.send_signal(signal.SIGKILL)
    first.wait()

    async def settle() -> list[Outcome]:
        async with open_work(root) as work:
            (job,) = [j for j in await jobs.list_jobs(await work.rig.link("here"))]
            await jobs.wait(await work.rig.link("here"), job.id)
            return [*await settle_all(work), *await settle_all(work)]

    (outcome,) = asyncio.run(settle())
    assert outcome.status == "done"
    assert run_folder_events(root, outcome.run)


def test_a_stage_that_had_finished_when_its_supervisor_was_killed_is_done(root: Path) -> None:
    """Only the supervisor dies: the job works on to its end, and its last word counts where no exit code is known."""
    spec = wanted(root, rows=20, pause=0.05)
    rows, manifest = root / "data" / "toy" / "rows.jsonl", root / "data" / "toy" / "manifest.json"
    first = controller(root, spec)
    until(lambda: rows.exists() and rows.stat().st_size > 0, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (start,) = (root / "jobs" / "jobs").glob("toy-*/start.json")
    os.kill(json.loads(start.read_text())["supervisor"]["pid"], signal.SIGKILL)
    assert not manifest.exists()
    outcome, _ = go(root, spec)
    assert (outcome.status, outcome.exit) == ("done", None) and outcome.result["rows"]["out"] == 20
    assert len(list((root / "jobs" / "jobs").glob("toy-*"))) == 1, "it was not started again"
    assert [e.status for e in recorded(root) if isinstance(e, events.RunFinished)] == ["done"]


def test_what_happened_to_a_log_is_in_the_book_once(root: Path) -> None:
    async def work() -> None:
        async with open_work(root) as opened:
            link = await opened.rig.link("here")
            run = "toy-log-1"
            opened.journal.append(events.RunStarted(run=run, what="stage", name="toy", host="here", job=run))
            script = "i=0; while [ $i -lt 9000 ]; do echo line $i; i=$((i+1)); done; sleep 1000"
            job = await jobs.submit(link, jobs.JobSpec(run, "toy", ["sh", "-c", script], log_quota=20000))
            folder = run_folder(opened.project, run)
            async with asyncio.timeout(20):
                while not Path(job.dir, "holes.json").exists():
                    await asyncio.sleep(0.02)
            await jobs.mirror(link, run, folder)
            Path(job.dir, "out.log").write_bytes(b"new\n")
            await jobs.mirror(link, run, folder)
            await jobs.stop(link, run, grace=1)
            await settle_all(opened)
            await settle_all(opened)

    asyncio.run(work())
    assert [e.check for e in recorded(root) if isinstance(e, events.Warned)] == ["job.log-quota", "job.log-reset"]


def test_two_controllers_at_once_tell_a_run_once(root: Path) -> None:
    """A demo beside `rigbook status` or the app: each sees the run start and end, and neither may have told it yet."""
    spec = wanted(root, rows=10, pause=0.02)

    async def both() -> None:
        async with open_work(root) as one, open_work(root) as other:
            again = (run_module(work, "toy", "toy_for_tests", spec, what="stage") for work in (one, other))
            await asyncio.gather(*again)

    # Both look at the book before either has written into it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runs.started_runs", lambda journal: {})
        patch.setattr("pipeline.runs.finished_runs", lambda journal: {})
        asyncio.run(both())
    found = recorded(root)
    assert len([e for e in found if isinstance(e, events.RunStarted)]) == 1
    assert [e.status for e in found if isinstance(e, events.RunFinished)] == ["done"]
    assert len([e for e in found if isinstance(e, events.FactObserved)]) == 1


def run_folder_events(root: Path, run: str) -> bytes:
    from state.project import load

    return (run_folder(load(root), run) / "events.jsonl").read_bytes()


def test_a_host_that_goes_away_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    """The job goes on while nobody can reach its host; the controller waits, and finds everything."""
    from remote import demo_rig

    hosts = tmp_path / "hosts"
    demo_rig.start(hosts, {"llm": "lxc"})
    text = TOML.format(root=tmp_path, python=sys.executable)
    text = text.replace(f'kind = "local"\nstate_dir = "{tmp_path}/jobs"', 'kind = "lxc"\nssh = "llm"')
    text = text.replace("here", "llm").replace('name = "runs"', 'name = "runs"\nssh_config = "hosts/ssh_config"')
    (tmp_path / "rigbook.toml").write_text(text)
    spec = wanted(tmp_path, rows=30, pause=0.1)
    first = controller(tmp_path, spec)
    rows = tmp_path / "data" / "toy" / "rows.jsonl"
    try:
        until(lambda: rows.exists() and rows.stat().st_size > 60, first)
        demo_rig.stop(hosts)
        until(lambda: (tmp_path / "data" / "toy" / "manifest.json").exists(), first)
        demo_rig.start(hosts, {"llm": "lxc"})
        assert first.wait(120) == 0
    finally:
        first.kill()
        demo_rig.stop(hosts)
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()] == list(range(30))
    assert [e.status for e in recorded(tmp_path) if isinstance(e, events.RunFinished)] == ["done"]


def test_a_server_that_ends_unasked_is_not_ready_any_more_in_the_book(root: Path) -> None:
    """Killed together with its supervisor, as by the kernel: nothing on the host says so but its absence."""

    async def work() -> None:
        async with open_work(root) as opened:
            link = await opened.rig.link("here")
            opened.journal.append(
                events.RunStarted(run="server-x-1", what="server", name="x", host="here", job="server-x-1"),
                events.ServerState(run="server-x-1", profile="x", state="ready"),
            )
            job = await jobs.submit(link, jobs.JobSpec(id="server-x-1", name="server-x", argv=["sleep", "600"]))
            for pid in (job.supervisor, job.pid):
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            await jobs.wait(link, "server-x-1")
            await settle_all(opened)

    asyncio.run(work())
    states = [(e.profile, e.state) for e in recorded(root) if isinstance(e, events.ServerState)]
    assert states == [("x", "ready"), ("x", "vanished")]
