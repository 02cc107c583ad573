"""What `ssh TARGET` would do, as data: `ssh -G` where the binary is there, asyncssh's own parser where it is not.

OpenSSH's own reading of the files is the only one that is right by definition. Parsers that imitate it differ where
it hurts: asyncssh reads `Include` globs unsorted and takes `UserKnownHostsFile none` for "check nothing", others take
an unknown `Match` for matched. `differences` tells where asyncssh's reading would have led elsewhere.

`ssh -G` expands `%h` and `~` in HostName, the known_hosts files and IdentityAgent, and leaves the rest to us.
"""

from __future__ import annotations

import functools
import getpass
import glob
import hashlib
import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from remote import remembered
from state.errors import USAGE, RigbookError

_TARGET = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]\s]+\]|[^:@\s\[\]]+)(?::(?P<port>\d{1,5}))?\Z")
# A name may end in a ProxyCommand or a `Match exec`, which a shell reads (OpenSSH refuses these since 9.6).
_UNSAFE = re.compile(r"\A-|[\x00-\x20\x7f'\"`$\\;&<>|(){}]")
# What makes an answer depend on more than the files: a command, the network, a name server, the environment.
_DYNAMIC = re.compile(
    r"^\s*(match\b.*\b(exec|localnetwork)\b|canonicalizehostname\s*=?\s*(yes|always))|\$\{", re.I | re.M
)
_INCLUDE = re.compile(r"^\s*include\s*=?\s*(.+?)\s*$", re.I | re.M)
ASK_S = 20.0
DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "id_xmss", "id_dsa")
_OWN = {"host", "hostname", "user", "port", "loglevel"}  # always there, and fields of their own
_SEVERAL = {"identityfile", "certificatefile", "sendenv", "setenv", "localforward", "remoteforward", "dynamicforward"}


@dataclass(frozen=True)
class Target:
    """`[user@]host[:port]`, as it stands in the project file or in a ProxyJump."""

    host: str
    user: str | None = None
    port: int | None = None

    def words(self) -> list[str]:
        """For ssh's command line."""
        return [*(["-p", str(self.port)] if self.port else []), f"{self.user}@{self.host}" if self.user else self.host]


@dataclass(frozen=True)
class Resolved:
    """How a target is reached. Paths are expanded; a value that nobody configured is empty, so that ours counts."""

    target: Target
    host: str
    port: int
    user: str
    values: Mapping[str, tuple[str, ...]]  # ssh's keywords in lower case; only what is configured
    identities: tuple[Path, ...]
    named_identities: bool  # by IdentityFile; else they are the files that ssh looks for by itself
    certificates: tuple[Path, ...]
    agent: str  # the socket; "" for none
    known_hosts: tuple[Path, ...]
    revoked: Path | None
    jumps: tuple[Target, ...]
    proxy_command: str | None
    known_hosts_command: str | None
    alias: str | None
    config: Path | None
    source: str  # "ssh -G" or "asyncssh"
    notes: tuple[str, ...] = field(default=())

    def one(self, key: str) -> str | None:
        found = self.values.get(key)
        return found[0] if found else None

    def on(self, key: str) -> bool:
        return self.one(key) in ("yes", "true")

    def names(self, key: str) -> list[str]:
        """A comma-separated list, when it was configured."""
        return (self.one(key) or "").split(",") if self.one(key) else []

    def where(self) -> tuple[str, int]:
        """The name and port under which known_hosts files know it."""
        return (self.alias, 22) if self.alias else (self.host.lower(), self.port)


def parse(text: str, what: str = "the target") -> Target:
    """alias, user@host, user@host:port, user@[v6]:port, and the same behind ssh://. Raises `host.bad-address`."""
    match = _TARGET.match(text.removeprefix("ssh://"))
    host = match["host"].strip("[]") if match else ""
    if not match or _UNSAFE.search(host) or _UNSAFE.search(match["user"] or ""):
        raise RigbookError("host.bad-address", f"{what} = {text!r} is not [user@]host[:port]", exit_code=USAGE)
    return Target(host, match["user"], int(match["port"]) if match["port"] else None)


