"""An SSH server that misbehaves on command, by paramiko: an implementation that shares nothing with asyncssh.

    with FaultyServer(tmp_path) as server:
        async with Rig(server.project()) as rig:
            server.fault = "no-exit-status"
            …

Commands really run, as ourselves, by /bin/sh. Faults, each for what begins while it is set:

    no-exit-status   the output comes whole, then the channel closes and nobody says how it ended
    exit-signal      the command ended well, but we say that SIGKILL ended it
    close-midway     after `after` bytes of output the channel closes
    drop-midway      after `after` bytes of output the connection is gone
    garbage          3 MiB of binary noise without a line end come before the output
    no-open          a request for a channel is never answered
    no-reply         a request to run something is never answered
    refuse-open      … is refused, as MaxSessions does
    refuse-exec      the request to run something is refused
    drop-login       the connection closes before login, as MaxStartups does
    refuse-login     no key is good enough
    deaf             it reads nothing more: keepalives stay unanswered (for ever, on connections that had it set)

`new_host_key()` is what a reinstalled machine does. There is no sftp subsystem.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar, Self

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from state.project import Project
from tests.lab import rigs

PIECE = 32 * 1024


class FaultyServer:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.fault = ""
        self.after = 1000
        self.connections = 0
        self.transports: list[_Transport] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        rigs.make_key(root / "key")
        self.key = self.new_host_key()
        self.trust()

    def new_host_key(self) -> paramiko.PKey:
        """Show another key from now on; `trust` puts it on file."""
        rigs.make_key(self.root / "host_key")
        self.key = paramiko.Ed25519Key(filename=str(self.root / "host_key"))
        return self.key

    def trust(self) -> None:
        (self.root / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {(self.root / 'host_key.pub').read_text()}")

    def project(self, extra: str = "") -> Project:
        return rigs.write_project(self.root, "127.0.0.1", self.port, pwd.getpwuid(os.getuid()).pw_name, extra)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone would not wake up accept()
        self._listener.close()
        for transport in self.transports:
            transport.heard.set()
            transport.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.fault == "drop-login":
                connection.close()
                continue
            transport = _Transport(connection)
            transport.faulty = self
            transport.add_server_key(self.key)
            self.transports.append(transport)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                transport.start_server(event=threading.Event(), server=_Session(self))


class _Transport(paramiko.Transport):
    """Where paramiko answers by itself, it may be told not to."""

    faulty: FaultyServer

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.heard = threading.Event()

    def _parse_channel_open(self, message: paramiko.Message) -> None:
        if self.faulty.fault != "no-open":
            super()._parse_channel_open(message)  # type: ignore[misc]

    def _parse_global_request(self, message: paramiko.Message) -> None:
        if self.faulty.fault == "deaf":
            self.heard.wait()  # in the thread that reads: nothing is read after this
        else:
            super()._parse_global_request(message)  # type: ignore[misc]

    def _channel_request(channel: Any, message: paramiko.Message) -> None:
        if channel.transport.faulty.fault != "no-reply":
            channel._handle_request(message)

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        cMSG_CHANNEL_REQUEST[0]: _channel_request,
    }


class _Session(paramiko.ServerInterface):
    def __init__(self, faulty: FaultyServer) -> None:
        self.faulty = faulty

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = (self.faulty.root / "key.pub").read_text().split()[1]
        good = self.faulty.fault != "refuse-login" and key.get_base64() == known
        return paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if self.faulty.fault == "refuse-open" or kind != "session":
            return paramiko.OPEN_FAILED_RESOURCE_SHORTAGE
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        fault = self.faulty.fault
        if fault == "refuse-exec":
            return False
        threading.Thread(target=_run, args=(self.faulty, channel, command, fault), daemon=True).start()
        return True


def _run(faulty: FaultyServer, channel: paramiko.Channel, command: bytes, fault: str) -> None:
    pipe = subprocess.PIPE
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    left = faulty.after if fault in ("close-midway", "drop-midway") else None
    ended = threading.Event()

    def feed() -> None:
        assert child.stdin
        with contextlib.suppress(OSError, EOFError), child.stdin:
            while data := channel.recv(PIECE):
                child.stdin.write(data)
                child.stdin.flush()

    def tell(stream: Any, send: Any) -> None:
        nonlocal left
        while data := os.read(stream.fileno(), PIECE):
            if left is not None and len(data) >= left:
                data, left = data[:left], 0
            elif left is not None:
                left -= len(data)
            with contextlib.suppress(OSError):
                send(data)
            if left == 0:
                ended.set()
                return

    try:
        if fault == "garbage":
            channel.sendall(bytes(range(11, 256)) * (3 * 1024 * 1024 // 245))
        threads = [threading.Thread(target=tell, args=pair, daemon=True) for pair in _outputs(child, channel)]
        for thread in (threading.Thread(target=feed, daemon=True), *threads):
            thread.start()
        while not ended.is_set() and any(thread.is_alive() for thread in threads):
            threads[0].join(0.02)
        if ended.is_set():
            child.kill()
            child.wait()
            if fault == "drop-midway":
                channel.transport.close()
            return
        code = child.wait()
        if fault == "exit-signal":
            _exit_signal(channel, "KILL")
        elif fault != "no-exit-status":
            channel.send_exit_status(code if code >= 0 else 128 - code)
    except (OSError, EOFError):
        pass
    finally:
        channel.close()


def _outputs(child: subprocess.Popen[bytes], channel: paramiko.Channel) -> list[tuple[Any, Any]]:
    return [(child.stdout, channel.sendall), (child.stderr, channel.sendall_stderr)]


def _exit_signal(channel: paramiko.Channel, name: str) -> None:
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(name)
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    channel.transport._send_user_message(message)  # type: ignore[attr-defined]
