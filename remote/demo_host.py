"""One played host: an SSH server on loopback that behaves as sshd does towards a client.

    python -m remote.demo_host --root DIR --name llm --kind lxc [--port N]

The protocol, the processes, the files and the signals are real. What is played is that this is another machine: it
has its own HOME (DIR/home), host key, login environment and state directory, but the same kernel, user, CPU and
memory as every other played host. Only the client key in DIR/authorized_keys gets in, and only from this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import pty
import pwd
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import asyncssh

CHUNK = 64 * 1024
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def login_environment(home: Path, name: str) -> dict[str, str]:
    """What sshd would give a session. Nothing of the demo's own environment leaks in."""
    user = pwd.getpwuid(os.getuid()).pw_name if _known_user() else "demo"
    # Our own interpreter last: it serves machines that have no python3 of their own.
    path = f"{SYSTEM_PATH}:{Path(sys.executable).parent}"
    return {
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "PATH": path,
        "RIGBOOK_PLAYED_HOST": name,
    }


def _known_user() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


class Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True


async def session(process: asyncssh.SSHServerProcess[bytes], home: Path, name: str) -> None:
    """Run one command (or a login shell) for a client, the way sshd does."""
    env = login_environment(home, name)
    command = process.command
    terminal = process.get_terminal_type()
    argv = ["/bin/sh", "-c", command] if command is not None else ["/bin/sh", "-l"]
    if terminal:
        env["TERM"] = terminal
    try:
        if terminal:
            code = await _with_terminal(process, argv, env, home)
        else:
            code = await _with_pipes(process, argv, env, home)
    except (OSError, asyncssh.Error) as error:
        with contextlib.suppress(OSError, asyncssh.Error):
            process.stderr.write(f"played host: {error}\n".encode())
            process.exit(255)
        return
    with contextlib.suppress(OSError, asyncssh.Error):
        if code < 0:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            process.exit(code)


async def _with_pipes(
    process: asyncssh.SSHServerProcess[bytes], argv: list[str], env: dict[str, str], home: Path
) -> int:
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    child = _start(argv, stdin[0], stdout[1], stderr[1], env, home)
    for end in (stdin[0], stdout[1], stderr[1]):
        os.close(end)
    _pass_signals(process, child)
    incoming = asyncio.ensure_future(_input(process, child, stdin[1]))
    outputs = asyncio.gather(
        _output(stdout[0], process.stdout),
        _output(stderr[0], process.stderr),
    )
    try:
        # A closed channel does not stop a command that has no terminal (OpenSSH has it so): it gets EOF and EPIPE.
        code = await _ended(child)
        # The session ends when the command has ended and nobody holds its output any more, as with OpenSSH.
        await outputs
    finally:
        incoming.cancel()
    return code


def _start(
    argv: list[str], stdin: int, stdout: int, stderr: int, env: dict[str, str], home: Path
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=home, start_new_session=True)


async def _with_terminal(
    process: asyncssh.SSHServerProcess[bytes], argv: list[str], env: dict[str, str], home: Path
) -> int:
    master, slave = pty.openpty()
    _resize(master, process.get_terminal_size())
    child = _start([sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *argv], slave, slave, slave, env, home)
    os.close(slave)
    _pass_signals(process, child)
    incoming = asyncio.ensure_future(_input(process, child, os.dup(master), terminal=master))
    output = asyncio.ensure_future(_output(master, process.stdout))
    closed = asyncio.ensure_future(process.wait_closed())
    ended = asyncio.ensure_future(_ended(child))
    try:
        await asyncio.wait({closed, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            # The terminal is gone with the client, which is what SIGHUP says.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGHUP)
        code = await ended
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(output), 1.0)
        return code
    finally:
        incoming.cancel()
        closed.cancel()


# preexec_fn is not safe in a program with threads; a short program that execs is.
_TAKE_TERMINAL = "import fcntl,os,sys,termios;fcntl.ioctl(0,termios.TIOCSCTTY,0);os.execv(sys.argv[1],sys.argv[1:])"


def _resize(descriptor: int, size: tuple[int, int, int, int]) -> None:
    columns, rows, width, height = size
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows or 24, columns or 80, width, height))


async def _ended(child: subprocess.Popen[bytes]) -> int:
    """The child's return code (negative for a signal), by pidfd: no thread per command, no polling."""
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(child.pid)
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return child.wait()


def _pass_signals(process: asyncssh.SSHServerProcess[bytes], child: subprocess.Popen[bytes]) -> None:
    """Client's signals to the command. By asyncssh's own way they are read with the input, and after its end never."""

    def received(name: str) -> None:
        number = getattr(signal, f"SIG{name}", None)
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    process.signal_received = received  # type: ignore[method-assign, assignment]


async def _input(
    process: asyncssh.SSHServerProcess[bytes], child: subprocess.Popen[bytes], descriptor: int, terminal: int = -1
) -> None:
    """Client's input into the command; window sizes come along the same way."""
    os.set_blocking(descriptor, False)
    try:
        while True:
            try:
                data = await process.stdin.read(CHUNK)
            except asyncssh.TerminalSizeChanged as changed:
                if terminal >= 0:
                    _resize(terminal, changed.term_size)
                continue
            except asyncssh.BreakReceived:
                continue
            if not data:
                return
            await _write_all(descriptor, data)
    except (OSError, asyncssh.Error):
        return
    finally:
        os.close(descriptor)


async def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await _writable(descriptor)


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)


async def _output(descriptor: int, writer: asyncssh.SSHWriter[bytes]) -> None:
    """Command's output to the client, with back pressure. Goes on reading never: a lost client closes the pipe."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        while True:
            await ready.wait()
            try:
                data = os.read(descriptor, CHUNK)
            except BlockingIOError:
                ready.clear()
                continue
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except (OSError, asyncssh.Error):
        return  # EIO: the last holder of the terminal is gone; the rest: the client is
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def host_key(root: Path) -> Path:
    file = root / "host_key"
    if not file.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment=f"played host {root.name}")
        key.write_private_key(str(file))
        key.write_public_key(f"{file}.pub")
    return file


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with the boot id, the identity of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


async def serve(root: Path, name: str, kind: str, port: int) -> None:
    home = root / "home"
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)  # what sftp resolves relative names against
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another process plays {name} in {root}") from None
    key = host_key(root)
    options = {
        "server_factory": Server,
        "server_host_keys": [str(key)],
        "authorized_client_keys": str(root / "authorized_keys"),
        "process_factory": lambda process: session(process, home, name),
        "sftp_factory": True,
        "allow_scp": True,
        "encoding": None,
        "line_editor": False,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "keepalive_interval": 15,
        "login_timeout": 30,
    }
    try:
        server = await asyncssh.listen("127.0.0.1", port, **options)
    except OSError:
        server = await asyncssh.listen("127.0.0.1", 0, **options)  # somebody took our port meanwhile
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    ready = {
        "name": name,
        "kind": kind,
        "port": server.get_port(),
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "host_key_fingerprint": asyncssh.read_public_key(f"{key}.pub").get_fingerprint(),
        "started": time.time(),
    }
    temporary = root / "ready.json.tmp"
    temporary.write_text(json.dumps(ready, indent=1) + "\n")
    temporary.replace(root / "ready.json")
    await stop.wait()
    server.close()
    (root / "ready.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="play one host of a rig on loopback")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--kind", default="linux")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(serve(given.root.resolve(), given.name, given.kind, given.port))


if __name__ == "__main__":
    main()
