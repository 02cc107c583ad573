"""A person's script, and why a command could not be started: what `rigbook exec` needs beyond running argv.

A script reaches its interpreter as a here-document on descriptor 3 (`sh /dev/fd/3 ARGS 3<<…`), so it never shows in
`ps`, needs no file on the far side (which may be full, read-only or noexec) and leaves stdin to itself.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence

from remote import shell
from remote.connect import Link
from remote.result import Result
from state.errors import USAGE, RigbookError

SUDO = ("sudo", "-n", "--")


def script_of(source: bytes, arguments: Sequence[str], *, sudo: bool = False) -> str:
    """sh that runs `source` by the interpreter that its first line names, or by sh."""
    text = source.decode("utf-8", "surrogateescape")
    first = text.partition("\n")[0]
    words = ["/bin/sh"]
    if first.startswith("#!"):
        words = shlex.split(first[2:])
        if words and words[0].rpartition("/")[2] == "env":
            words = [word for word in words[1:] if word != "-S"]
        if not words:
            raise RigbookError("exec.no-interpreter", f"{first!r} names no interpreter", exit_code=USAGE)
    mark = f"RB{secrets.token_hex(8)}"
    body = text if text.endswith("\n") else f"{text}\n"
    # sudo closes every descriptor but the first three: then the script takes stdin's place.
    descriptor, name = ("", "/dev/stdin") if sudo else ("3", "/dev/fd/3")
    argv = [*(SUDO if sudo else ()), *words, name, *arguments]
    return f"exec {' '.join(shlex.quote(word) for word in argv)} {descriptor}<<'{mark}'\n{body}{mark}\n"


_SUDO = re.compile(rb"sudo: |[Ss]orry, |.*not in the sudoers file|.*not allowed to (run|execute)")


def sudo_refusal(result: Result) -> str | None:
    """sudo's own reason for not running a command; None when the command ran. With -n it never waits for a password."""
    if result.state != "exited" or result.exit not in (1, 127) or result.stdout:
        return None
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit == 127:
        missing = lines and b"sudo" in lines[-1] and b"not found" in lines[-1]
        return "there is no sudo on this host" if missing else None
    if not lines or not all(_SUDO.match(line) for line in lines):
        return None
    return lines[-1].decode("utf-8", "replace").removeprefix("sudo: ")


# What a person wants to know of a command that did not start. The login shell's PATH is asked for with a deadline,
# since its start-up files may do anything; what they print before the mark is not ours.
_WHY = """LC_ALL=C;export LC_ALL
case $c in */*) ;; *) if p=$(command -v -- "$c");then c=$p;else
s=$(getent passwd "$(id -un)" 2>/dev/null|cut -d: -f7);s=${s:-${SHELL:-/bin/sh}}
l=$(timeout 5 "$s" -lc "echo $m;command -v '$c'" 2>/dev/null </dev/null|sed -n "/^$m\\$/,\\$p"|sed -n 2p)
if [ -n "$l" ];then echo "login $l";else echo "path $PATH";fi;exit;fi;;esac
if [ ! -e "$c" ];then echo missing;elif [ -d "$c" ];then echo directory
else mp=$(df -P "$c" 2>/dev/null|awk 'NR==2{print $6}')
if awk -v p="$mp" '$2==p{o=$4} END{exit o !~ /(^|,)noexec(,|$)/}' /proc/mounts;then echo "noexec $mp"
elif [ ! -x "$c" ];then echo mode;else echo "other $(head -c 2 "$c" 2>/dev/null|tr -dc '#!')";fi;fi"""


async def why_not(link: Link, program: str, cwd: str | None = None) -> str | None:
    """Why `program` was not started (exit code 126 or 127), in a sentence; None when nothing speaks against it."""
    mark = f"RB{secrets.token_hex(8)}"
    if "'" in program or "\n" in program:
        return None
    try:
        found = await link.run(script=f"c={shell.quote(program)};m={mark};{_WHY}", cwd=cwd, timeout=15)
    except RigbookError:
        return None
    kind, _, rest = found.text().strip().partition(" ")
    return {
        "login": f"{program} is not in the PATH of a command, but a login shell finds {rest}: give that name "
        "(host.path)",
        "path": f"{program} is not in PATH ({rest}), nor in that of a login shell (host.path)",
        "missing": f"there is no {program}",
        "directory": f"{program} is a directory",
        "noexec": f"{rest} is mounted noexec: nothing starts from there; name the interpreter (file.noexec)",
        "mode": f"{program} may not be executed by this user: chmod +x",
    }.get(kind)
