"""The desk: one app over one project. It shows snapshots, moves between screens, and starts what `rigbook` can start.

Nothing on the rig depends on it: it can be killed, suspended, lose its terminal. It opens read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import ContentSwitcher

from tui import actions, keys
from tui.detail import detail_lines
from tui.lines import Line, Part, clean, line, wrap
from tui.look import Look, choose
from tui.screens.benchmarks import BenchmarksPane
from tui.screens.book import BookPane
from tui.screens.cleanup import CleanupPane
from tui.screens.logs import LogsPane
from tui.screens.modals import Chooser, Confirm, Reader
from tui.screens.pane import Pane
from tui.screens.pipeline import PipelinePane
from tui.screens.rig import RigPane
from tui.screens.server import ServerPane
from tui.snapshot import Snapshot
from tui.widgets.bars import Bar
from tui.widgets.board import Board

if TYPE_CHECKING:
    from tui.collector import Collector

NOTICE_SECONDS = 12.0
LOCK_SECONDS = 600.0  # an unlocked app that nobody touches locks itself
TTY_SECONDS = 2.0


class Collected(Message):
    """A new snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class ActionEnded(Message):
    """An action that was started here has ended."""

    def __init__(self, action: actions.Action, code: int, words: str, log: Path) -> None:
        super().__init__()
        self.action, self.code, self.words, self.log = action, code, words, log


