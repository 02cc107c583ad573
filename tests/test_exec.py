"""A remote command ends the way it ended: its code, its signal, its bytes; and an end nobody saw is unknown."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.connect import Rig
from remote.result import Result
from state.errors import RigbookError
from state.project import Project, loads
from tests.lab import rigs
from tests.lab.proxmox import ProxmoxRig, proxmox_rig


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as server:
        yield server


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with rigs.played(tmp_path_factory.mktemp("rig")) as project:
        yield project


@pytest.fixture(scope="module")
def proxmox() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as rig:
        yield rig


@pytest.fixture(params=["played", "bash", "zsh", "fish", "csh", "local", "pct"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Project, str]:
    """Every promise holds on every route, whatever the login shell there."""
    if request.param == "pct":
        return request.getfixturevalue("proxmox").project(), "ct"
    if request.param == "local":
        return loads('[project]\nname = "lab"\n[hosts.here]\nkind = "local"\n', tmp_path), "here"
    if request.param == "played":
        return request.getfixturevalue("played"), "llm"
    server = request.getfixturevalue("box")
    user = f"rb{request.param}"
    if user not in server.users:
        if request.param != "bash":
            pytest.skip(f"making a {request.param} user needs root")
        user = next(iter(server.users))
    return server.project(user), "box"


AWKWARD = ["a b", "", "*", "$HOME", "it's", '"', "new\nline", "\ttab", "é", "-n", "=ls", "!x", "\\n", "~", "\x88\x81"]


@pytest.mark.report(15)
async def test_arguments_arrive_exactly(where: tuple[Project, str]) -> None:
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        # Once before the link knows the login shell, and, word by word, when it does.
        for words in (AWKWARD, *([word] for word in AWKWARD)):
            result = await link.run(["printf", "%s\\0", *words])
            assert result.ok and result.stderr == b""
            assert result.stdout == b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


@pytest.mark.report(3)
async def test_codes_signals_and_input(where: tuple[Project, str]) -> None:
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        for code in (0, 1, 42, 124, 255):
            result = await link.run(["sh", "-c", f"exit {code}"])
            assert (result.state, result.exit, result.code) == ("exited", code, code)
        killed = await link.run(["sh", "-c", "kill -KILL $$"])
        if link.route()["route"] == "pct":  # lxc-attach has only a code for it
            assert (killed.state, killed.code) == ("exited", 137)
        else:
            assert (killed.state, killed.exit, killed.signal, killed.code) == ("signaled", None, "KILL", 137)
        missing = await link.run(["no-such-command-here"])
        assert missing.exit == 127
        data = bytes(range(256)) * 4096
        echoed = await link.run(["cat"], stdin=data)
        assert echoed.stdout == data and echoed.stderr == b""
        for empty in (await link.run(["cat"]), await link.run(["cat"], timeout=30)):
            assert empty.ok and empty.stdout == b"", "no input is an input that ends at once"
        assert (await link.run(["true"], stdin=data)).ok, "a command may leave its input unread"


async def test_environment_directory_and_both_outputs(where: tuple[Project, str], tmp_path: Path) -> None:
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        value = "a 'b' \"c\" $d\ne"
        result = await link.run(script='printf %s "$X"; pwd >&2; exit 3', env={"X": value}, cwd="/usr")
        assert (result.stdout.decode(), result.stderr, result.exit) == (value, b"/usr\n", 3)
        assert (await link.run(["pwd"], cwd="/no/such/place")).exit == 125


async def test_functions_of_the_login_shell_are_not_called(where: tuple[Project, str]) -> None:
    """The second command goes a shorter way than the first, which told what the login shell is."""
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        for _ in range(2):
            result = await link.run(["env"], cwd="/usr", env={"A": "b"}, timeout=30)
            said = result.text().splitlines()
            assert result.ok and "A=b" in said and "PWD=/usr" in said and not [x for x in said if "was called" in x]
        assert (await link.run(["true"])).stdout == b""


async def test_a_deadline_stops_the_far_process(where: tuple[Project, str]) -> None:
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        name = f"/dev/shm/rb-{os.urandom(4).hex()}"
        script = f"echo $$ >{name}; exec sleep 1000"
        result = await link.run(script=script, timeout=0.7)
        assert result.state == "timeout" and result.code == 124
        script = f"pid=$(cat {name}); rm {name}; while kill -0 $pid 2>/dev/null; do :; done"
        assert (await link.run(script=script, timeout=9)).ok


async def test_secrets_stay_out_of_argv(where: tuple[Project, str]) -> None:
    async with Rig(where[0]) as rig:
        link = await rig.link(where[1])
        script = 'cat /proc/$PPID/cmdline /proc/$$/cmdline 2>/dev/null; printf %s "$TOKEN"'
        result = await link.run(script=script, env={"TOKEN": "hunter2"})
        assert result.stdout.count(b"hunter2") == 1 and b"sh" in result.stdout


@pytest.mark.report(1)
async def test_a_lost_link_is_unknown_and_the_next_command_works(box: rigs.Sshd) -> None:
    async with Rig(box.project(next(iter(box.users)))) as rig:
        link = await rig.link("box")
        begun = asyncio.Event()
        feed = link.stream(script="echo begun; sleep 30; exit 0", out=lambda _: begun.set(), err=lambda _: None)
        work = asyncio.ensure_future(feed)
        await begun.wait()
        box.cut()
        result = await work
        assert (result.state, result.exit, result.code) == ("unknown", None, 255)
        assert not result.ok
        with pytest.raises(RigbookError) as caught:
            result.check("the work")
        assert caught.value.exit_code == 4
        assert (await link.run(["echo", "back"])).stdout == b"back\n"


async def test_a_reader_that_goes_away_ends_the_command(where: tuple[Project, str]) -> None:
    """`rigbook exec HOST -- yes | head -1`: the command ends too, and so do we."""
    project, name = where
    said = bytearray()

    def gone(data: bytes) -> None:
        said.extend(data)
        raise BrokenPipeError

    async with Rig(project) as rig:
        link = await rig.link(name)
        with pytest.raises(BrokenPipeError):
            await asyncio.wait_for(link.stream(script="echo $$; exec yes", out=gone, err=lambda _: None), 30)
        script = f"while kill -0 {said.split()[0].decode()} 2>/dev/null; do :; done"
        assert (await link.run(script=script, timeout=9)).ok


@pytest.mark.report(22)
async def test_more_commands_at_once_than_the_server_allows() -> None:
    with rigs.sshd("MaxSessions 2\n") as server:
        async with Rig(server.project(next(iter(server.users)))) as rig:
            link = await rig.link("box")
            results = await asyncio.gather(*(link.run(["sh", "-c", f"sleep 0.1; exit {n}"]) for n in range(24)))
        assert [result.exit for result in results] == list(range(24))


async def test_nobody_listens(tmp_path: Path) -> None:
    (tmp_path := tmp_path / "it's here").mkdir()
    (tmp_path / "ssh_config").write_text(f"Host gone\n  HostName 127.0.0.1\n  Port {rigs.free_port()}\n")
    async with Rig(rigs.project(tmp_path, '[hosts.gone]\nkind = "linux"\nssh = "gone"\n')) as rig:
        with pytest.raises(RigbookError) as caught:
            await rig.link("gone")
    assert (caught.value.id, caught.value.exit_code) == ("host.unreachable", 4)
    assert caught.value.hint and shlex.quote(str(tmp_path / "ssh_config")) in caught.value.hint


@pytest.mark.parametrize("text", ["IdentityFile /nowhere/key\n  IdentitiesOnly yes\n", "Port many\n", 'User "a\n'])
async def test_an_ssh_config_that_cannot_be_used_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "ssh_config").write_text(f"Host odd\n  HostName 127.0.0.1\n  {text}")
    async with Rig(rigs.project(tmp_path, '[hosts.odd]\nkind = "linux"\nssh = "odd"\n')) as rig:
        with pytest.raises(RigbookError) as caught:
            await rig.link("odd")
    assert (caught.value.id, caught.value.exit_code) == ("host.ssh-config", 2)


def test_unknown_is_never_a_success() -> None:
    assert Result("unknown").code == 255 and not Result("unknown").ok
    assert Result("signaled", signal="TERM").code == 143


async def test_only_what_is_public_stands_in_the_argv_of_the_login_shell(box: rigs.Sshd) -> None:
    """Once the login shell is known to be bash, a command without an environment rides on the request itself."""
    seen: list[tuple[str, bytes]] = []
    async with Rig(box.project(next(iter(box.users)))) as rig:
        link = await rig.link("box")
        opened = link._open

        def watched(command: str, line: bytes, **more: object) -> object:
            seen.append((command, line))
            return opened(command, line, **more)  # type: ignore[arg-type]

        link._open = watched  # type: ignore[method-assign, assignment]
        for env in ({}, {}, {"TOKEN": "hunter2"}):
            result = await link.run(["sh", "-c", 'echo "[$TOKEN]" $0', "it's"], env=env)
            assert result.stdout.decode() == f"[{env.get('TOKEN', '')}] it's\n"
        await link.run(["printf", "%s", "é" * 9])
        await link.run(["true", "x" * 9000])
        await link.run(script="true")
    first, public, secret, foreign, long, script = seen
    assert public[1] == b"" and "it" in public[0]
    for command, line in (first, secret, foreign, long, script):
        assert line.endswith(b"\n") and len(command) < 200 and "hunter2" not in command
    assert first[0].startswith("exec /bin/sh") and script[0].startswith("exec /bin/sh")
