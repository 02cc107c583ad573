"""Which keys to show a server, in OpenSSH's order, without ever asking for a passphrase.

1. agent keys that an IdentityFile names  2. the agent's other keys (unless IdentitiesOnly)  3. key files

Each with its certificate first. The order matters: a server counts every key that is shown (MaxAuthTries, 6).
Locked key files are remembered, since "permission denied" is then best answered with `ssh-add FILE`.
"""

from __future__ import annotations

import asyncio
import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from remote.resolve import Resolved

AGENT_S = 5.0


@dataclass
class Offer:
    pairs: list[Any] = field(default_factory=list)  # asyncssh.SSHKeyPair
    agent: Any = None  # open until the login is done: its keys sign there
    locked: list[Path] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()


async def offer(resolved: Resolved) -> Offer:
    made = Offer()
    files: list[tuple[Path, Any, asyncssh.SSHKey]] = []  # path, private key or None, public key
    for path in resolved.identities:
        found = _read(path)
        if isinstance(found, str):
            if found or resolved.named_identities:
                made.unusable.append(found or f"{path}: no such file")
            continue
        private, public, locked = found
        if public is not None:
            files.append((path, private, public))
        if locked:
            made.locked.append(path)
    certificates = _certificates(resolved, [path for path, *_ in files], made)
    held = await _agent_pairs(resolved, made)
    named = {public.public_data: n for n, (_, _, public) in enumerate(files)}
    for certificate in certificates:
        named.setdefault(certificate.key.public_data, len(named))
    only = resolved.on("identitiesonly")
    for pair in sorted(held, key=lambda pair: named.get(_plain(pair), len(named))):
        if not only or _plain(pair) in named:
            made.pairs += [*_with(pair, certificates), pair]
    from_agent = {_plain(pair) for pair in held}
    for _, private, public in files:
        if private is not None and public.public_data not in from_agent:
            made.pairs += asyncssh.load_keypairs([private], certlist=certificates)
    made.locked = [path for path in made.locked if not _in_agent(path, files, from_agent)]
    return made


def _plain(pair: Any) -> bytes:
    """A pair's public key; for a certificate that the agent holds, the key inside."""
    if not pair.algorithm.endswith(b"-cert-v01@openssh.com"):
        return bytes(pair.public_data)
    try:
        return bytes(asyncssh.public_key.decode_ssh_certificate(pair.public_data).key.public_data)
    except (ValueError, asyncssh.KeyImportError):
        return bytes(pair.public_data)


def _with(pair: Any, certificates: list[Any]) -> list[Any]:
    found = []
    for certificate in certificates:
        if certificate.key.public_data == pair.public_data:
            signed = copy.copy(pair)
            signed.set_certificate(certificate)
            found.append(signed)
    return found


def _in_agent(path: Path, files: list[tuple[Path, Any, asyncssh.SSHKey]], held: set[bytes]) -> bool:
    return any(known == path and public.public_data in held for known, _, public in files)


_keys: dict[Path, tuple[tuple[int, int], Any]] = {}


def _read(path: Path) -> str | tuple[Any, asyncssh.SSHKey | None, bool]:
    """(private key or None, public key or None, locked), or why it is no key ("" when there is no such file)."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    mark = (found.st_mtime_ns, found.st_ino)
    if path not in _keys or _keys[path][0] != mark:
        _keys[path] = (mark, _parse(path))
    parsed: str | tuple[Any, asyncssh.SSHKey | None, bool] = _keys[path][1]
    return parsed


def _parse(path: Path) -> str | tuple[Any, asyncssh.SSHKey | None, bool]:
    said, locked = "", False
    try:
        private = asyncssh.read_private_key(str(path))
        return private, private.convert_to_public(), False
    except (OSError, ValueError) as error:
        said, locked = f"{path}: {error}", "assphrase" in str(error)
    # The public half lies beside it, or in clear in the same file; or an agent holds the rest of `IdentityFile x.pub`.
    for file in (path, path.with_name(f"{path.name}.pub")):
        try:
            return None, asyncssh.read_public_key(str(file)), locked
        except (OSError, ValueError):
            continue
    return (None, None, True) if locked else said


def _certificates(resolved: Resolved, keys: list[Path], made: Offer) -> list[Any]:
    found: list[Any] = []
    for path in resolved.certificates:
        try:
            found += asyncssh.load_certificates(str(path))
        except (OSError, ValueError) as error:
            made.unusable.append(f"{path}: {error}")
    for key in keys:
        beside = key.with_name(f"{key.name}-cert.pub")
        try:
            found += asyncssh.load_certificates(str(beside)) if beside.is_file() else []
        except (OSError, ValueError) as error:
            made.unusable.append(f"{beside}: {error}")
    return found


async def _agent_pairs(resolved: Resolved, made: Offer) -> list[Any]:
    if not resolved.agent:
        return []
    try:
        async with asyncio.timeout(AGENT_S):  # a forwarded agent whose other end has gone answers nothing
            made.agent = await asyncssh.connect_agent(resolved.agent)
            return list(await made.agent.get_keys())
    except (OSError, ValueError, asyncssh.Error) as error:
        # ssh goes on without an agent, too.
        made.unusable.append(f"the agent at {resolved.agent}: {error or type(error).__name__}")
        return []
