"""The ways in: jumps, proxies, keys of every kind, busy servers, silent peers, and a shell with a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote import dial
from remote.connect import Rig
from state.errors import RigbookError
from tests.lab import netns, rigs
from tests.lab.proxmox import proxmox_rig


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd("AcceptEnv LANG LC_* SECRET\n") as server:
        yield server


def user(server: rigs.Sshd) -> str:
    return next(iter(server.users))


def account(server: rigs.Sshd) -> str:
    return server.accounts.get(user(server), user(server))


def written(server: rigs.Sshd, text: str, host: str = "box") -> Rig:
    """A rig whose ssh config is this text, after `Host *` lines that let one in."""
    common = (
        f"Host *\n  HostName {server.address}\n  Port {server.port}\n  User {account(server)}\n"
        f"  UserKnownHostsFile {server.root}/known_hosts\n  IdentitiesOnly yes\n  IdentityAgent none\n"
    )
    key = "" if "IdentityFile" in text else f"  IdentityFile {server.root}/key\n"
    (server.root / "ssh_config").write_text(f"{text}\n{common}{key}")
    return Rig(rigs.project(server.root, f'[hosts.{host}]\nkind = "linux"\nssh = "{host}"\n'))


async def far(rig: Rig, *argv: str, host: str = "box") -> str:
    async with rig:
        return (await (await rig.link(host)).run(list(argv))).check("the command").text().strip()


async def error_of(rig: Rig, host: str = "box") -> RigbookError:
    with pytest.raises(RigbookError) as caught:
        async with rig:
            await rig.link(host)
    return caught.value


# --- jumps and proxies ----------------------------------------------------------------------------------------------


def connections(server: rigs.Sshd) -> int:
    return len({line for line in (server.root / "sshd.log").read_text().splitlines() if "Accepted publickey" in line})


async def test_a_chain_of_jumps_shares_its_connections(box: rigs.Sshd) -> None:
    """b is reached through j1, then j2; so is c. Each jump is logged into once."""
    text = "Host j1 j2\nHost b c\n  ProxyJump j1,j2\n"
    written(box, text)
    project = rigs.project(box.root, "".join(f'[hosts.{n}]\nkind = "linux"\nssh = "{n}"\n' for n in "bc"))
    before = connections(box)
    async with Rig(project) as rig:
        links = await asyncio.gather(rig.link("b"), rig.link("c"))
        for link in links:
            assert (await link.run(["id", "-un"])).text().strip() == account(box)
            assert link.route()["via"] == "j1 → j2"
        data = os.urandom(3_000_000)
        assert (await links[0].run(["cat"], stdin=data)).stdout == data
        rigs.until(lambda: connections(box) == before + 4)
        # The first jump is lost: what ran is unknown, the next command goes through again.
        box.cut()
        assert (await links[1].run(["echo", "again"])).stdout == b"again\n"


@pytest.mark.report(30)
async def test_much_data_behind_a_jump_takes_another_way(box: rigs.Sshd) -> None:
    """One Python would encrypt twice; `ssh -W` does the outer layer on another core. Small things stay."""
    async with written(box, "Host j1 j2\nHost box\n  ProxyJump j1,j2\n") as rig:
        link = await rig.link("box")
        data, back = os.urandom(5_000_000), bytearray()
        assert (await link.run(["true"])).ok and not list(_children("-W"))
        for _ in range(2):
            back.clear()
            result = await link.stream(["cat"], feed=data, out=back.extend, err=back.extend, bulk=True)
            assert result.ok and back == data
            assert len(list(_children("StrictHostKeyChecking=yes"))) == 1
    rigs.until(lambda: not list(_children("-W")))
    # Where it does not work (here: ssh cannot log into the jump host by itself), the usual way does.
    (box.root / "bin").mkdir()
    (box.root / "bin/ssh").write_text('#!/bin/sh\ncase " $* " in *\' -W \'*) exit 1;; esac\nexec /usr/bin/ssh "$@"\n')
    (box.root / "bin/ssh").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{box.root}/bin:{os.environ['PATH']}")
        async with written(box, "Host j1\nHost box\n  ProxyJump j1\n") as rig:
            link = await rig.link("box")
            back.clear()
            assert (await link.stream(["cat"], feed=data, out=back.extend, err=back.extend, bulk=True)).ok
            assert back == data


async def test_the_key_of_a_jump_host_is_checked_as_well(box: rigs.Sshd) -> None:
    empty = box.root / "nobody"
    empty.write_text("")
    text = f"Host j1\n  UserKnownHostsFile {empty}\n  HostKeyAlias jumper\nHost box\n  ProxyJump j1\n"
    error = await error_of(written(box, text))
    assert error.id == "host.key-unknown" and "jump host j1" in error.message and "jumper" in error.message


async def test_trust_covers_the_jump_hosts_on_the_way(box: rigs.Sshd) -> None:
    nobody = box.root / "nobody too"
    nobody.write_text("")
    alone = f'  UserKnownHostsFile "{nobody}"\n'
    written(box, f"Host j1\n{alone}  HostKeyAlias jumper\nHost box\n{alone}  ProxyJump j1\n")
    file_of(box.root, '[hosts.box]\nkind = "linux"\nssh = "box"\n')
    command = [sys.executable, "-m", "tui.cli.main", "-C", str(box.root)]

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*command, *words], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)

    assert run("exec", "box", "--", "true").returncode == 255
    done = run("hosts", "trust", "box", "--accept-new")
    assert done.returncode == 0, done.stderr
    pins = box.root / ".rigbook" / "known_hosts"
    assert [line.split()[0] for line in pins.read_text().splitlines()] == ["jumper", "box"]
    assert run("exec", "box", "--", "true").returncode == 0
    pins.unlink()


async def test_a_name_with_several_addresses_is_tried_at_all(box: rigs.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent (reserved for documents), at one nobody listens, at the last there is a server."""
    usual = socket.getaddrinfo
    places = [("192.0.2.1", box.port), ("127.0.0.1", rigs.free_port()), ("127.0.0.1", box.port)]

    def several(host: str, *more: object, **named: object) -> object:
        if host != "three.example":
            return usual(host, *more, **named)  # type: ignore[call-overload]
        if more[-1]:  # asked whether it is a number
            raise socket.gaierror("no number")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    text = f"Host box\n  HostName three.example\n  HostKeyAlias [127.0.0.1]:{box.port}\n"
    began = time.monotonic()
    assert await far(written(box, text), "id", "-un") == account(box)
    assert time.monotonic() - began < dial.CONNECT_S


