"""What can be wrong with a host, looked at in one round trip by sh alone, so that it works where nothing else does.

    findings = await look(link)

A second round trip opens as many sessions as we use at most, and asks for the sftp subsystem: what sshd allows cannot
be read from a file whose name only sshd knows. Everything is told with what was seen, and nothing is changed but for a
file that is written to the state directory and taken away again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import asyncssh

from remote import pythons, resolve, shell
from remote.check_list import CHECKS
from remote.connect import Link
from remote.ssh import PER_LANE, SSHLink
from state.checks import HERE as LOCAL
from state.checks import Finding
from state.errors import UNREACHABLE, RigbookError

LOOK_S = 40.0
SKEW_S = 2.0
ROOM = 1 << 30  # bytes that the state directory should have free
SHM = 1 << 30

_SCRIPT = """echo "begin $(date +%s.%N)"
loc=$(locale 2>&1 >/dev/null|head -n 1);[ -z "$loc" ]||echo "locale ${LC_ALL:-${LANG:-}} $loc"
LC_ALL=C;export LC_ALL
uid=$(id -u);me=$(id -un 2>/dev/null||echo "$uid");echo "user $uid $me"
p=$(FIND_PYTHON)&&echo "python $p"
for t in tar rsync sudo;do command -v $t >/dev/null 2>&1&&echo "has $t";done
echo "path $PATH"
for t in nvcc uv nvidia-smi;do c=$(command -v $t 2>/dev/null)&&echo "found $t $c";done
s=$(getent passwd "$me" 2>/dev/null|cut -d: -f7);s=${s:-${SHELL:-/bin/sh}}
case $s in *csh|*fish|*nologin|*false) ;; *)
timeout 5 "$s" -lc 'echo rigbook-login;echo "loginpath $PATH"
for t in nvcc uv nvidia-smi;do c=$(command -v $t)&&echo "loginfound $t $c";done' 2>/dev/null </dev/null|
sed -n '/^rigbook-login$/,$p'|sed 1d;;esac
for c in /usr/local/cuda*/bin/nvcc /opt/cuda/bin/nvcc "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv;do
[ -x "$c" ]&&echo "placed ${c##*/} $c";done
read -r one </proc/1/comm;echo "init $one"
if [ "$one" = systemd ]&&[ "$uid" != 0 ];then
if [ -e "/var/lib/systemd/linger/$me" ];then echo "linger yes";else echo "linger no";fi
l=org.freedesktop.login1
k=$(busctl get-property $l /org/freedesktop/login1 $l.Manager KillUserProcesses 2>/dev/null)
case $k in "b true") echo "kill yes";; "b false") echo "kill no";; *)
k=$(cat /etc/systemd/logind.conf /usr/lib/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf.d/*.conf 2>/dev/null|
sed -n 's/^ *KillUserProcesses *= *//p'|tail -n 1);[ -z "$k" ]||echo "kill $k";;esac;fi
if [ "$uid" != 0 ]&&command -v sudo >/dev/null 2>&1;then
if e=$(timeout 5 sudo -n true 2>&1 </dev/null);then echo "sudo yes";else echo "sudo $e"|head -n 1;fi;fi
d=STATE;(umask 077;mkdir -p "$d") 2>&1|head -n 1|sed 's/^/state-error /'
if [ -d "$d" ];then d=$(cd "$d"&&pwd -P);echo "state $d"
t=$d/.doctor.$$;e=$( { dd if=/dev/zero of="$t" bs=65536 count=1 conv=fsync >/dev/null; } 2>&1)||
echo "state-error $(echo "$e"|head -n 1)"
rm -f "$t"
df -Pk "$d" 2>/dev/null|awk 'NR==2{print "state-free",$4*1024,$6}'
m=$(df -P "$d" 2>/dev/null|awk 'NR==2{print $6}')
awk -v m="$m" '$2==m{l=$3" "$4} END{if(l!="")print "state-mount",l}' /proc/mounts;fi
df -Pk /dev/shm 2>/dev/null|awk 'NR==2{print "shm",$2*1024}'
echo "end $(date +%s.%N)\""""


async def look(link: Link) -> list[Finding]:
    """Everything that is wrong or worth knowing. Raises nothing: a host that cannot be reached is a finding."""
    try:
        await link.ready()
        # Sessions first: one that has just ended may still count.
        found = await _sessions(link) if isinstance(link, SSHLink) and not link.host.played else []
        said, noise, times = await _ask(link)
        found += [*judge(link.name, said, noise), *_clock(link.name, said, *times)]
        if "python" not in said:
            found.append(await _no_python(link))
        return found
    except RigbookError as error:
        return [unreachable(link.name, error)]


def unreachable(host: str, error: RigbookError) -> Finding:
    """A failed connection, by what it failed of."""
    id = {
        "host.key-unknown": "host.key",
        "host.key-changed": "host.key",
        "host.key-revoked": "host.key",
        "host.login-refused": "host.login",
    }.get(error.id, "host.unreachable" if error.exit_code == UNREACHABLE else "host.failed")
    return Finding(CHECKS[id], host, error.message, f"{error.id}: {error.hint or ''}".removesuffix(": "))


async def _ask(link: Link) -> tuple[dict[str, list[str]], bytes, tuple[float, float]]:
    """What the script said, by its first word; what login files printed; when we asked and had the answer."""
    script = _SCRIPT.replace("FIND_PYTHON", shell.FIND_PYTHON).replace("STATE", shell.path(link.host.state_dir))
    out, err = bytearray(), bytearray()
    async with asyncio.timeout(LOOK_S):
        began = time.time()
        async with link.open(script=script) as (channel, marker):
            errors = shell.Marker(marker._nonce)
            await channel.eof()

            async def drain(read: object, through: shell.Marker, into: bytearray) -> None:
                while data := await read():  # type: ignore[operator]
                    into += through.feed(data)

            await asyncio.gather(drain(channel.read, marker, out), drain(channel.read_error, errors, err))
            code, _ = await channel.end()
        ended = time.time()
    if not marker.seen:
        raise link._no_shell(code, (marker.noise + errors.noise).decode("utf-8", "replace").strip()[:300])
    said: dict[str, list[str]] = {}
    for line in out.decode("utf-8", "replace").splitlines():
        word, _, rest = line.partition(" ")
        said.setdefault(word, []).append(rest)
    if "end" not in said:
        raise RigbookError("host.unknown", "the look was cut short", host=link.name, exit_code=UNREACHABLE)
    return said, marker.noise + errors.noise, (began, ended)


def judge(host: str, said: Mapping[str, list[str]], noise: bytes) -> list[Finding]:
    """Findings of what the script said (a pure function)."""
    found: list[Finding] = []

    def add(id: str, message: str, evidence: str = "") -> None:
        found.append(Finding(CHECKS[id], host, message, evidence))

    def one(key: str) -> str:
        return said.get(key, [""])[-1]

    lines = [line for line in noise.decode("utf-8", "replace").splitlines() if line.strip()]
    # A shell that does not know its locale says so before anybody's files do.
    warned = [line for line in lines if "setlocale" in line]
    if len(lines) > len(warned):
        text = "\n".join(line for line in lines if line not in warned)
        add("host.login-noise", f"login files print {len(text)} characters before a command begins", text[:200])
    name, _, complaint = one("locale").partition(" ")
    if complaint or warned:
        add("host.locale", complaint or warned[0], name)
    user = one("user").partition(" ")[2]
    if one("linger") == "no":
        add("host.no-linger", f"the user {user} has no linger", f"/var/lib/systemd/linger/{user} is not there")
    if one("kill").lower() in ("yes", "true", "1", "on") and one("linger") != "yes":
        add("host.kill-user-processes", f"logind ends what {user} started when the last session ends")
    if one("sudo") and one("sudo") != "yes":
        add("host.sudo", f"sudo -n: {one('sudo')}")
    tools = {word.partition(" ")[2] for word in said.get("has", [])} | set(said.get("has", []))
    if "tar" not in tools:
        add("host.no-tar", "tar was not found")
    if "rsync" not in tools:
        add("host.no-rsync", "rsync was not found")
    found += _paths(host, said)
    found += _state(host, said)
    if one("shm").isdigit() and int(one("shm")) < SHM:
        add("host.small-shm", f"/dev/shm holds {int(one('shm')) >> 20} MiB")
    return found


def _paths(host: str, said: Mapping[str, list[str]]) -> list[Finding]:
    plain = dict(line.split(" ", 1) for line in said.get("found", []))
    login = dict(line.split(" ", 1) for line in said.get("loginfound", []))
    placed = dict(line.split(" ", 1) for line in said.get("placed", []))
    paths = f"a command's PATH: {said.get('path', [''])[0]}"
    if "loginpath" in said:
        paths += f"; a login shell's: {said['loginpath'][0]}"
    return [
        Finding(CHECKS["host.path"], host, f"{tool} is {where}, which a command does not find", paths)
        for tool, where in {**placed, **login}.items()
        if tool not in plain
    ]


def _state(host: str, said: Mapping[str, list[str]]) -> list[Finding]:
    found = []
    place = said.get("state", [""])[0]
    if "state-error" in said:
        why = re.sub(r"^(dd|mkdir): ", "", said["state-error"][0])
        found.append(Finding(CHECKS["host.state-unwritable"], host, why, place))
    if "state-free" in said and "state-error" not in said:
        free, _, mount = said["state-free"][0].partition(" ")
        if float(free) < ROOM:
            message = f"{float(free) / (1 << 20):.0f} MiB are free in {place}"
            found.append(Finding(CHECKS["host.state-space"], host, message, f"mounted at {mount}"))
    if "state-mount" in said:
        kind, _, options = said["state-mount"][0].partition(" ")
        if "noexec" in options.split(","):
            found.append(Finding(CHECKS["host.state-noexec"], host, f"{place} is noexec", options))
        if kind in ("tmpfs", "ramfs"):
            found.append(Finding(CHECKS["host.state-volatile"], host, f"{place} is a {kind}"))
        if kind.startswith(("nfs", "cifs", "smb", "fuse.sshfs", "ceph", "glusterfs", "9p")):
            found.append(Finding(CHECKS["host.state-network"], host, f"{place} is {kind}"))
    return found


def _clock(host: str, said: Mapping[str, list[str]], began: float, ended: float) -> list[Finding]:
    """Its clock was read twice between our two readings, which bounds the difference from both sides."""
    try:
        first, last = (float(said[key][0].removesuffix(".%N").removesuffix(".")) for key in ("begin", "end"))
    except (KeyError, ValueError):
        return []
    least, most = last - ended, first - began
    if least - SKEW_S <= 0 <= most + SKEW_S:
        return []
    skew = least if least > 0 else most
    ahead = "ahead of" if skew > 0 else "behind"
    seen = f"between {least:+.1f} s and {most:+.1f} s"
    return [Finding(CHECKS["host.clock-skew"], host, f"its clock is {abs(skew):.1f} s {ahead} ours", seen)]


async def _no_python(link: Link) -> Finding:
    report = await link.run(script=pythons.REPORT, timeout=20)
    error = pythons.missing(report.error_text(), link.name)
    return Finding(CHECKS["host.no-python"], link.name, error.message, error.hint or "")


async def _sessions(link: SSHLink) -> list[Finding]:
    """As many sessions at once as we would ever use, and the sftp subsystem, on a connection of the link's."""
    found = []
    lane = await link.pool.take()
    try:
        refused = 0

        async def session() -> asyncssh.SSHClientProcess[bytes] | None:
            nonlocal refused
            try:
                return await lane.connection.create_process("exec cat", encoding=None, env=None, send_env=None)
            except asyncssh.ChannelOpenError:
                refused += 1
                return None

        opened = await asyncio.gather(*(session() for _ in range(PER_LANE)))
        for process in opened:
            if process is not None:
                process.close()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait_closed(), 2)
        if refused:
            message = f"{PER_LANE - refused} sessions were opened on one connection, {refused} refused"
            found.append(Finding(CHECKS["host.max-sessions"], link.name, message))
        why = await _sftp(lane.connection)
        if why:
            found.append(Finding(CHECKS["host.no-sftp"], link.name, why))
    except (asyncssh.Error, OSError) as error:
        raise RigbookError(
            "host.unknown", f"the link was lost: {error}", host=link.name, exit_code=UNREACHABLE
        ) from error
    finally:
        link.pool.give(lane)
    return found