class RigbookApp(App[None]):
    CSS_PATH = "rigbook.tcss"
    TITLE = "rigbook"
    BINDINGS: ClassVar[list[BindingType]] = list(keys.bindings())
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, root: Path, *, write: bool = False, look: Look | None = None, hosts: bool = True) -> None:
        super().__init__(ansi_color=True)
        self.root = root
        self.look = look or choose()
        self.unlocked = write
        self.snapshot = Snapshot(project=root.name)
        self._hosts = hosts
        self._collector: Collector | None = None
        self._notice: tuple[str, str, float] = ("", "", 0.0)
        self._touched = time.monotonic()
        self._came_from: list[str] = []  # screens that Esc goes back to
        self._working: dict[str, Path] = {}  # running actions -> their logs
        self.panes: tuple[Pane, ...] = ()
        self.top_bar = Bar(id="top", look=self.look)
        self.notice_bar = Bar(id="notice", look=self.look)
        self.bottom_bar = Bar(id="bottom", look=self.look)
        self.animation_level = "none"
        self.theme = "ansi-dark"
        self.set_class(self.look.ascii, "-ascii")

    # -- layout ------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        look = self.look
        self.panes = (
            RigPane(look),
            CleanupPane(look),
            PipelinePane(look),
            ServerPane(look),
            BenchmarksPane(look),
            LogsPane(look),
            BookPane(look, self._book_text),
        )
        self.switcher = ContentSwitcher(initial=self.panes[0].NAME, id="panes")
        yield self.top_bar
        with self.switcher:
            yield from self.panes
        yield self.notice_bar
        yield self.bottom_bar

    def on_mount(self) -> None:
        for pane in self.panes:
            self.bind(pane.DIGIT, f"show('{pane.NAME}')", description=pane.TITLE, show=False)
        self.current.enter()
        self._draw_bars()
        self.set_interval(1.0, self._second)
        self.set_interval(TTY_SECONDS, self._check_terminal)
        # After the first paint: what follows imports the rooms below.
        self.call_after_refresh(self._collect)

    @property
    def current(self) -> Pane:
        name = self.switcher.current
        return next(pane for pane in self.panes if name == pane.NAME)

    # -- data --------------------------------------------------------------------------------------------------

    @work(exit_on_error=False, group="collector")
    async def _collect(self) -> None:
        from tui.collector import Collector

        self._collector = Collector(self.root, self._collected, hosts=self._hosts)
        await self._collector.run()

    def _collected(self, snapshot: Snapshot) -> None:
        self.post_message(Collected(snapshot))

    async def _book_text(self, version: int | None, base: int | None) -> str:
        if self._collector is None:
            return ""
        return await self._collector.text(version, base)

    def on_collected(self, message: Collected) -> None:
        self.snapshot = message.snapshot
        self.current.show(message.snapshot)
        self._draw_bars()

    # -- bars --------------------------------------------------------------------------------------------------

    def _draw_bars(self) -> None:
        if not self.panes:
            return
        width = self.size.width
        tabs: list[Part] = []
        for pane in self.panes:
            here = pane is self.current
            tabs += [(f"{pane.DIGIT} {pane.TITLE}", "hit" if here else ""), (" ", "")]
        lock = " UNLOCKED " if self.unlocked else " read-only "
        room = width - sum(len(text) for text, _ in tabs) - len(lock) - 2
        name = clean(self.snapshot.project)
        if len(name) > max(6, room):
            name = name[: max(5, room - 1)] + self.look.dots
        self.top_bar.show(
            ((f" {name} ", "bold"), *tabs), ((lock, "hit" if self.unlocked else "dim"),), reverse=self.unlocked
        )
        self.bottom_bar.show(tuple(self._hints(width)))
        words, style, until = self._notice
        left: tuple[Part, ...] = ((f" {words}", style),) if time.monotonic() < until else ()
        running = tuple(sorted(self._working))
        if not left and running:
            left = ((f" {self.look.mark('running')} {', '.join(running)}", "run"),)
        self.notice_bar.show(left, ((self._link_words(), "dim"),))

    def _hints(self, width: int) -> Iterator[Part]:
        hints = [*self.current.hints]
        if self._actions():
            hints.append(("x", "actions"))
        hints += [("R", "lock" if self.unlocked else "unlock"), (":", "commands"), ("q", "quit")]
        room = width - len(" ? help")
        yield " ", ""
        for key, words in hints:
            length = len(key) + len(words) + 3
            if length > room:
                break
            room -= length
            yield key, "key"
            yield f" {words}  ", "dim"
        yield "?", "key"  # help is always in sight: it says what did not fit
        yield " help", "dim"

    def _link_words(self) -> str:
        hosts = self.snapshot.hosts
        if not hosts:
            return ""
        up = sum(1 for host in hosts if host.link == "up")
        version = f"{self.look.sep} book {self.snapshot.seq} " if self.snapshot.seq is not None else ""
        return f"{up}/{len(hosts)} hosts {version}"

    def say(self, words: str, style: str = "") -> None:
        """A message in the line above the keys; it goes by itself."""
        self._notice = (clean(words), style, time.monotonic() + NOTICE_SECONDS)
        self._draw_bars()

    def _second(self) -> None:
        if self.unlocked and time.monotonic() - self._touched > LOCK_SECONDS:
            self.unlocked = False
            self.say("locked again: nobody touched a key for ten minutes")
        self._draw_bars()

    def on_key(self) -> None:
        self._touched = time.monotonic()
        self.call_later(self._draw_bars)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw_bars)

    def on_board_moved(self) -> None:
        self._draw_bars()

    def _check_terminal(self) -> None:
        """A terminal that went away without a signal must not leave us spinning."""
        if self.is_headless or sys.__stdin__ is None:
            return
        import termios

        try:
            termios.tcgetattr(sys.__stdin__.fileno())
        except (termios.error, OSError, ValueError):
            os._exit(129)

    # -- moving ------------------------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        if isinstance(self.screen, ModalScreen) or name == self.current.NAME:
            return
        self._came_from = [*self._came_from[-20:], self.current.NAME]
        self._switch(name)

    def _switch(self, name: str) -> None:
        self.switcher.current = name
        pane = self.current
        pane.enter()
        # The pane knows its size after the layout: draw then.
        self.call_after_refresh(lambda: pane.show(self.snapshot))
        self._draw_bars()

    def action_next_screen(self, step: int) -> None:
        names = [pane.NAME for pane in self.panes]
        self.action_show(names[(names.index(self.current.NAME) + step) % len(names)])

    async def action_back(self) -> None:
        if self.current.back():
            self._draw_bars()
        elif self._came_from:
            self._switch(self._came_from.pop())

    def action_refresh(self) -> None:
        if self._collector is not None:
            self._collector.ask_now()
        self.say("looking again")

    def action_help(self) -> None:
        pane = self.current
        width = min(94, int(self.size.width * 0.9) - 6)
        lines: list[Line] = []
        for paragraph in pane.HELP.split("\n\n"):
            lines += [*wrap(" ".join(paragraph.split()), width), line()]
        lines += [line((f"{key:<10}", "key"), words) for key, words in pane.hints]
        lines += [line(("everywhere", "head"))]
        lines += [line((f"{key:<10}", "key"), words) for key, words in keys.help_lines()]
        self.push_screen(Reader(f"{pane.TITLE}: help", lines, self.look))

    def action_log(self) -> None:
        target = self.current.target
        key = log_of(target, self.snapshot)
        if target and target.startswith("job:") and self._collector is not None:
            self._collector.want(*target.removeprefix("job:").split("/", 1))
        if key is None:
            self.say("nothing under the cursor has a log")
            return
        self._open_log(key)

    def _open_log(self, key: str) -> None:
        self.action_show("logs")
        self.query_one(LogsPane).open(key)

    def on_board_chosen(self, event: Board.Chosen) -> None:
        width = min(94, int(self.size.width * 0.9) - 6)
        found = detail_lines(event.key, self.snapshot, width, self.look)
        if found is not None:
            self.push_screen(Reader(found[0], found[1], self.look))

    # -- acting ------------------------------------------------------------------------------------------------

    def _actions(self) -> list[actions.Action]:
        return actions.actions_for(self.current.target, self.snapshot, self.current.NAME)

    def action_toggle_write(self) -> None:
        if self.unlocked:
            self.unlocked = False
            self.say("locked: nothing can be changed from here")
            return
        text = "Unlocked, the app can start and stop work on this rig. Each action still shows its plan and asks first."
        self.push_screen(
            Confirm("Unlock?", wrap(text, min(90, self.size.width - 14)), "Unlock", self.look), self._unlock
        )

    def _unlock(self, yes: bool | None) -> None:
        if yes:
            self.unlocked = True
            self.say("unlocked; R locks again", "warn")

    def action_menu(self) -> None:
        """What can be done with what is under the cursor. What it acts on is fixed now, whatever moves meanwhile."""
        found = {action.id: action for action in self._actions()}
        if not found:
            self.say("there is nothing to do here")
            return
        note = "" if self.unlocked else "  (read-only: R unlocks)"
        lines = [line(action.title, key=action.id) for action in found.values()]
        self.push_screen(
            Chooser(f"Actions{note}", lines, self.look), lambda key: self.begin(found[key]) if key is not None else None
        )

    def begin(self, action: actions.Action) -> None:
        """Plan, ask, do, watch. Refuses while the app is locked."""
        if action.changes and not self.unlocked:
            self.say(f"read-only: press R to unlock, then {action.title[0].lower()}{action.title[1:]}", "warn")
            return
        if action.id in self._working:
            self.say(f"{action.title}: already at it", "warn")
            return
        self._act(action)

    @work(group="actions", exit_on_error=False)
    async def _act(self, action: actions.Action) -> None:
        self.say(f"planning: {action.title}{self.look.dots}", "run")
        if not action.asks:
            await self._carry_out(action)
            return
        code, said = await actions.plan(self.root, action)
        self._notice = ("", "", 0.0)
        width = min(92, int(self.size.width * 0.9) - 6)
        lines = [each for text in said.splitlines() for each in wrap(clean(text), width)]
        lines += [line(), line(("as a command: ", "dim"), action.command)]
        if code not in (0, 6):  # 6: a plan that is not empty
            await self.push_screen_wait(Reader(f"No plan: {action.title}", lines, self.look))
            return
        if not await self.push_screen_wait(Confirm(f"{action.title}?", lines, "Do it", self.look)):
            self.say("nothing was done")
            return
        if not self.unlocked:
            self.say("read-only: nothing was done", "warn")
            return
        await self._carry_out(action)

    async def _carry_out(self, action: actions.Action) -> None:
        process, log = await actions.execute(self.root, action)
        self._working[action.id] = log
        self.say(f"started: {action.title}. Its output is in Logs.", "run")
        code = await process.wait()
        self._working.pop(action.id, None)
        self.post_message(ActionEnded(action, code, actions.last_words(log), log))

    def on_action_ended(self, message: ActionEnded) -> None:
        code, title = message.code, message.action.title
        words = f": {message.words}" if message.words else ""
        if code == 0:
            self.say(f"{self.look.mark('done')} done: {title}{words}", "ok")
        elif code == 5:
            self.say(f"{self.look.mark('unknown')} done, NOT verified: {title}{words}", "warn")
        elif code == 6:
            self.say(f"{self.look.mark('warning')} done, with findings: {title}{words}", "warn")
        else:
            self.say(f"{self.look.mark('failed')} exit {code}: {title}{words}", "bad")
        if self._collector is not None:
            self._collector.ask_now()

    # -- palette -----------------------------------------------------------------------------------------------

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Only what is possible now."""
        for pane in self.panes:
            yield SystemCommand(
                f"Go to {pane.TITLE}", f"screen {pane.DIGIT}", lambda name=pane.NAME: self.action_show(name)
            )
        for source in self.snapshot.logs[:40]:
            yield SystemCommand(
                f"Log: {source.title}", f"{source.state}, {source.key}", lambda key=source.key: self._open_log(key)
            )
        for action in actions.everything(self.snapshot):
            words = action.command if self.unlocked else "needs unlocking (R)"
            yield SystemCommand(action.title, words, lambda action=action: self.begin(action))
        yield SystemCommand(
            "Lock" if self.unlocked else "Unlock", "allow or forbid changes from here", self.action_toggle_write
        )
        yield SystemCommand("Help", "for where you are", self.action_help)
        yield SystemCommand("Quit", "what runs on the rig goes on", self.action_quit)


def log_of(target: str | None, snapshot: Snapshot) -> str | None:
    """The log that belongs to a thing, or None."""
    kind, _, name = (target or "").partition(":")
    if kind == "run":
        run: str | None = name
    elif kind == "stage":
        run = next((s.run.run for s in snapshot.stages if s.name == name and s.run is not None), None)
    elif kind == "profile":
        run = next((s.run for s in snapshot.servers if s.profile == name), None)
    elif kind == "job":
        run = name.partition("/")[2]
    elif kind == "action":
        return target
    else:
        run = None
    return f"run:{run}" if run else None


def open_app(
    *, write: bool = False, directory: Path | None = None, mouse: bool = True, ascii_only: bool = False
) -> int:
    """Open the app on the project in `directory` (default: where `-C` points, or here). Returns the exit code.

    Raises RigbookError where there is no project.
    """
    from tui.cli import common

    if directory is not None:
        common.ctx.directory = directory
    root = common.root()
    # Somebody may have started us with SIGHUP ignored (nohup): a lost terminal must end us all the same.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    app = RigbookApp(root, write=write, look=choose(ascii_only))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, ValueError):
            # Told to end: leave the terminal as we found it.
            loop.add_signal_handler(signal.SIGTERM, app.exit)
        await app.run_async(mouse=mouse)

    asyncio.run(run())
    return app.return_code or 0


def picture(
    root: Path, screen: str, size: tuple[int, int] = (100, 30), *, hosts: bool = True, seconds: float = 15.0
) -> str:
    """One screen of the app on a real project as SVG. Waits until every host has answered or `seconds` have passed."""

    async def draw() -> str:
        app = RigbookApp(root, hosts=hosts)
        async with app.run_test(size=size) as pilot:
            deadline = time.monotonic() + seconds

            def settled() -> bool:
                asked = all(host.link in {"up", "down"} for host in app.snapshot.hosts) or not hosts
                return app.snapshot.loaded and asked

            while not settled() and time.monotonic() < deadline:
                await pilot.pause(0.1)
            app.action_show(screen)
            await pilot.pause(1.0)
            return app.export_screenshot(title="rigbook")

    # Textual's SVG names a font on a server of somebody else; a picture in a document must not call out.
    return re.sub(r"@font-face \{.*?\}\s*", "", asyncio.run(draw()), flags=re.DOTALL)
