"""Our side of the probe: start the program on a host and ask it things."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state.errors import RigbookError

if TYPE_CHECKING:
    from remote.connect import Link


class Probe:
    closed = True

    async def close(self) -> None: ...


async def start(link: Link) -> Probe:
    raise RigbookError("probe.not-started", "the probe does not run yet", host=link.name)