def resolve(target: Target, config: Path | None) -> Resolved:
    """Raises `host.ssh-config` when the config cannot be read. `config` replaces the user's and the system's files."""
    if config is not None and not config.is_file():
        raise RigbookError(
            "host.no-config", f"`project.ssh_config` names {config}, which is not there", exit_code=USAGE
        )
    ssh = shutil.which("ssh")
    if ssh is None:
        return _by_asyncssh(target, config)
    values = _asked(ssh, target, config)
    plain = _defaults(ssh)
    configured = {key: said for key, said in values.items() if said != plain.get(key) and key not in _OWN}
    return _resolved(target, config, configured, values, "ssh -G")


def differences(target: Target, config: Path | None) -> list[str]:
    """For `doctor`: where asyncssh would read the config otherwise, and what of it rigbook does not follow."""
    if shutil.which("ssh") is None:
        return ["there is no `ssh` here: the config was read by asyncssh, which sorts no Include"]
    ours = resolve(target, config)
    found = list(ours.notes)
    try:
        theirs = _by_asyncssh(target, config)
    except RigbookError as error:
        return [*found, f"asyncssh cannot read what ssh reads: {error.message}"]
    compared: list[tuple[str, Callable[[Resolved], object]]] = [
        ("HostName", lambda r: r.host),
        ("Port", lambda r: r.port),
        ("User", lambda r: r.user),
        ("IdentityFile", lambda r: [str(p) for p in r.identities] if r.named_identities else []),
        ("CertificateFile", lambda r: [str(p) for p in r.certificates]),
        ("HostKeyAlias", lambda r: r.alias),
        ("ProxyJump", lambda r: [hop.words() for hop in r.jumps]),
        ("ProxyCommand", lambda r: r.proxy_command),
        ("UserKnownHostsFile", lambda r: r.values.get("userknownhostsfile")),
    ]
    for name, get in compared:
        if get(ours) != get(theirs):
            found.append(f"{name}: ssh reads {get(ours)!r}, asyncssh would read {get(theirs)!r}; ssh's counts")
    return found


# --- ssh -G ---------------------------------------------------------------------------------------------------------

_Values = dict[str, tuple[str, ...]]
_cache: dict[tuple[str, ...], remembered.Answer] = {}


