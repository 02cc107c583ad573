"""Host keys: strict, and with our own verdict on *why* a key is not trusted.

asyncssh raises one error for a key that nobody knows and for one that changed, refuses a good key when it comes inside
a certificate of a stranger, and knows no RevokedHostKeys. So the verdict is `Judge.decide`, in the order of OpenSSH:

    revoked (@revoked, RevokedHostKeys)  →  signed by a CA on file, for this name, in time  →  on file  →
    changed (another key is on file)  →  unknown

Were asyncssh to stop asking us, its own check would run on an empty list and refuse every key.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.known_hosts import SSHKnownHosts

from state.errors import REFUSED, USAGE, RigbookError

DEFAULT_FILES = (Path("~/.ssh/known_hosts"), Path("~/.ssh/known_hosts2"), Path("/etc/ssh/ssh_known_hosts"))
_KRL = b"SSHKRL\n\x00"  # a binary list of revoked keys; ssh-keygen reads it for us


def load(files: Iterable[Path]) -> SSHKnownHosts:
    """The entries of all files that exist. One bad line does not take the good ones with it, as in OpenSSH."""
    known = SSHKnownHosts()
    for file in files:
        try:
            text = file.expanduser().read_text("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        _add(known, text)
    return known


def _add(known: SSHKnownHosts, text: str) -> SSHKnownHosts:
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


_files: dict[Path, tuple[tuple[int, int, int], SSHKnownHosts]] = {}


def _read(file: Path) -> SSHKnownHosts:
    """One file, parsed again only when it changed: with thousands of hashed lines that is most of a connect."""
    try:
        found = os.stat(file)
    except OSError:
        return SSHKnownHosts()
    mark = (found.st_mtime_ns, found.st_size, found.st_ino)
    if file not in _files or _files[file][0] != mark:
        _files[file] = (mark, load([file]))
    return _files[file][1]


@dataclass
class Refused(Exception):
    """A host key that we do not take. `file` and `where` name the line that contradicts it."""

    why: str  # unknown, changed, revoked
    key: asyncssh.SSHKey | None
    on_file: list[asyncssh.SSHKey] = field(default_factory=list)
    file: Path | None = None
    detail: str = ""


@dataclass
class Judge:
    """Decides about the host key of one machine. `names` are looked up in `pins`, `where` in the known_hosts files."""

    where: tuple[str, int]
    pins: Path
    name: str  # of the host in the project, which pins are kept under; "" for a jump host
    files: Sequence[Path]
    revoked: Path | None = None
    command_lines: str = ""
    accept_new: bool = False
    shown: asyncssh.SSHKey | None = None
    ca: asyncssh.SSHKey | None = None
    accepted: bool = False  # it was unknown, and is trusted because the caller asked for that

    def __post_init__(self) -> None:
        host, port = self.where
        self._keys: list[tuple[Path | None, asyncssh.SSHKey]] = []
        self._cas: list[asyncssh.SSHKey] = []
        self._revoked: list[asyncssh.SSHKey] = []
        lookups: list[tuple[Path | None, SSHKnownHosts, str, int]] = [
            (self.pins, _read(self.pins), host, port),
        ]
        if self.name:
            lookups.insert(0, (self.pins, _read(self.pins), self.name, 22))
        lookups += [(file, _read(file), host, port) for file in self.files]
        if self.command_lines:
            lookups.append((None, _add(SSHKnownHosts(), self.command_lines), host, port))
        for file, known, name, at in lookups:
            # By name only: an address that a name server gave must not vouch for the name (OpenSSH's CheckHostIP no).
            keys, cas, revoked, *_ = asyncssh.match_known_hosts(known, name, "", at if at != 22 else None)
            self._keys += [(file, key) for key in keys]
            self._cas += cas
            self._revoked += revoked

    def algorithms(self) -> list[str]:
        """What to ask for: the types on file first, then the rest, so that a machine with another key shows it."""
        from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

        usual = [*get_default_public_key_algs()]
        known = [alg for _, key in self._keys for alg in key.sig_algorithms if alg in usual]
        certificates = [*get_default_certificate_algs()] if self._cas else []
        return [alg.decode() for alg in dict.fromkeys([*certificates, *known, *usual])]

    def decide(self, key_data: bytes) -> asyncssh.SSHKey:
        """The key, when it is to be trusted. Raises Refused."""
        certificate = _certificate(key_data)
        key = certificate.key if certificate else asyncssh.public_key.decode_ssh_public_key(key_data)
        self.shown = key
        self._check_revoked(key, certificate)
        stale = ""
        if certificate is not None and certificate.signing_key in self._cas:
            try:
                certificate.validate(asyncssh.public_key.CERT_TYPE_HOST, None)
                _check_principal(certificate, self.where[0])
            except ValueError as error:
                # As OpenSSH, we then look at the plain key.
                stale = f"its certificate is not good for this: {error}"
            else:
                self.ca = certificate.signing_key
                return key
        if any(known == key for _, known in self._keys):
            return key
        if self._keys:
            file = next((file for file, _ in self._keys if file), None)
            raise Refused("changed", key, [known for _, known in self._keys], file, stale)
        if self._cas and not stale:
            stale = "known_hosts names a certificate authority for it, which did not sign this key"
        if self.accept_new and not self._cas:
            self.accepted = True
            return key
        raise Refused("unknown", key, detail=stale)

    def _check_revoked(self, key: asyncssh.SSHKey, certificate: Any) -> None:
        signer = certificate.signing_key if certificate else None
        if key in self._revoked or (signer is not None and signer in self._revoked):
            raise Refused("revoked", key, detail="known_hosts marks it with @revoked")
        if self.revoked is None:
            return
        try:
            data = self.revoked.read_bytes()
        except OSError as error:
            # OpenSSH then trusts no key at all.
            raise Refused("revoked", key, detail=f"RevokedHostKeys {self.revoked}: {error.strerror}") from error
        if data.startswith(_KRL):
            if _in_krl(self.revoked, certificate or key):
                raise Refused("revoked", key, detail=f"it is in the revocation list {self.revoked}")
            return
        for line in data.decode("utf-8", "replace").splitlines():
            try:
                listed = asyncssh.import_public_key(line)
            except asyncssh.KeyImportError:
                continue
            if listed in (key, signer):
                raise Refused("revoked", key, detail=f"it is listed in {self.revoked}")

    def told(self) -> str:
        """The trusted key in words, for `route()`."""
        print_ = self.shown.get_fingerprint() if self.shown else ""
        return f"{print_}, signed by CA {self.ca.get_fingerprint()}" if self.ca else print_


def _certificate(key_data: bytes) -> Any:
    from asyncssh.public_key import decode_ssh_certificate

    try:
        found = decode_ssh_certificate(key_data)
    except asyncssh.KeyImportError:
        return None
    return None if found.is_x509_chain else found


def _check_principal(certificate: Any, host: str) -> None:
    # asyncssh compares whole names; OpenSSH lets a CA sign for `*.example.com`.
    patterns = [re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") for name in certificate.principals]
    if patterns and not any(re.fullmatch(pattern, host, re.I) for pattern in patterns):
        raise ValueError(f"it is for {', '.join(certificate.principals)}, not for {host}")


def _in_krl(list_: Path, key: Any) -> bool:
    """ssh-keygen -Q says (by its exit code) whether a key or certificate is revoked. No answer counts as yes."""
    with tempfile.NamedTemporaryFile(suffix=".pub") as file:
        export = key.export_certificate if hasattr(key, "export_certificate") else key.export_public_key
        file.write(export())
        file.flush()
        try:
            done = subprocess.run(["ssh-keygen", "-Q", "-f", str(list_), file.name], capture_output=True, check=False)
        except FileNotFoundError:
            return True
        return done.returncode != 0


def from_command(command: str, tokens: Mapping[str, str]) -> str:
    """What a KnownHostsCommand prints. It is run without a shell, as OpenSSH does; the user's own config names it."""
    import shlex

    words = []
    for word in shlex.split(command):
        for token, value in tokens.items():
            word = word.replace(f"%{token}", value)
        if re.sub("%%", "", word).count("%"):
            text = f"KnownHostsCommand {command}: what depends on the key that is shown (%K, %t, %f) is not filled in"
            raise RigbookError("host.ssh-config", text, exit_code=USAGE)
        words.append(word.replace("%%", "%"))
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RigbookError("host.ssh-config", f"KnownHostsCommand {command}: {error}", exit_code=USAGE) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise RigbookError(
            "host.ssh-config", f"KnownHostsCommand {command} ended with {done.returncode} {said}", exit_code=USAGE
        )
    return done.stdout.decode("utf-8", "replace")


