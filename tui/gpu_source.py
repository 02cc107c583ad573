"""The GPUs of one host, looked at while the app is open: for the host's line and details, and for the ring.

A host without a GPU costs nothing. One that does not answer is its own watch's affair (host_source); what its GPUs
told last stays, with the time of telling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from state.errors import RigbookError
from tui.gpu_lines import lines, summary
from tui.snapshot import GpusView

if TYPE_CHECKING:
    from state.project import Project
    from tui.host_source import HostWatch

EVERY_S = 2.0
ANSWER_S = 20.0


class GpuWatch:
    def __init__(self, watch: HostWatch, project: Project, root: Path, changed: Callable[[], None]) -> None:
        self._watch, self._project, self._root, self._changed = watch, project, root, changed
        self.view = GpusView()

    async def run(self) -> None:
        """Look for ever. Ends only by being cancelled."""
        while True:
            if self._watch.link is not None and self._watch.view.figures.get("gpus"):
                await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        from remote.gpu_history import History
        from remote.gpus import HOLDERS_S, look

        link = self._watch.link
        if link is None:
            return
        try:
            found = await asyncio.wait_for(look(link, self._project, max_age=HOLDERS_S), ANSWER_S)
            await asyncio.to_thread(History(self._root).add, found)
        except (RigbookError, TimeoutError, OSError):
            return
        view = GpusView(at=found.at, words=summary(found), lines=tuple(lines(found)))
        if view != self.view:
            self.view = view
            self._changed()
