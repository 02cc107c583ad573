"""A growing text file on this machine, seen as numbered lines without reading it all.

The file is cut into blocks of about 64 KiB that end at a line's end, and only the number of each block's first line
is kept: a gigabyte costs a few hundred kilobytes. Lines are cut out of their block when somebody looks at them.
Text from a machine is bytes: colour codes, control characters and bytes that are no UTF-8 are made harmless here.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

BLOCK = 64 * 1024  # bytes
LONGEST = 4096  # bytes of one line that are shown
KEPT = 32  # blocks held in memory

# CSI and OSC sequences, and the other escapes of two characters.
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_]|[ -/][0-~])")


def harmless(raw: bytes) -> str:
    """One line of a log as text that can be put on any terminal."""
    cut = len(raw) > LONGEST
    raw = _ESCAPES.sub(b"", raw[:LONGEST])
    # A progress bar writes over its own line: what stood there last is what a terminal would show.
    raw = raw.rstrip(b"\r")
    if b"\r" in raw:
        raw = raw.rsplit(b"\r", 1)[1]
    text = raw.decode("utf-8", "replace").replace("\t", "    ")
    text = "".join(c if c.isprintable() else "·" for c in text)
    return f"{text} … (cut)" if cut else text


def hole(descriptor: int, at: int) -> int | None:
    """How many bytes from `at` on the log quota has dropped from this copy (remote/follow.py leaves them out): 0 where
    there is no gap worth a line, None where nothing follows the gap yet."""
    end = at
    while os.pread(descriptor, 1, end) == b"\0":
        try:
            found = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            return None if os.fstat(descriptor).st_size - at >= BLOCK else 0
        data = os.pread(descriptor, BLOCK, found)
        end = found + len(data) - len(data.lstrip(b"\0"))
    return end - at if end - at >= BLOCK else 0


class LogFile:
    """`count` whole lines so far; `line(i)` is one of them. Call `grow` to take in what was written since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.size = 0  # bytes taken in; ends at a line's end
        self._first: list[int] = []  # number of the first line of each block
        self._at: list[int] = []  # where each block starts
        self._holes: dict[int, int] = {}  # bytes, by block
        self._blocks: OrderedDict[int, list[bytes]] = OrderedDict()
        self._identity: tuple[int, int] | None = None
        self.tail = b""  # an unfinished last line

    def grow(self, limit: int = 64 << 20) -> bool:
        """Take in at most `limit` new bytes. True when lines came. A file that became another one starts afresh."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                identity = (stat.st_dev, stat.st_ino)
                if self._identity not in (None, identity) or stat.st_size < self.size:
                    self._forget()
                self._identity = identity
                file.seek(self.size)
                before = self.count
                while limit > 0:
                    dropped = hole(file.fileno(), self.size)
                    if dropped is None:
                        self.tail = b""
                        break
                    if dropped:
                        self._skip(dropped)
                        file.seek(self.size)
                    data = file.read(min(BLOCK, limit))
                    if not data:
                        self.tail = b""
                        break
                    limit -= len(data)
                    end = data.rfind(b"\n") + 1
                    while not end:
                        # A line longer than a block: read on to its end.
                        more = file.read(BLOCK)
                        limit -= len(more)
                        if not more:
                            break
                        data += more
                        end = data.rfind(b"\n") + 1
                    self.tail = data[end:]
                    if not end:
                        break
                    self._take(data[:end])
                    file.seek(self.size)
                return self.count != before
        except OSError:
            return False

    def _take(self, data: bytes) -> None:
        # The last block grows until it is full, so that a slow log does not become a block a line.
        if not self._at or self.size - self._at[-1] >= BLOCK:
            self._at.append(self.size)
            self._first.append(self.count)
        self._blocks.pop(len(self._at) - 1, None)
        self.count += data.count(b"\n")
        self.size += len(data)

    def _skip(self, length: int) -> None:
        """A block of its own for what is not there, with one line that says so."""
        self._holes[len(self._at)] = length
        self._at.append(self.size)
        self._first.append(self.count)
        self.count += 1
        self.size += length

    def _forget(self) -> None:
        self.count = self.size = 0
        self._holes.clear()
        self._first.clear()
        self._at.clear()
        self._blocks.clear()
        self.tail = b""

    def raw(self, number: int) -> bytes:
        block = bisect_right(self._first, number) - 1
        if block < 0 or number >= self.count:
            return b""
        lines = self._block(block)
        at = number - self._first[block]
        return lines[at] if at < len(lines) else b""

    def line(self, number: int) -> str:
        return harmless(self.raw(number))

    def _block(self, block: int) -> list[bytes]:
        if block in self._holes:
            return [b"[%d bytes dropped by the log quota]" % self._holes[block]]
        lines = self._blocks.get(block)
        if lines is None:
            end = self._at[block + 1] if block + 1 < len(self._at) else self.size
            try:
                with self.path.open("rb") as file:
                    file.seek(self._at[block])
                    lines = file.read(end - self._at[block]).split(b"\n")
            except OSError:
                lines = []
            self._blocks[block] = lines
            while len(self._blocks) > KEPT:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block)
        return lines

    def find(
        self, needle: str, start: int, *, backwards: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> int | None:
        """The number of the next line at or after `start` (or at or before it) that contains `needle`.

        Case counts only when the needle has a capital letter. `stop` is asked between blocks.
        """
        exact = needle != needle.lower()
        wanted = needle.encode() if exact else needle.lower().encode()
        if not wanted or not self.count:
            return None
        block = max(0, bisect_right(self._first, min(max(start, 0), self.count - 1)) - 1)
        step = -1 if backwards else 1
        while 0 <= block < len(self._at) and not stop():
            lines = self._block(block)
            first = self._first[block]
            text = b"\n".join(lines)
            if wanted in (text if exact else text.lower()):
                numbers = range(len(lines) - 1, -1, -1) if backwards else range(len(lines))
                for i in numbers:
                    number = first + i
                    inside = number <= start if backwards else number >= start
                    if inside and number < self.count and wanted in (lines[i] if exact else lines[i].lower()):
                        return number
            block += step
        return None
