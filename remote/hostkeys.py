"""Host keys: strict, with our own verdict on *why* a key is not trusted.

asyncssh raises one error for a key that nobody knows and for one that changed. The first is a question, the
second a hard stop, so we keep the key that was shown and look it up ourselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import asyncssh
from asyncssh.known_hosts import SSHKnownHosts

from state.errors import REFUSED, RigbookError

DEFAULT_FILES = (Path("~/.ssh/known_hosts"), Path("~/.ssh/known_hosts2"), Path("/etc/ssh/ssh_known_hosts"))


def load(files: Iterable[Path]) -> SSHKnownHosts:
    """The entries of all files that exist. One bad line does not take the good ones with it, as in OpenSSH."""
    known = SSHKnownHosts()
    for file in files:
        try:
            text = file.expanduser().read_text("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        for line in text.splitlines():
            try:
                known.load(line)
            except ValueError:
                continue
    return known


def lookup(known: SSHKnownHosts, host: str, addr: str, port: int) -> list[asyncssh.SSHKey]:
    """The keys on file for this host."""
    found = asyncssh.match_known_hosts(known, host, addr, port if port != 22 else None)
    return list(found[0])


class Watcher(asyncssh.SSHClient):
    """Refuses every key that known_hosts does not hold (asyncssh asks only then) and remembers which it was."""

    def __init__(self) -> None:
        self.shown: asyncssh.SSHKey | None = None
        self.addr = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown, self.addr = key, addr
        return False


def refusal(
    name: str, host: str, port: int, shown: asyncssh.SSHKey | None, on_file: list[asyncssh.SSHKey], pin_file: Path
) -> RigbookError:
    """`host.key-changed` when other keys are on file for it, `host.key-unknown` when none is."""
    print_ = shown.get_fingerprint() if shown else "(no key of a type that is on file)"
    where = f"[{host}]:{port}" if port != 22 else host
    if on_file:
        old = ", ".join(key.get_fingerprint() for key in on_file)
        return RigbookError(
            "host.key-changed",
            f"the host key of {where} changed: known {old}, shown {print_}",
            host=name,
            hint="Somebody reinstalled it, or somebody is in between. Compare on the machine's console, then: "
            f"ssh-keygen -R '{where}'",
            exit_code=REFUSED,
        )
    return RigbookError(
        "host.key-unknown",
        f"nobody has vouched for the host key of {where}: {print_}",
        host=name,
        hint=f"Compare it on the machine's console, then log in once with ssh, or add the key to {pin_file}.",
        exit_code=REFUSED,
    )


def pin(file: Path, host: str, port: int, public_key: str) -> None:
    """Add a key that is known over a channel already trusted. Replaces the entries of the same name."""
    where = f"[{host}]:{port}" if port != 22 else host
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [line for line in lines if line.split(" ", 1)[0] != where]
    kind, data = public_key.split()[:2]
    kept.append(f"{where} {kind} {data}")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text("\n".join(kept) + "\n")
    temporary.replace(file)
