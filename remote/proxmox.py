"""Guests through their Proxmox host: `pct exec` for containers, the guest agent for VMs.

    host's login shell    exec pct exec 101 --keep-env 0 -- /usr/bin/env -i HOME=/root PATH=… /bin/sh -c 'COMMAND'

`COMMAND` is the constant line of `remote.shell`, so what we run still arrives on stdin and never shows in `ps`. pct
passes the host's environment on unless it is told not to, and one before 8.1 cannot be told: `env -i` settles it for
both. A signal that ended the command comes back as exit code 128+n, which is how lxc-attach tells it.

The guest agent (`qm guest exec`) takes one command, 1 MiB of input, and answers about a second later with all of the
output: enough to look and to set up ssh, not for streams, probes and jobs. They refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from remote import shell
from remote.connect import Channel, Feed, Link, Sink
from remote.result import Result, signal_number
from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError
from state.tables import Host

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN = f"/usr/bin/env -i HOME=/root USER=root LOGNAME=root SHELL=/bin/sh PATH={PATH} LANG=C.UTF-8"
INPUT_LIMIT = 1 << 20  # bytes that `qm guest exec --pass-stdin` takes
AGENT_S = 30  # seconds that one call of qm waits before it answers with a pid to ask about later
POLL_S = 1.0

_SIGNALS = ("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM",
            "TERM")  # fmt: skip


def through_host(name: str, host: Host, outer: Link) -> Link:
    return GuestLink(name, host, outer) if host.reached_by == "pct" else AgentLink(name, host, outer)


async def host_keys(name: str, host: Host, outer: Link) -> list[str]:
    """The public host keys of a guest's sshd, one line each, asked for through its host."""
    link = GuestLink(name, host, outer) if host.kind == "lxc" else AgentLink(name, host, outer)
    found = await link.run(script="cat /etc/ssh/ssh_host_*_key.pub", timeout=30)
    lines = found.stdout.decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.startswith(("ssh-", "ecdsa-", "sk-"))] if found.ok else []


class GuestLink(Link):
    """A container, by `pct exec` on its host."""

    def __init__(self, name: str, host: Host, outer: Link) -> None:
        super().__init__(name, host)
        self.outer = outer
        self._keep_env = " --keep-env 0"
        self._answered = False

    def route(self) -> dict[str, str]:
        return {"route": "pct", "target": f"{self.host.vmid} on {self.outer.name}"}

    async def ready(self) -> None:
        await self.outer.ready()
        if self._answered:
            return
        try:
            await self.run(["true"], timeout=30)
        except RigbookError as error:
            if error.id != "guest.old-pct":
                raise
            self._keep_env = ""
            await self.run(["true"], timeout=30)
        self._answered = True

    @contextlib.asynccontextmanager
    async def _open(
        self, command: str, line: bytes, *, eof: bool = False, bulk: bool = False
    ) -> AsyncIterator[Channel]:
        inner = f"{CLEAN} /bin/sh -c {shell.quote(command)}"
        command = f"exec pct exec {self.host.vmid}{self._keep_env} -- {inner}"
        async with self.outer._open(command, line, eof=eof, bulk=bulk) as channel:
            yield channel

    def _no_shell(self, code: int | None, noise: str) -> RigbookError:
        return _refusal(self, noise) or super()._no_shell(code, noise)

    def entering(self) -> list[str]:
        """What makes a login shell there, on the host's terminal."""
        return ["pct", "enter", str(self.host.vmid)]