def _asked(ssh: str, target: Target, config: Path | None) -> _Values:
    """`ssh -G`, remembered while every file that it read, and every directory an Include looks into, is unchanged."""
    surroundings = (os.environ.get("HOME", ""), os.environ.get("SSH_AUTH_SOCK", ""), str(os.getuid()))
    key = (ssh, *target.words(), str(config), *surroundings)
    kept = _cache.get(key)
    if kept is None or not kept.holds:
        kept = remembered.load(key)
    if kept is not None:
        _cache[key] = kept
        return kept.values
    options = ["-F", str(config)] if config else []
    try:
        done = subprocess.run(
            [ssh, "-v", *options, "-G", *target.words()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = (
            f"ssh -G did not end within {ASK_S:g} s: a `Match exec` that waits, or a name server that does not answer?"
        )
        raise _unusable(target, config, why) from None
    said = done.stderr.decode("utf-8", "surrogateescape").splitlines()
    if done.returncode:
        told = [line for line in said if not line.startswith(("debug1:", "OpenSSH_", "Pseudo-terminal"))]
        raise _unusable(target, config, "; ".join(told) or f"ssh -G ended with {done.returncode}")
    values = _parsed(done.stdout.decode("utf-8", "surrogateescape"))
    read = [line.partition("Reading configuration data ")[2] for line in said if "Reading configuration data" in line]
    # Files that are not there may come to be there.
    watched = {*read, *([str(config)] if config else [str(_home() / ".ssh/config"), "/etc/ssh/ssh_config"])}
    for path in list(watched):
        text = _text(path)
        if _DYNAMIC.search(text):
            return values
        for pattern in _included(text, system=path.startswith("/etc/")):
            watched.add(os.path.dirname(pattern))
            if glob.has_magic(os.path.dirname(pattern)):
                return values
    _cache[key] = remembered.Answer({path: remembered.mark(path) for path in (ssh, *sorted(watched))}, values)
    remembered.store(key, _cache[key])
    return values


def _parsed(text: str) -> _Values:
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return {key: tuple(said) if key in _SEVERAL else tuple(said[:1]) for key, said in values.items()}


@functools.cache
def _defaults(ssh: str) -> _Values:
    """What this ssh says when nothing is configured."""
    key = ("defaults", ssh, str(os.getuid()))
    if (kept := remembered.load(key)) is not None:
        return kept.values
    done = subprocess.run(
        [ssh, "-F", "none", "-G", "localhost"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    answer = remembered.Answer({ssh: remembered.mark(ssh)}, _parsed(done.stdout.decode("utf-8", "surrogateescape")))
    remembered.store(key, answer)
    return answer.values


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _included(text: str, *, system: bool) -> list[str]:
    found = []
    for line in _INCLUDE.findall(text):
        for word in re.findall(r'"([^"]*)"|(\S+)', line):
            pattern = _tilde(word[0] or word[1])
            base = Path("/etc/ssh") if system else _home() / ".ssh"
            found.append(pattern if os.path.isabs(pattern) else str(base / pattern))
    return found


def _home() -> Path:
    """As ssh has it: from the password file, whatever HOME says."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def _tilde(path: str) -> str:
    return str(_home() / path[2:]) if path.startswith("~/") else os.path.expanduser(path)


# --- from keywords to what we need ----------------------------------------------------------------------------------


def _resolved(
    target: Target, config: Path | None, configured: _Values, values: Mapping[str, tuple[str, ...]], source: str
) -> Resolved:
    def one(key: str) -> str | None:
        found = values.get(key, ("",))[0]
        return None if found in ("", "none") else found

    host, port = one("hostname") or target.host, int(one("port") or 22)
    user = one("user") or target.user or getpass.getuser()
    alias = one("hostkeyalias")
    tokens = _tokens(target, host, port, user, alias)
    if alias:
        alias = tokens["k"] = _expand(alias, tokens, "HostKeyAlias").lower()

    def paths(key: str, what: str) -> tuple[Path, ...]:
        said = [value for value in values.get(key, ()) if value != "none"]
        return tuple(Path(_tilde(_expand(value, tokens, what))) for value in said)

    named = "identityfile" in configured
    identities = paths("identityfile", "IdentityFile") or (
        () if "identityfile" in values else tuple(_home() / ".ssh" / name for name in DEFAULT_KEYS)
    )
    agent = one("identityagent") if "identityagent" in configured else "SSH_AUTH_SOCK"
    if agent == "SSH_AUTH_SOCK":
        agent = os.environ.get("SSH_AUTH_SOCK")
    elif agent and agent.startswith("$"):
        agent = os.environ.get(agent.strip("${}"))
    revoked, command = one("revokedhostkeys"), one("proxycommand")
    keys_command = one("knownhostscommand")
    hosts = [*_file_list(values.get("userknownhostsfile")), *_file_list(values.get("globalknownhostsfile"))]
    if source == "asyncssh":
        hosts = [_expand(path, tokens, "UserKnownHostsFile") for path in hosts]
    return Resolved(
        target=target,
        host=host,
        port=port,
        user=user,
        values=configured,
        identities=identities,
        named_identities=named,
        certificates=paths("certificatefile", "CertificateFile"),
        agent=_tilde(agent) if agent else "",
        known_hosts=tuple(Path(_tilde(path)) for path in hosts),
        revoked=Path(_tilde(_expand(revoked, tokens, "RevokedHostKeys"))) if revoked else None,
        jumps=tuple(parse(hop, "ProxyJump") for hop in (one("proxyjump") or "").split(",") if hop),
        proxy_command=_expand(command, tokens, "ProxyCommand") if command else None,
        # Its tokens are about the key that the machine shows, so they are filled in when it has shown one.
        known_hosts_command=keys_command,
        alias=alias,
        config=config,
        source=source,
        notes=tuple(_notes(configured)),
    )


def _file_list(said: tuple[str, ...] | None) -> list[str]:
    """`ssh -G` prints several files on one line and drops the quotes: a word that starts no path continues one."""
    files: list[str] = []
    for word in said[0].split(" ") if said else []:
        if word in ("", "none") and not files:
            continue
        if word.startswith(("/", "~")) or not files:
            files.append(word)
        else:
            files[-1] += f" {word}"
    return files


def _notes(values: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What the config says and rigbook does otherwise, on purpose."""
    found = []
    strict = values.get("stricthostkeychecking", ("",))[0]
    if strict in ("no", "off", "false", "accept-new"):
        strict = strict if strict == "accept-new" else "no"
        found.append(f"StrictHostKeyChecking {strict} is not followed: rigbook always checks host keys")
    if values.get("forwardagent", ("no",))[0] not in ("no", "false"):
        found.append("ForwardAgent is not followed: nothing on a rig needs your keys")
    if values.get("nohostauthenticationforlocalhost", ("no",))[0] == "yes":
        found.append("NoHostAuthenticationForLocalhost is not followed: rigbook always checks host keys")
    if values.get("verifyhostkeydns", ("no",))[0] not in ("no", "false"):
        found.append("VerifyHostKeyDNS is not read: a key must be in a known_hosts file, or signed by a CA there")
    if values.get("proxyusefdpass", ("no",))[0] == "yes":
        found.append("ProxyUseFdpass is not supported: the ProxyCommand must carry the bytes itself")
    if "pkcs11provider" in values and find_spec("pkcs11") is None:
        found.append(
            "PKCS11Provider needs the package python-pkcs11; without it, give the token to an agent (ssh-add -s)"
        )
    if values.get("hostbasedauthentication", ("no",))[0] == "yes":
        found.append("HostbasedAuthentication is not tried")
    return found


def _tokens(target: Target, host: str, port: int, user: str, alias: str | None) -> dict[str, str]:
    local = socket.gethostname()
    return {
        "%": "%",
        "d": str(_home()),
        "h": host,
        "i": str(os.getuid()),
        "j": "",
        "k": alias or target.host,
        "L": local.partition(".")[0],
        "l": local,
        "n": target.host,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
        "C": hashlib.sha1(f"{local}{host}{port}{user}".encode()).hexdigest(),
    }


def _expand(value: str, tokens: Mapping[str, str], what: str) -> str:
    def token(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise RigbookError("host.ssh-config", f"{what}: %{match[1]} means nothing to ssh", exit_code=USAGE)
        return tokens[match[1]]

    value = re.sub(r"%(.)", token, value)
    return re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), value)


def by_hand(target: Target, config: Path | None) -> list[str]:
    """The same with OpenSSH, for people to try."""
    return ["ssh", *(["-F", str(config)] if config else []), *target.words()]


def _unusable(target: Target, config: Path | None, said: str) -> RigbookError:
    import shlex

    return RigbookError(
        "host.ssh-config",
        f"the ssh config for {target.host} cannot be used: {said}",
        hint=f"What does `{shlex.join([*by_hand(target, config), 'true'])}` say?",
        exit_code=USAGE,
    )


# --- without the ssh binary -----------------------------------------------------------------------------------------


_ASYNCSSH_EXPANDS = {"certificatefile", "identityagent", "identityfile", "proxycommand", "hostname"}


def _by_asyncssh(target: Target, config: Path | None) -> Resolved:
    """asyncssh's parser. It knows nothing of StrictHostKeyChecking and RevokedHostKeys; we are strict in any case."""
    from asyncssh.config import SSHClientConfig

    default = _home() / ".ssh" / "config"
    files = [config] if config else [file for file in (default, Path("/etc/ssh/ssh_config")) if file.is_file()]
    try:
        read = SSHClientConfig.load(
            None, files, False, False, False, getpass.getuser(), target.user or (), target.host, target.port or ()
        )
    except (OSError, ValueError, SyntaxError) as error:
        raise _unusable(target, config, str(error)) from error
    values: _Values = {}
    for name, raw in read.get_options(False).items():
        several = raw if isinstance(raw, list | tuple) else [raw]
        said = tuple({True: "yes", False: "no"}.get(v, str(v)) if isinstance(v, bool) else str(v) for v in several)
        key = name.lower()
        if key in _ASYNCSSH_EXPANDS:
            said = tuple(value.replace("%", "%%") for value in said)
        if key in ("userknownhostsfile", "globalknownhostsfile"):
            said = (" ".join(said) or "none",)
        values[key] = said if key in _SEVERAL else (",".join(said),)
    configured = dict(values)
    for key, name in (("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"),
                      ("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")):  # fmt: skip
        values.setdefault(key, (name,))
    if target.user:
        values["user"] = (target.user,)
    if target.port:
        values["port"] = (str(target.port),)
    return _resolved(target, config, configured, values, "asyncssh")
