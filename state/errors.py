"""The one error that users see: an id that `rigbook explain` knows, what happened, where, and what to do."""

from __future__ import annotations

# DESIGN: 0 done, 1 failed, 2 usage or configuration, 3 refused by a safety rule,
# 4 host unreachable or state unknown, 5 done but not verified, 6 done with findings.
FAILED, USAGE, REFUSED, UNREACHABLE, UNVERIFIED, FINDINGS = 1, 2, 3, 4, 5, 6


class RigbookError(Exception):
    """A failure told in one sentence. `exit_code` is what the command exits with."""

    def __init__(
        self, id: str, message: str, *, host: str | None = None, hint: str | None = None, exit_code: int = FAILED
    ) -> None:
        super().__init__(message)
        self.id = id
        self.message = message
        self.host = host
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        where = f" (on {self.host})" if self.host else ""
        return f"{self.message}{where}"