async def test_jumps_in_a_circle_end(box: rigs.Sshd) -> None:
    error = await error_of(written(box, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\nHost box\n  ProxyJump a\n"))
    assert error.id == "host.ssh-config" and "circle" in error.message


async def test_a_dead_jump_is_named(box: rigs.Sshd) -> None:
    error = await error_of(written(box, f"Host gone\n  Port {rigs.free_port()}\nHost box\n  ProxyJump gone\n"))
    assert error.id == "host.unreachable" and "jump host gone" in error.message and "refused" in error.message


PROXY = "import os,socket,sys,threading\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n" + (
    "def up():\n while d:=os.read(0,65536): s.sendall(d)\n s.shutdown(1)\n"
    "threading.Thread(target=up,daemon=True).start()\nwhile d:=s.recv(65536): os.write(1,d)\n"
)


async def test_a_proxy_command_carries_the_connection(box: rigs.Sshd) -> None:
    script = box.root / "proxy it's.py"
    script.write_text(PROXY)
    command = f'ProxyCommand {sys.executable} -I "{script}" %h %p'
    async with written(box, f"Host box\n  {command}\n") as rig:
        link = await rig.link("box")
        data = os.urandom(2_000_000)
        assert (await link.run(["cat"], stdin=data)).stdout == data
        assert str(script) in link.route()["via"]
    rigs.until(lambda: not list(_children(str(script))))  # nothing of it stays

    error = await error_of(written(box, "Host box\n  ProxyCommand echo it is locked >&2; exit 1\n"))
    assert error.id == "host.unreachable" and "it is locked" in error.message


def _children(word: str) -> Iterator[int]:
    for pid in rigs.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


# --- keys and certificates of users ---------------------------------------------------------------------------------


def keygen(*words: str | Path) -> None:
    subprocess.run(["ssh-keygen", "-q", *words], check=True, capture_output=True)


@contextlib.contextmanager
def agent(*keys: Path) -> Iterator[Path]:
    folder = keys[0].parent
    path = folder / "agent.sock"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        askpass = folder / "askpass"
        askpass.write_text("#!/bin/sh\necho secret\n")
        askpass.chmod(0o700)
        env = {**os.environ, "SSH_AUTH_SOCK": str(path), "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        # The socket is there a moment before somebody listens on it.
        rigs.until(lambda: subprocess.run(["ssh-add", "-l"], env=env, capture_output=True).returncode != 2)
        subprocess.run(["ssh-add", "-q", *keys], env=env, check=True, capture_output=True)
        yield path
    finally:
        process.terminate()
        process.wait(10)


def allow(server: rigs.Sshd, *keys: Path) -> None:
    """Let these keys in beside the fixture's."""
    lines = [(server.root / "key.pub").read_text(), *(Path(f"{key}.pub").read_text() for key in keys)]
    (server.root / "authorized_keys").write_text("".join(lines))


async def test_a_locked_key_is_no_question_but_a_hint_and_works_by_the_agent(box: rigs.Sshd, tmp_path: Path) -> None:
    for number, options in enumerate((["-t", "ed25519"], ["-t", "rsa", "-b", "2048", "-m", "PEM"], ["-t", "ecdsa"])):
        locked = tmp_path / f"locked {number}"
        keygen(*options, "-N", "secret", "-f", locked)
        allow(box, locked)
        text = f'Host box\n  IdentityFile "{locked}"\n'
        error = await error_of(written(box, text))
        assert (error.id, error.hint) == ("host.key-locked", f"ssh-add '{locked}'") and error.exit_code == 4
        with agent(locked) as socket:
            for only in ("yes", "no"):
                lines = f"{text}  IdentityAgent {socket}\n  IdentitiesOnly {only}\n"
                assert await far(written(box, lines), "id", "-un") == account(box)
            Path(f"{locked}").rename(tmp_path / "elsewhere")  # only the public half is here, as with a hardware key
            assert await far(
                written(box, f'{text.rstrip()}.pub"\n'.replace('".pub"', '.pub"') + f"  IdentityAgent {socket}\n"),
                "id",
                "-un",
            )


async def test_an_agent_with_many_keys_is_not_asked_for_all_of_them(tmp_path: Path) -> None:
    """sshd counts each key that is shown. The one that the config names comes first."""
    with rigs.sshd("MaxAuthTries 2\n") as server:
        keys = [tmp_path / f"k{number}" for number in range(6)]
        for key in keys:
            keygen("-t", "ed25519", "-N", "", "-f", key)
        allow(server, keys[5])
        with agent(*keys) as socket:
            lines = f"Host box\n  IdentityFile {keys[5]}.pub\n  IdentitiesOnly no\n  IdentityAgent {socket}\n"
            assert await far(written(server, lines), "id", "-un") == account(server)
            (server.root / "authorized_keys").write_text("")
            error = await error_of(written(server, lines))
            assert error.id == "host.login-refused"
        # An agent that is gone is no reason not to try the file.
        allow(server, keys[5])
        lines = f"Host box\n  IdentityFile {keys[5]}\n  IdentityAgent {tmp_path}/no-agent\n"
        assert await far(written(server, lines), "id", "-un") == account(server)


async def test_a_certificate_lets_a_user_in(tmp_path: Path) -> None:
    ca, key, other = tmp_path / "ca", tmp_path / "key", tmp_path / "other"
    for file in (ca, key, other):
        keygen("-t", "ed25519", "-N", "", "-f", file)
    with rigs.sshd(f"TrustedUserCAKeys {ca}.pub\n") as server:
        (server.root / "authorized_keys").write_text("")
        keygen("-s", ca, "-I", "me", "-n", account(server), f"{key}.pub")
        assert await far(written(server, f"Host box\n  IdentityFile {key}\n"), "id", "-un") == account(server)
        Path(f"{key}-cert.pub").rename(tmp_path / "signed.pub")
        lines = f"Host box\n  IdentityFile {key}\n"
        assert (await error_of(written(server, lines))).id == "host.login-refused"
        lines += f"  CertificateFile {tmp_path}/signed.pub\n"
        assert await far(written(server, lines), "id", "-un") == account(server)
        # The private half in an agent, the certificate in a file; and both in the agent.
        with agent(key) as socket:
            (tmp_path / "hidden").mkdir()
            key.rename(tmp_path / "hidden/key")
            assert await far(written(server, f"{lines}  IdentityAgent {socket}\n"), "id", "-un") == account(server)
        (tmp_path / "hidden/key").rename(key)
        (tmp_path / "signed.pub").rename(f"{key}-cert.pub")
        with agent(key) as socket:
            lines = f"Host box\n  IdentityFile {other}\n  IdentityAgent {socket}\n  IdentitiesOnly no\n"
            assert await far(written(server, lines), "id", "-un") == account(server)


async def test_ciphers_of_the_config_count_and_else_gcm_is_first(box: rigs.Sshd) -> None:
    for line, wanted in (("", "aes"), ("  Ciphers aes128-ctr\n  MACs hmac-sha2-512\n", "aes128-ctr")):
        async with written(box, f"Host box\n{line}") as rig:
            await rig.link("box")
            cipher = rig._links["box"].pool.lanes[0].connection.get_extra_info("send_cipher")  # type: ignore[attr-defined]
            assert wanted in str(cipher) and (line or "gcm" in str(cipher))
    error = await error_of(written(box, "Host box\n  Ciphers 3des-cbc\n  KexAlgorithms diffie-hellman-group1-sha1\n"))
    assert error.exit_code in (2, 4)


# --- what the far side is like --------------------------------------------------------------------------------------


@pytest.mark.report(19)
async def test_our_language_and_variables_stay_here(box: rigs.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    monkeypatch.setenv("SECRET", "hunter2")
    text = "Host box\n  SendEnv LANG LC_* SECRET\n  SetEnv LC_TIME=xx_XX\n"
    found = await far(written(box, text), "env")
    assert "tr_TR" not in found and "hunter2" not in found and "xx_XX" not in found


@pytest.mark.report(16)
async def test_a_login_shell_that_ends_first_says_what_it_printed(box: rigs.Sshd) -> None:
    rc = box.users[user(box)] / ".bashrc"
    before = rc.read_text()
    try:
        rc.write_text("echo this account is closed; exit 3\n")
        async with written(box, "Host box\n") as rig:
            with pytest.raises(RigbookError) as caught:
                await (await rig.link("box")).run(["true"])
        assert caught.value.id == "host.no-shell" and "this account is closed" in caught.value.message
        # Noise that quotes our own marker, and a megabyte of it.
        rc.write_text("set -x\nyes noise | head -c 900000\n")
        assert await far(written(box, "Host box\n"), "echo", "fine") == "fine"
    finally:
        rc.write_text(before)


@pytest.mark.report(17)
async def test_a_python_of_somebodys_environment_is_not_taken_for_the_system_s(box: rigs.Sshd) -> None:
    home = box.users[user(box)]
    (home / "venv").mkdir()
    (home / "venv/python3").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    (home / "venv/python3").chmod(0o755)
    rc = home / ".bashrc"
    before = rc.read_text()
    try:
        rc.write_text(f"PATH={home}/venv:$PATH\n")
        async with written(box, "Host box\n") as rig:
            link = await rig.link("box")
            assert (await link.run(["python3", "-V"])).exit == 1  # what a script there gets
            assert (await link.python()).startswith("/usr/")
            assert (await (await link.probe()).call("system"))["os"]
    finally:
        rc.write_text(before)


@pytest.mark.report(23)
@pytest.mark.parametrize("limit", ["10:30:100", "1:100:1"])
async def test_many_at_once_on_a_server_that_drops_some(limit: str) -> None:
    with rigs.sshd(f"MaxStartups {limit}\n") as server:
        names = [f"h{number}" for number in range(30)]
        rig = written(server, "Host " + " ".join(names) + "\n")
        rig.project = rigs.project(server.root, "".join(f'[hosts.{n}]\nkind = "linux"\nssh = "{n}"\n' for n in names))
        async with rig:
            links = await asyncio.gather(*map(rig.link, names))
            results = await asyncio.gather(*(link.run(["true"]) for link in links))
        assert [result.exit for result in results] == [0] * len(names)


@pytest.mark.report(2)
async def test_a_host_that_does_not_answer_is_unknown_and_then_all_is_as_it_was(tmp_path: Path) -> None:
    """The cable is out until every connection is given up; the job goes on, and nobody declares it dead."""
    from remote import jobs

    with netns.far_host() as server:
        async with Rig(server.project(user(server.sshd))) as rig:
            link = await rig.link("box")
            job = await jobs.submit(link, jobs.JobSpec("long", "long", ["sleep", "1000"]))
            running = asyncio.ensure_future(link.run(["sleep", "1000"]))
            await asyncio.sleep(0)
            assert (await link.run(["true"])).ok  # so the other has begun
            server.cut()
            began = time.monotonic()
            lost = await running
            assert (lost.state, lost.code) == ("unknown", 255) and time.monotonic() - began < 20
            with pytest.raises(RigbookError) as caught:
                (await link.run(["true"])).check("looking")
            assert caught.value.exit_code == 4 and time.monotonic() - began < 25
            # Somebody waits, as followers do: as soon as the cable is in again, it works.
            waiting = asyncio.ensure_future(_until_it_answers(rig))
            await asyncio.sleep(4)
            assert not waiting.done()
            server.restore()
            back = time.monotonic()
            await waiting
            assert time.monotonic() - back < 5
            status = await jobs.status(link, job.id)
            assert status.state == "running"
            await jobs.stop(link, job.id)


async def _until_it_answers(rig: Rig) -> None:
    attempt = 0
    while True:
        attempt += 1
        with contextlib.suppress(RigbookError):
            if (await (await rig.link("box")).run(["true"])).ok:
                return
        await asyncio.sleep(dial.backoff(attempt))


async def test_a_frozen_server_is_unknown_and_works_when_it_thaws() -> None:
    with rigs.sshd() as server:
        async with Rig(server.project(user(server))) as rig:
            link = await rig.link("box")
            begun, said = asyncio.Event(), bytearray()

            def out(data: bytes) -> None:
                said.extend(data)
                begun.set()

            running = asyncio.ensure_future(link.stream(script="echo begun; sleep 1000", out=out, err=said.extend))
            await begun.wait()
            server.freeze()
            began = time.monotonic()
            try:
                result = await running
                assert result.state == "unknown" and said == b"begun\n" and time.monotonic() - began < 20
                waiting = asyncio.ensure_future(_until_it_answers(rig))
                await asyncio.sleep(1)
                assert not waiting.done()
            finally:
                server.thaw()
            thawed = time.monotonic()
            await waiting
            assert time.monotonic() - thawed < 5


# --- the terminal ---------------------------------------------------------------------------------------------------


class Desk:
    """A terminal of ours with `rigbook shell` in it."""

    def __init__(self, root: Path, host: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
        self.before = termios.tcgetattr(slave)
        command = [sys.executable, "-m", "tui.cli.main", "-C", str(root), "shell", host]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        self.slave, self.text = slave, b""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def shows(self, text: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while text.encode() not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.master], [], [], 0.2)[0]:
                self.text += os.read(self.master, 65536)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    def end(self) -> int:
        deadline = time.monotonic() + 20
        while (code := self.process.poll()) is None or select.select([self.master], [], [], 0)[0]:
            assert time.monotonic() < deadline, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is as it was"
        os.close(self.slave)
        os.close(self.master)
        return code


def file_of(root: Path, hosts: str) -> None:
    (root / "rigbook.toml").write_text(f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{hosts}')


def test_a_shell_has_a_terminal_of_our_size_and_leaves_ours_clean(box: rigs.Sshd) -> None:
    written(box, "Host box\n")
    file_of(box.root, '[hosts.box]\nkind = "linux"\nssh = "box"\n')
    desk = Desk(box.root, "box")
    desk.type("echo size=$(stty size) tty=$(tty | cut -c1-8)\n")
    desk.shows("size=31 97 tty=/dev/pts")
    desk.resize(120, 50)
    desk.type("until [ \"$(stty size)\" = '50 120' ]; do sleep 0.1; done; echo re''sized\n")
    desk.shows("resized")
    desk.type("sh -c \"echo sle''eping; exec sleep 1000\"\n")
    desk.shows("sleeping")
    desk.type("\x03")  # goes there, not to us
    desk.shows("^C")
    desk.type("echo wo''ken\n")
    desk.shows("woken")
    desk.type("exit 9\n")
    assert desk.end() == 9
    # The link is lost in the middle of a full-screen program.
    desk = Desk(box.root, "box")
    desk.type("printf '\\033[?1049h\\033[?25l'; echo full''screen; sleep 1000\n")
    desk.shows("fullscreen")
    box.cut()
    assert desk.end() == 255 and b"\x1b[?1049l" in desk.text and b"\x1b[?25h" in desk.text
    # Ended from outside.
    desk = Desk(box.root, "box")
    desk.type("echo rea''dy\n")
    desk.shows("ready")
    desk.process.terminate()
    assert desk.end() == 255


def test_a_shell_in_a_container_without_sshd() -> None:
    with proxmox_rig() as rig:
        root = rig.project().root
        file_of(root, '[hosts.pve]\nkind = "proxmox"\nssh = "box"\n[hosts.ct]\nkind = "lxc"\non = "pve"\nvmid = 101\n'
                      '[hosts.vm]\nkind = "vm"\non = "pve"\nvmid = 200\n')  # fmt: skip
        desk = Desk(root, "ct")
        desk.shows("# ")  # lxc-attach drops what was typed before
        desk.type("echo host=$(uname -n) size=$(stty size)\n")
        desk.shows("host=ct101 size=31 97")
        desk.resize(100, 40)
        # Each pseudo-terminal on the way tells the next.
        desk.type("until [ \"$(stty size)\" = '40 100' ]; do sleep 0.1; done; echo re''sized\n")
        desk.shows("resized")
        desk.type("exit 4\n")
        assert desk.end() == 4
        desk = Desk(root, "vm")
        assert desk.end() == 2 and b"host.bootstrap-only" in desk.text
        listed = subprocess.run(
            [sys.executable, "-m", "tui.cli.main", "-C", str(root), "--json", "hosts"], capture_output=True, timeout=60
        )
        rows = {row["host"]: row for row in json.loads(listed.stdout)}
        assert {name: (row["route"], row["state"]) for name, row in rows.items()} == {
            "pve": ("ssh", "answers"), "ct": ("pct", "answers"), "vm": ("agent", "answers"),
        }  # fmt: skip
        for agent in ("silent", "none"):
            rig.change(200, agent=agent)
            asked = subprocess.run(
                [sys.executable, "-m", "tui.cli.main", "-C", str(root), "exec", "vm", "--", "true"],
                capture_output=True, stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
            assert asked.returncode == 255 and b"guest.no-agent" in asked.stderr
        rig.container.stop()
        stopped = subprocess.run(
            [sys.executable, "-m", "tui.cli.main", "-C", str(root), "exec", "ct", "--", "true"],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        assert (
            stopped.returncode == 255
            and b"guest.not-running" in stopped.stderr
            and b"guests start ct" in stopped.stderr
        )