async def _sftp(connection: asyncssh.SSHClientConnection) -> str | None:
    try:
        async with asyncio.timeout(10), connection.start_sftp_client():
            return None
    except asyncssh.ChannelOpenError:
        return "the sftp subsystem is refused"
    except asyncssh.SFTPBadMessage:
        return "the sftp subsystem answers with something else: login files print"
    except (asyncssh.SFTPError, TimeoutError) as error:
        return f"the sftp subsystem does not work: {error or type(error).__name__}"


def config(host: str, ssh: str, file: Path | None) -> list[Finding]:
    """What of the ssh configuration is worth knowing, without a connection: open keys, readings that differ."""
    found = []
    try:
        target = resolve.parse(ssh)
        resolved = resolve.resolve(target, file)
        differing = resolve.differences(target, file)
    except RigbookError:
        return []  # the connection itself will say so
    for path in resolved.identities:
        try:
            mode = path.expanduser().stat().st_mode
        except OSError:
            continue
        if stat.S_IMODE(mode) & 0o077:
            evidence = f"mode {stat.S_IMODE(mode):o}"
            found.append(Finding(LOCAL["local.key-open"], host, f"{path} can be read by others", evidence))
    if differing and differing[0].startswith("there is no `ssh`"):
        found.append(Finding(LOCAL["local.no-ssh"], None, differing[0]))
        differing = differing[1:]
    found += [Finding(CHECKS["host.ssh-config-differs"], host, line) for line in differing]
    return found
