"""The app by keyboard alone, on a real journal and real run files, at 80x24 and 120x40."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from remote import jobs
from remote.connect import Rig
from state import events
from state.journal import Journal
from state.project import load
from tests import desk_project
from tui import actions
from tui.app import RigbookApp, picture
from tui.cli.main import COMMANDS
from tui.collector import metrics
from tui.look import ASCII, UNICODE
from tui.screens.book import BookPane
from tui.screens.logs import LogsPane
from tui.screens.modals import Chooser, Confirm, Reader
from tui.widgets.board import Board

SIZES = [(80, 24), (120, 40)]
STOP = f"rigbook jobs stop {desk_project.TRAIN} --host llm"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return desk_project.make(tmp_path / "rig")


def app_on(root: Path, *, write: bool = False, hosts: bool = False) -> RigbookApp:
    return RigbookApp(root, write=write, look=UNICODE, hosts=hosts)


def screen_text(app: RigbookApp) -> str:
    """What stands on the terminal, row by row."""
    width, height = app.size
    grid = [[" "] * width for _ in range(height)]
    layers = [*app._background_screens, app.screen]
    for screen in layers:
        for y, strip in enumerate(screen._compositor.render_strips()):
            if strip.text.strip() and y < height:
                grid[y] = list(strip.text[:width])
    return "\n".join("".join(row).rstrip() for row in grid)


async def until(pilot: Pilot[None], holds: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait until something holds; fail with the screen when it does not come about."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about within {seconds} s; the screen:\n{screen_text(pilot.app)}")  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def shows(pilot: Pilot[None], *words: str) -> str:
    """Wait until all words are on the screen; returns it."""
    app = pilot.app
    assert isinstance(app, RigbookApp)
    await until(pilot, lambda: all(word in screen_text(app) for word in words) or None)
    return screen_text(app)


def top(app: RigbookApp) -> str:
    return app.top_bar.text


# -- what each screen says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_rig_screen_says_what_runs_and_what_needs_somebody(project: Path, size: tuple[int, int]) -> None:
    app = app_on(project)
    async with app.run_test(size=size) as pilot:
        text = await shows(pilot, "Hosts", "train", "40 %", "server baseline", "disk.low", "Try four draft steps")
        assert "✗ audit" in text and "lm_head.weight has the wrong shape" in text
        assert "(played)" in text, "a stand-in must be called one"
        assert "read-only" in top(app)


@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_is_reached_by_its_digit_and_says_its_own(project: Path, size: tuple[int, int]) -> None:
    app = app_on(project)
    async with app.run_test(size=size) as pilot:
        await shows(pilot, "Running")
        for digit, words in {
            "5": ("9 of 13 stages done", "train is running", "loss"),
            "6": ("● ready", "baseline", "EAGLE3, 3 steps", "live figures unknown"),
            "7": ("better +29.3 %", "41.0", "1.90", "people (8)", "break-even accept length 1.52"),
            "8": ("train: step 399", "402 lines", "following"),
            "9": ("STATE OF THE PROJECT", "version"),
            "1": ("Hosts",),
        }.items():
            await pilot.press(digit)
            await shows(pilot, *words)
            assert all(len(row) <= size[0] for row in screen_text(app).splitlines())


async def test_brackets_step_through_the_screens_and_escape_goes_back(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts")
        await pilot.press("right_square_bracket")
        assert app.current.NAME == "cleanup"
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert app.current.NAME == "book"
        await pilot.press("escape", "escape")
        assert app.current.NAME == "cleanup"


async def test_help_tells_the_keys_of_where_we_are(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts")
        await pilot.press("8", "question_mark")
        assert isinstance(app.screen, Reader)
        await shows(pilot, "Logs: help", "chooses which")
        await pilot.press("escape")
        assert not isinstance(app.screen, Reader)


async def test_only_screens_that_exist_are_offered(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts")
        offered = {pane.DIGIT for pane in app.panes}
        assert all(f" {digit} " not in top(app) for digit in set("0123456789") - offered)


async def test_progress_moves_while_we_watch_and_only_changed_lines_are_painted(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "40 %")
        board = app.current.query_one(Board)
        before = board.repainted
        said = project / ".rigbook" / "runs" / desk_project.TRAIN / "events.jsonl"
        desk_project.append_events(said, [desk_project.progress(650, 1000)])
        await shows(pilot, "65 %")
        ticks = 2 + 15  # the train row and perhaps its clock, a few snapshots long
        assert board.repainted - before <= ticks < len(board.lines) * 2


async def test_the_end_of_a_run_in_the_journal_reaches_the_screen(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "▶ running")
        with Journal.open(project / ".rigbook" / "journal.db") as journal:
            journal.append(
                events.RunFinished(run=desk_project.TRAIN, status="failed", exit=1, result={"error": "out of disk"})
            )
        text = await shows(pilot, "out of disk")
        assert "▶ running" not in text


async def test_ascii_draws_with_letters_only(project: Path) -> None:
    app = RigbookApp(project, look=ASCII, hosts=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts", "train")
        for digit in "15678":
            await pilot.press(digit)
            await pilot.pause(0.2)
            strange = {
                c for c in screen_text(app) if ord(c) > 126 and c not in "▁▂▃▄▅▆▇█"
            }  # the scroll bar is Textual's
            assert not strange, f"screen {digit}: {strange}"


async def test_an_empty_project_says_so(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "fresh"\n')
    app = app_on(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "no hosts", "nothing runs", "fresh")
        await pilot.press("9")
        await shows(pilot, "nothing has been recorded yet")
        await pilot.press("7")
        await shows(pilot, "none in the book yet")
    assert not (tmp_path / ".rigbook").exists(), "looking must not make a journal"


async def test_a_broken_project_file_is_told_and_the_book_stays(project: Path) -> None:
    (project / "rigbook.toml").write_text(desk_project.TOML + '\n[profiles.baseline2]\nenginee = "sglang"\n')
    app = app_on(project, hosts=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "! project", "enginee", "train")


# -- logs --------------------------------------------------------------------------------------------------------


async def test_log_follows_searches_and_is_harmless(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("8")
        text = await shows(pilot, "colour and ·bell", "bad � byte")
        assert "\x1b" not in text and "\x07" not in text
        log = project / ".rigbook" / "runs" / desk_project.TRAIN / "out.log"
        with log.open("a") as file:
            file.write("a line that came later\n")
        await shows(pilot, "a line that came later", "following")
        await pilot.press("slash", *"step 123", "enter")
        await shows(pilot, "train: step 123", "line 124 of 403", "paused")
        await pilot.press("escape")
        await pilot.press("f")
        await shows(pilot, "following", "a line that came later")


async def test_another_log_is_chosen_by_key(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("8")
        await shows(pilot, "stage train")
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.screen, Chooser))
        await pilot.press("down", "enter")
        await until(pilot, lambda: "train" not in app.query_one(LogsPane).bar.text)
        assert app.query_one(LogsPane).target != f"run:{desk_project.TRAIN}"


async def test_l_opens_the_log_of_the_stage_under_the_cursor(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "9 of 13")
        await pilot.press("home", "l")
        assert app.current.NAME == "logs"
        await shows(pilot, "target: 100.0 %")


# -- book --------------------------------------------------------------------------------------------------------


async def test_book_at_a_version_and_what_changed_since(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("9")
        await shows(pilot, "STATE OF THE PROJECT", "(now)")
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, Chooser))
        await pilot.press("end", "enter")  # the first event
        await shows(pilot, "version 1")
        await until(pilot, lambda: "Looping text" not in app.query_one(BookPane)._markdown)
        await pilot.press("escape")
        await shows(pilot, "(now)")
        await until(pilot, lambda: "Looping text" in app.query_one(BookPane)._markdown)
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Chooser))
        await pilot.press("enter")
        await shows(pilot, "what changed from version", "Looping text")


# -- clean-up ----------------------------------------------------------------------------------------------------


def orphan(pid: int, rss: int | None) -> dict[str, object]:
    return {
        "pid": pid,
        "starttime": 4711,
        "boot_id": "b",
        "job": "server-eagle3-bb-1",
        "job_state": "vanished",
        "provenance": "marker",
        "command": "python -m pipeline.stages.reference",
        "rss": rss,
        "ports": [18998],
        "gpu_files": [],
    }


async def test_cleanup_shows_evidence_then_asks_then_the_proof(project: Path, started: list[str]) -> None:
    app = app_on(project, write=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await shows(pilot, "nobody has looked yet")
        items = [orphan(4242, 812 << 20), orphan(4243, None)]
        with Journal.open(project / ".rigbook" / "journal.db") as journal:
            journal.append(events.PlanMade(plan="clean-0123456789", action="clean", host="llm", items=items))
        text = await shows(pilot, "to give back", "2 processes", "812 MiB", "port 18998", "pid 4242", "vanished")
        assert "memory unknown" in text, "what cannot be seen is not zero"
        await pilot.press("x", "enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm | Reader), seconds=30)
        await pilot.press("escape")
        assert started == []
        outcome = {
            "processes": [
                {"pid": 4242, "outcome": "ended by TERM"},
                {"pid": 4243, "outcome": "kept", "reason": "other"},
            ],
            "ports_free": [18998],
            "ports_held": [],
            "rss_before": 812 << 20,
            "rss_after": 0,
        }
        with Journal.open(project / ".rigbook" / "journal.db") as journal:
            journal.append(events.PlanApplied(plan="clean-0123456789", verified=False, outcome=outcome))
        await shows(pilot, "NOT verified", "processes gone: 1 of 2", "free again: port 18998", "pid 4243: kept (other)")
        assert not [
            a for a in actions.actions_for(app.current.target, app.snapshot, "cleanup") if a.id.startswith("clean:")
        ]


# -- acting ------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that the app starts, none of which runs."""
    commands: list[str] = []

    async def execute(root: Path, action: actions.Action) -> tuple[object, Path]:
        commands.append(action.command)
        return await asyncio.create_subprocess_exec("true"), root / "action.log"

    monkeypatch.setattr(actions, "execute", execute)
    return commands