class AgentLink(Link):
    """A VM, by its guest agent: one command at a time, all of its output at the end."""

    def __init__(self, name: str, host: Host, outer: Link) -> None:
        super().__init__(name, host)
        self.outer = outer

    def route(self) -> dict[str, str]:
        return {"route": "agent", "target": f"{self.host.vmid} on {self.outer.name}"}

    async def ready(self) -> None:
        await self.outer.ready()

    def _open(
        self, command: str, line: bytes, *, eof: bool = False, bulk: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Channel]:
        raise bootstrap_only(self)

    async def stream(
        self,
        argv: Sequence[str] | None = None,
        *,
        script: str | None = None,
        feed: Feed = b"",
        out: Sink,
        err: Sink,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Result:
        """As everywhere, but the output comes at the end, and there is room for 1 MiB of input."""
        line = shell.program(argv, script=script, env=env, cwd=cwd, timeout=timeout)
        given = line + (feed if isinstance(feed, bytes) else b"".join([chunk async for chunk in feed]))
        if len(given) > INPUT_LIMIT:
            raise RigbookError(
                "guest.input-too-large",
                f"the guest agent takes {INPUT_LIMIT} bytes of input, this is {len(given)}",
                host=self.name,
                hint=f"Set `hosts.{self.name}.ssh`.",
                exit_code=REFUSED,
            )
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout + 5
        told = await self._qm(
            ["exec", str(self.host.vmid), "--pass-stdin", "1", "--timeout", str(AGENT_S), "--",
             *CLEAN.split(), "/bin/sh", "-c", 'IFS= read -r s&&eval "$s"'],
            given,
        )  # fmt: skip
        if isinstance(told, Result):
            return told
        pid = told.get("pid")
        while not told.get("exited"):
            if deadline is not None and clock() > deadline:
                return Result("timeout", reason=f"still running after its {timeout:g} s", host=self.name)
            await asyncio.sleep(POLL_S)
            told = await self._qm(["exec-status", str(self.host.vmid), str(pid)], b"")
            if isinstance(told, Result):
                return told
        for key, sink in (("out", out), ("err", err)):
            if (data := _bytes(told.get(f"{key}-data") or "")) and (taking := sink(data)) is not None:
                await taking
        cut = [f"std{key}" for key in ("out", "err") if told.get(f"{key}-truncated")]
        reason = f"the guest agent cut {' and '.join(cut)} short" if cut else ""
        if number := int(told.get("signal") or 0):
            name = next((name for name in _SIGNALS if signal_number(name) == number), str(number))
            return Result("signaled", None, name, reason=reason, host=self.name)
        code = int(told.get("exitcode", 0))
        if timeout is not None and code in (124, 137):
            return Result("timeout", reason=f"stopped after its {timeout:g} s", host=self.name)
        return Result("exited", code, reason=reason, host=self.name)

    async def _qm(self, words: list[str], given: bytes) -> dict[str, Any] | Result:
        """One call of qm: what it printed, or the Result when the link to the host was lost meanwhile."""
        done = await self.outer.run(["qm", "guest", *words], stdin=given, timeout=AGENT_S + 30)
        if done.state == "unknown":
            return Result("unknown", reason=done.reason, host=self.name)
        if not done.ok:
            said = done.error_text() or done.text().strip() or done.describe()
            raise _refusal(self, said) or RigbookError(
                "guest.no-agent",
                f"the guest agent did not answer: {said[-300:]}",
                host=self.name,
                hint="Install qemu-guest-agent in the VM, enable it (`qm set ID --agent 1`), and restart the VM.",
                exit_code=UNREACHABLE,
            )
        try:
            return dict(json.loads(done.stdout))
        except (ValueError, TypeError) as error:
            raise RigbookError(
                "guest.no-agent", f"qm printed no JSON: {done.text()[:200]!r}", host=self.name, exit_code=UNREACHABLE
            ) from error


def _bytes(text: str) -> bytes:
    """qm prints each byte of the output as the character of that number."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def bootstrap_only(link: Link) -> RigbookError:
    return RigbookError(
        "host.bootstrap-only",
        "only its guest agent can be asked, which is enough for single commands",
        host=link.name,
        hint=f'For jobs, probes, files and a shell set hosts.{link.name}.ssh = "user@address".',
        exit_code=USAGE,
    )


def _refusal(link: Link, said: str) -> RigbookError | None:
    """What pct and qm complain about themselves, before any command of ours began."""
    vmid = link.host.vmid
    if "Unknown option: keep-env" in said:
        return RigbookError("guest.old-pct", "this pct has no --keep-env", host=link.name)
    # Not "QEMU guest agent is not running", which is another matter.
    if re.search(rf"(container|CT|VM) '?{vmid}'? (is )?not running", said):
        return RigbookError(
            "guest.not-running",
            f"guest {vmid} is not running",
            host=link.name,
            hint=f"rigbook guests start {link.name}",
            exit_code=UNREACHABLE,
        )
    if re.search(rf"{vmid}\.conf' does not exist", said):
        return RigbookError(
            "guest.absent",
            f"there is no guest {vmid} on {link.host.on}",
            host=link.name,
            hint="A guest that was moved to another node is configured there: is `on` still right?",
            exit_code=UNREACHABLE,
        )
    for command in ("pct", "qm"):
        if f"{command}: " in said and ("not found" in said or "No such file" in said):
            return RigbookError(
                "guest.no-proxmox", f"{link.host.on} has no `{command}`: is it a Proxmox host, and are we root there?",
                host=link.name, exit_code=UNREACHABLE,
            )  # fmt: skip
    return None