class Watcher(asyncssh.SSHClient):
    """Puts a judge where asyncssh decides about the server's key."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.refused: Refused | None = None
        self.at_end: Callable[[], object] | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        def decide(key_data: bytes) -> asyncssh.SSHKey:
            try:
                key = self.judge.decide(key_data)
            except Refused as refused:
                self.refused = refused
                raise asyncssh.HostKeyNotVerifiable(refused.why) from refused
            except (ValueError, asyncssh.KeyImportError) as error:
                raise asyncssh.HostKeyNotVerifiable(f"a host key that cannot be read: {error}") from error
            return key

        conn.validate_server_host_key = decide  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.at_end is not None:
            self.at_end()


def refusal(name: str, where: tuple[str, int], refused: Refused, pins: Path) -> RigbookError:
    """The sentence for a key that was refused, with what to do."""
    host, port = where
    place = _place(host, port)
    print_ = refused.key.get_fingerprint() if refused.key else "(none)"
    detail = f" ({refused.detail})" if refused.detail else ""
    if refused.why == "revoked":
        return RigbookError(
            "host.key-revoked",
            f"the host key of {place} is revoked: {print_}{detail}",
            host=name,
            hint="Somebody may have copied that key. Give the machine a new one, or find out who answers there.",
            exit_code=REFUSED,
        )
    if refused.why == "changed":
        old = ", ".join(key.get_fingerprint() for key in refused.on_file)
        file = refused.file
        entry = name if file == pins else place
        # ssh-keygen looks into the user's own file when it is told no other.
        of = f" -f '{file}'" if file and file != Path("~/.ssh/known_hosts").expanduser() else ""
        return RigbookError(
            "host.key-changed",
            f"the host key of {place} changed: known {old}, shown {print_}{detail}",
            host=name,
            hint="Somebody reinstalled it, or somebody is in between. Compare on the machine's console, then: "
            f"ssh-keygen -R '{entry}'{of}",
            exit_code=REFUSED,
        )
    return UnknownKey(name, where, refused, pins)


class UnknownKey(RigbookError):
    """`host.key-unknown`, with what it takes to pin the key that was shown."""

    def __init__(self, name: str, where: tuple[str, int], refused: Refused, pins: Path) -> None:
        assert refused.key is not None
        self._refused, self._pins = refused, pins
        # A jump host has no name in the project.
        self._entry = (name, 22) if name else where
        detail = f" ({refused.detail})" if refused.detail else ""
        super().__init__(
            "host.key-unknown",
            f"nobody has vouched for the host key of {_place(*where)}: {refused.key.get_fingerprint()}{detail}",
            host=name or None,
            hint="Compare it on the machine's console (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then: "
            "rigbook hosts trust HOST",
            exit_code=REFUSED,
        )

    def behind(self, hop: str, name: str) -> UnknownKey:
        """The same, told for the host that lies behind this jump host."""
        self.message, self.host = f"jump host {hop}: {self.message}", name or None
        return self

    def pin(self) -> str:
        assert self._refused.key is not None
        (line,) = pin(self._pins, *self._entry, self._refused.key.export_public_key().decode())
        return line


def pins(root: Path) -> Path:
    """Where a project keeps the keys that it vouches for."""
    return root / ".rigbook" / "known_hosts"


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if port != 22 else host


def pin(file: Path, host: str, port: int, *public_keys: str) -> list[str]:
    """Keep keys that are known over a channel already trusted. They replace the entries of the same name. Tells each as
    `name fingerprint`."""
    where = _place(host, port)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands may pin at once
        lines = file.read_text().splitlines() if file.exists() else []
        kept = [line for line in lines if line.split(" ", 1)[0] != where]
        for public_key in public_keys:
            kind, data = public_key.split()[:2]
            kept.append(f"{where} {kind} {data}")
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        temporary.write_text("\n".join(kept) + "\n")
        temporary.replace(file)
    return [f"{where} {asyncssh.import_public_key(key).get_fingerprint()}" for key in public_keys]