async def test_read_only_refuses_and_says_how_to_unlock(project: Path, started: list[str]) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "train is running")
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, Chooser))
        await pilot.press("enter")
        await shows(pilot, "read-only: press R to unlock")
        assert started == []


async def test_unlocking_asks_and_its_default_is_no(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts")
        await pilot.press("R")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("enter")
        assert not app.unlocked
        await pilot.press("R")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("right", "enter")
        await until(pilot, lambda: app.unlocked)
        assert "UNLOCKED" in top(app)
        await pilot.press("R")
        assert not app.unlocked and "read-only" in top(app)


async def test_an_action_shows_its_plan_and_enter_alone_does_nothing(project: Path, started: list[str]) -> None:
    app = app_on(project, write=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "train is running")
        for keys, expected in ((["enter"], []), (["right", "enter"], [STOP])):
            await pilot.press("x")
            await until(pilot, lambda: isinstance(app.screen, Chooser))
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, Confirm))
            await shows(pilot, "rigbook jobs stop", "Cancel")
            await pilot.press(*keys)
            await until(pilot, lambda: not isinstance(app.screen, Confirm))
            await until(pilot, lambda expected=expected: started == expected)
        await shows(pilot, "done: Stop")


async def test_what_an_action_acts_on_is_fixed_when_it_is_chosen(project: Path, started: list[str]) -> None:
    app = app_on(project, write=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shows(pilot, "train is running")
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, Chooser))
        # The run under the cursor ends and another begins in its row while the menu is open.
        with Journal.open(project / ".rigbook" / "journal.db") as journal:
            journal.append(
                events.RunFinished(run=desk_project.TRAIN, status="done", exit=0, seconds=9.0),
                desk_project.started("train-other-2", "stage", "train"),
            )
        await until(pilot, lambda: app.snapshot.run("train-other-2") is not None)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("right", "enter")
        await until(pilot, lambda: started)
        assert started == [STOP]


