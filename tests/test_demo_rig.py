"""The played hosts speak SSH as sshd does; paramiko, a second implementation, is the judge."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from remote import demo_rig
from remote.connect import Rig
from tests.lab import rigs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("rig with a space")
    with rigs.played(root, {"pve": "proxmox", "llm": "lxc"}):
        yield root


@pytest.fixture
def client(root: Path) -> Iterator[paramiko.SSHClient]:
    ready = json.loads((root / "llm" / "ready.json").read_text())
    client = paramiko.SSHClient()
    kind, data = (root / "llm" / "host_key.pub").read_text().split()[:2]
    key = paramiko.PKey.from_type_string(kind, base64.b64decode(data))
    client.get_host_keys().add(f"[127.0.0.1]:{ready['port']}", kind, key)
    client.connect("127.0.0.1", ready["port"], "demo", key_filename=str(root / "client_key"), look_for_keys=False)
    yield client
    client.close()


def test_each_host_has_a_home_and_an_environment_of_its_own(root: Path, client: paramiko.SSHClient) -> None:
    _, out, err = client.exec_command("pwd; env | sort; echo oops >&2; exit 7")
    lines = out.read().decode().splitlines()
    assert lines[0] == str(root / "llm" / "home")
    names = {line.split("=")[0] for line in lines[1:]}
    assert names <= {"HOME", "LOGNAME", "OLDPWD", "PATH", "PWD", "RIGBOOK_PLAYED_HOST", "SHELL", "SHLVL", "USER", "_"}
    assert err.read() == b"oops\n" and out.channel.recv_exit_status() == 7


def test_binary_through_and_signal_back(client: paramiko.SSHClient) -> None:
    data = os.urandom(3_000_000)
    stdin, out, _ = client.exec_command("cat")
    stdin.channel.settimeout(30)
    threading.Thread(target=lambda: (stdin.write(data), stdin.channel.shutdown_write()), daemon=True).start()
    assert out.read() == data
    _, out, _ = client.exec_command("kill -9 $$")
    assert out.read() == b"" and out.channel.recv_exit_status() == -1  # paramiko's way to say: by a signal


@pytest.mark.parametrize("input_ended", [False, True])
def test_a_signal_reaches_the_command(client: paramiko.SSHClient, input_ended: bool) -> None:
    stdin, out, _ = client.exec_command("trap 'echo got it; exit 5' INT; echo ready; while :; do sleep 0.05; done")
    out.channel.settimeout(20)
    if input_ended:
        stdin.channel.shutdown_write()
    assert out.readline() == "ready\n"
    message = paramiko.Message()  # paramiko itself never sends one: RFC 4254, section 6.9
    message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
    message.add_int(out.channel.remote_chanid)
    message.add_string("signal")
    message.add_boolean(False)
    message.add_string("INT")
    out.channel.get_transport()._send_user_message(message)
    assert out.read() == b"got it\n" and out.channel.recv_exit_status() == 5


def test_terminal_has_a_size_and_hangs_up(client: paramiko.SSHClient) -> None:
    channel = client.get_transport().open_session()  # type: ignore[union-attr]
    channel.get_pty("xterm", width=101, height=33)
    channel.settimeout(20)
    channel.exec_command("stty size; tty; echo $$; sleep 1000")
    text = b""
    while text.count(b"\n") < 3:
        text += channel.recv(4096)
    rows, columns, tty, pid = text.decode().split()[:4]
    assert (rows, columns) == ("33", "101") and tty.startswith("/dev/pts/")
    channel.close()
    rigs.until(lambda: not Path(f"/proc/{pid}").exists())


def test_without_a_terminal_a_closed_channel_stops_nothing(client: paramiko.SSHClient) -> None:
    channel = client.get_transport().open_session()  # type: ignore[union-attr]
    channel.exec_command("echo $$; exec sleep 1000")
    pid = int(channel.recv(100))
    channel.close()
    client.exec_command("true")[1].channel.recv_exit_status()
    os.kill(pid, signal.SIGKILL)  # raises when it is gone


def test_sftp(root: Path, client: paramiko.SSHClient) -> None:
    with client.open_sftp() as sftp:
        with sftp.open("note.bin", "wb") as file:
            file.write(b"\0\xff" * 1000)
        assert (root / "llm" / "home" / "note.bin").read_bytes() == b"\0\xff" * 1000
        assert sftp.stat("note.bin").st_size == 2000


def test_only_our_key_gets_in(root: Path) -> None:
    ready = json.loads((root / "llm" / "ready.json").read_text())
    transport = paramiko.Transport(("127.0.0.1", ready["port"]))
    transport.start_client(timeout=20)
    for attempt in (
        lambda: transport.auth_publickey("demo", paramiko.ECDSAKey.generate()),
        lambda: transport.auth_password("demo", "demo"),
        lambda: transport.auth_none("demo"),
    ):
        with pytest.raises(paramiko.SSHException):
            attempt()
    transport.close()


def test_start_finds_what_runs_and_restarts_what_does_not(tmp_path: Path) -> None:
    names = {"llm": "lxc", "vm": "vm"}
    first = demo_rig.start(tmp_path, names)
    try:
        begun = time.monotonic()
        assert demo_rig.start(tmp_path, names) == first and time.monotonic() - begun < 5
        os.kill(first["llm"]["pid"], signal.SIGKILL)
        rigs.until(lambda: "llm" not in demo_rig.running(tmp_path))
        again = demo_rig.start(tmp_path, names)
        assert again["vm"] == first["vm"]
        assert again["llm"]["pid"] != first["llm"]["pid"]
        for same in ("port", "host_key_fingerprint"):
            assert again["llm"][same] == first["llm"][same]
    finally:
        assert sorted(demo_rig.stop(tmp_path)) == ["llm", "vm"]
    assert demo_rig.running(tmp_path) == {}


async def test_any_folder_name_will_do(tmp_path: Path) -> None:
    root = tmp_path / 'it\'s a "rig" at 100% %d, back\\slash, ünï'
    with rigs.played(root) as project:
        async with Rig(project) as rig:
            link = await rig.link("llm")
            assert (await link.run(["pwd"])).stdout.decode().strip() == str(root / "llm" / "home")
