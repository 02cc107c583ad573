"""Exact quoting, and the one line that every remote command starts with.

Protocol of a command, the same on every route (SSH, local):

    argv of the route      exec /bin/sh -c 'echo NONCE "$SHELL";echo NONCE >&2;IFS= read -r s&&eval "$s"'
    stdin, first line      the program, one line of POSIX sh
    stdin, rest            the command's own input
    stdout / stderr        anything (what login scripts print), NONCE, then the command's own output

The login shell, whichever it is (bash, zsh, fish, csh), sees only that constant line, which means the same
to all of them. What we run never shows in `ps`, so an environment with secrets stays out of argv. `read`
takes one byte at a time by definition, so the rest of stdin is untouched.

Where the far side has told that its login shell is bash or a plain sh, a command (an argv; scripts are written for
sh) is read by that shell itself: one program less to start. All that it ever sees is `exec` and quoted words. If no
environment goes with it, it may stand in the route's argv, where its own argv would show anyway: one packet less.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from state.errors import USAGE, RigbookError

PUBLIC_LIMIT = 4096  # bytes of a program in an argv
LIKE_SH = {"bash", "sh", "dash", "ash"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+\Z")
# A newline cannot stand in a one-line program, so it comes from a variable.
_NEWLINE = "_rb_n=$(printf '\\nx');_rb_n=${_rb_n%x};"


def quote(text: str) -> str:
    """One word for sh, on one line whatever `text` holds. Uses $_rb_n for newlines: see `program`."""
    if "\0" in text:
        raise RigbookError("shell.nul-byte", "a command or path cannot hold a NUL byte", exit_code=USAGE)
    if _PLAIN.match(text):
        return text
    return "'" + text.replace("'", "'\\''").replace("\n", "'\"$_rb_n\"'") + "'"


def join(argv: Sequence[str]) -> str:
    return " ".join(quote(word) for word in argv)


def path(remote: str) -> str:
    """A remote path for sh; a leading `~/` is the far side's HOME."""
    if remote == "~":
        return '"$HOME"'
    if remote.startswith("~/"):
        return '"$HOME"/' + quote(remote[2:])
    # A name that starts with a dash would read as an option.
    return quote("./" + remote if remote.startswith("-") else remote)


def program(
    argv: Sequence[str] | None = None,
    *,
    script: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
) -> bytes:
    """The first line of stdin. `timeout` (seconds) is kept by the far side: a closed channel stops nothing."""
    if (argv is None) == (script is None):
        raise TypeError("give argv or script, and only one of them")
    parts = []
    if cwd is not None:
        # 125 as `env` and `timeout` have it: the command itself was not started.
        parts.append(f"cd {path(cwd)} || exit 125;")
    for name, value in (env or {}).items():
        if not _NAME.match(name):
            raise RigbookError("shell.bad-variable", f"{name!r} is not a name for a variable", exit_code=USAGE)
        parts.append(f"export {name}={quote(value)};")
    if argv is not None:
        if not argv:
            raise RigbookError("shell.no-command", "there is no command to run", exit_code=USAGE)
        body, words = f"exec {join(argv)}", join(argv)
    else:
        assert script is not None
        body = f"eval {quote(script)}"
        words = f"/bin/sh -c {quote(script)}"
    if timeout is not None:
        limit = f"timeout -k 2 {timeout:g} {words}"
        # BusyBox before 1.30 has another syntax: try it rather than guess, and fall back to our own clock.
        body = f"if timeout -k 1 5 true 2>/dev/null;then exec {limit};else {body};fi"
    parts.append(body)
    line = "".join(parts)
    if "$_rb_n" in line:
        line = _NEWLINE + line
    return line.encode("utf-8", "surrogateescape") + b"\n"


def opening(line: bytes, *, direct: bool = False, public: bool = False) -> tuple[str, bytes, bytes]:
    """How a program begins: the route's command, the word on the line before its own output, the first line of stdin.

    `direct`: the login shell itself may read the program; `public`: anybody there may see it."""
    nonce = "RB" + secrets.token_hex(8)
    if direct and public and len(line) < PUBLIC_LIMIT:
        return f"echo {nonce};echo {nonce} >&2;{line.decode().rstrip()}", nonce.encode(), b""
    read = f'echo {nonce} >&2;IFS= read -r s&&eval "$s"'
    command = f"echo {nonce};{read}" if direct else f"exec /bin/sh -c 'echo {nonce} \"$SHELL\";{read}'"
    return command, nonce.encode(), line


class Marker:
    """Drops what login scripts print before the marker line. Feed it chunks; it gives back the command's own bytes."""

    LIMIT = 1 << 20  # a login banner of more than 1 MiB is not one

    def __init__(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._held = b""
        self.seen = False
        self.told = ""  # the login shell, on stdout

    @property
    def noise(self) -> bytes:
        """What came before the marker."""
        return self._held

    def feed(self, data: bytes) -> bytes:
        if self.seen:
            return data
        self._held += data
        start = -1
        while (start := self._held.find(self._nonce, start + 1)) >= 0:
            end = self._held.find(b"\n", start)
            rest = self._held[start + len(self._nonce) : end]
            # The whole line, with at most a path: a shell that prints what it runs (set -x) prints the word, too.
            if end >= 0 and rest[:2] in (b"", b" ", b" /"):
                after = self._held[end + 1 :]
                self.told = rest.strip().decode("utf-8", "replace")
                self.seen, self._held = True, self._held[:start]
                return after
        if len(self._held) > self.LIMIT:
            self._held = self._held[-self.LIMIT :]
        return b""


# Prints the absolute path of a Python >= 3.9, or exits 127. Absolute candidates first: a conda or venv python
# in front of PATH is somebody's work environment, not ours. `-I -S` keeps its site hooks out.
FIND_PYTHON = (
    "for p in /usr/bin/python3 /usr/local/bin/python3 $(command -v python3) /usr/bin/python3.[0-9]* "
    '"$HOME"/.local/bin/python3;do '
    '[ -x "$p" ]&&"$p" -I -S -c "import sys;sys.exit(sys.version_info<(3,9))" 2>/dev/null'
    '&&{ printf %s "$p";exit 0;};done;exit 127'
)