async def test_a_real_action_runs_the_real_command_and_its_failure_is_told(project: Path) -> None:
    app = app_on(project, write=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "Hosts")
        action = actions.Action("nonsense", "Run a stage that is not there", ("run", "no-such-stage"), "A test.")
        app.begin(action)
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("right", "enter")
        await shows(pilot, "exit 2", "no stage named 'no-such-stage'")
        logs = list((project / ".rigbook" / "actions").glob("*.log"))
        assert len(logs) == 1 and "$ rigbook run no-such-stage" in logs[0].read_text()


async def test_every_action_is_a_command_that_exists_and_plans_or_looks(project: Path) -> None:
    with Journal.open(project / ".rigbook" / "journal.db") as journal:
        journal.append(events.PlanMade(plan="clean-0123456789", action="clean", host="llm", items=[orphan(1, None)]))
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.snapshot.plans)
        every = actions.everything(app.snapshot)
    assert {a.id.partition(":")[0] for a in every} >= {
        "run",
        "run-from",
        "stop",
        "serve",
        "unserve",
        "bench",
        "probe",
        "clean",
    }
    for action in every:
        command = COMMANDS[action.words[0]]
        assert action.changes
        if action.dry_run:
            assert "dry-run" in command.flags, f"{action.command} has no dry run to show"
        else:
            assert action.what or not action.asks, f"{action.command} would ask without saying what it does"
        assert ("--yes" in actions.command_line(project, action.words, "yes")) == ("yes" in command.flags.split())


