"""What a remote command came to. There is no way to mistake a lost connection for success."""

from __future__ import annotations

import signal as _signal
from dataclasses import dataclass
from typing import Literal

from state.errors import FAILED, UNREACHABLE, RigbookError

State = Literal["exited", "signaled", "unknown", "timeout"]


@dataclass(frozen=True)
class Result:
    """`exit` is set only when the far side told us an exit code; `unknown` means that it never did."""

    state: State
    exit: int | None = None
    signal: str | None = None  # without SIG: "KILL"
    stdout: bytes = b""
    stderr: bytes = b""
    reason: str = ""
    host: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "exited" and self.exit == 0

    @property
    def code(self) -> int:
        """The code for a shell: the command's own, 128+n for signal n, 124 for a deadline, 255 when unknown."""
        if self.state == "exited" and self.exit is not None:
            return self.exit
        if self.state == "signaled":
            return 128 + signal_number(self.signal)
        return 124 if self.state == "timeout" else 255

    def text(self) -> str:
        """stdout for people; the bytes stay exact in `stdout`."""
        return self.stdout.decode("utf-8", "replace")

    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "replace").strip()

    def describe(self) -> str:
        if self.state == "exited":
            return f"exit code {self.exit}"
        if self.state == "signaled":
            return f"killed by SIG{self.signal}"
        if self.state == "timeout":
            return self.reason or "ran past its deadline"
        return self.reason or "the connection was lost before the command's end was known"

    def check(self, what: str) -> Result:
        """This result when it is a success; RigbookError otherwise (exit code 4 when the end is unknown)."""
        if self.ok:
            return self
        last = self.error_text().splitlines()[-1:]
        tail = f": {last[0][:300]}" if last else ""
        if self.state == "unknown":
            raise RigbookError(
                "host.unknown",
                f"{what}: {self.describe()}",
                host=self.host,
                hint="It may have run or not. Look at the host before you do it again.",
                exit_code=UNREACHABLE,
            )
        id = "remote.timeout" if self.state == "timeout" else "remote.failed"
        raise RigbookError(id, f"{what}: {self.describe()}{tail}", host=self.host, exit_code=FAILED)


def signal_number(name: str | None) -> int:
    """15 for "TERM"; 0 when nobody knows the name (RFC 4254 lets a server send any)."""
    found = getattr(_signal, f"SIG{name}", None) if name else None
    return int(found) if isinstance(found, _signal.Signals) else 0