async def test_a_job_that_is_over_is_not_shown_as_running(project: Path) -> None:
    async with Rig(load(project)) as rig:
        link = await rig.link("llm")
        await jobs.submit(link, jobs.JobSpec(id=desk_project.TRAIN, name="train", argv=["true"]))
        await jobs.wait(link, desk_project.TRAIN)
    app = app_on(project, hosts=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "● up", "its job is over and the book does not know yet")
        assert "▶ running" not in screen_text(app)


async def test_a_job_that_the_book_does_not_know_is_shown_read_and_stopped(project: Path) -> None:
    async with Rig(load(project)) as rig:
        link = await rig.link("pve")
        argv = ["sh", "-c", "echo said by hand; exec sleep 300"]
        await jobs.submit(link, jobs.JobSpec(id="by-hand-1", name="by-hand", argv=argv))
    app = app_on(project, hosts=True, write=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "by-hand-1", "the book has no run of it")
        assert app.current.query_one(Board).select("job:pve/by-hand-1")
        await pilot.press("l")
        await shows(pilot, "said by hand")
        await pilot.press("escape")
        await pilot.press("x", "enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("right", "enter")
        await until(pilot, lambda: "by-hand-1" not in {job.id for job in app.snapshot.bare_jobs}, seconds=40)
        await shows(pilot, "done: Stop by-hand-1")


async def test_the_palette_offers_what_is_possible_now(project: Path) -> None:
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "train")
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Go to Book", "Stop the server baseline", f"Stop {desk_project.TRAIN}"} <= titles
        assert "Start the server baseline" not in titles
        await pilot.press("colon")
        await pilot.press(*"go to server")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await until(pilot, lambda: app.current.NAME == "server")


def test_server_figures_add_up_amounts_average_shares_and_leave_histograms_out() -> None:
    text = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 3.0
sglang:num_running_reqs{tp_rank="1"} 4.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{tp_rank="0"} 1.5
sglang:spec_accept_length{tp_rank="1"} 2.5
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{le="0.1"} 7
sglang:e2e_request_latency_seconds_sum 5.3
not a metric
"""
    assert metrics(text) == {"num_running_reqs": 7.0, "spec_accept_length": 2.0}


# -- hosts -------------------------------------------------------------------------------------------------------

HANGING = """
[project]
name = "half-dead"
[hosts.good]
kind = "local"
[hosts.mute]
kind = "linux"
ssh = "nobody@127.0.0.1:{port}"
"""


async def test_a_host_that_hangs_blocks_nobody(tmp_path: Path) -> None:
    # It accepts and never says a word: the worst kind.
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    root = tmp_path / "rig"
    root.mkdir()
    (root / "rigbook.toml").write_text(HANGING.format(port=port))
    app = app_on(root, hosts=True)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await shows(pilot, "● up", "good", "load", "◌ connecting")
            began = time.monotonic()
            await pilot.press("6", "1")
            assert time.monotonic() - began < 2.0, "keys must not wait for a host"
            await shows(pilot, "mute")
    finally:
        server.close()


async def test_a_host_that_refuses_is_down_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text(HANGING.format(port=9))
    app = app_on(tmp_path, hosts=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "○ down", "never answered: no connection", "● up")


async def test_random_keys_neither_crash_nor_change_anything(project: Path, started: list[str]) -> None:
    dice = random.Random(20261130)
    keys = [*"123456789 0[]xlRrq?:/sdvnNfgGjk<>", "enter", "escape", "up", "down", "left", "right", "tab", "pagedown"]
    app = app_on(project)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "Hosts")
        for _ in range(120):
            key = dice.choice([k for k in keys if k != "q"])
            await pilot.press({"[": "left_square_bracket", "]": "right_square_bracket", " ": "space"}.get(key, key))
            assert app.is_running
            app.unlocked = False  # what is tried here is that a locked app changes nothing
    assert started == []


async def test_picture_is_svg_of_the_screen(project: Path) -> None:
    svg = await asyncio.to_thread(picture, project, "pipeline", (100, 30), hosts=False)
    assert svg.startswith("<svg") and "train" in svg and "stages" in svg
