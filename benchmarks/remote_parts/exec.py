"""Running commands: a warm `true`, and fifty hosts at once, beside raw asyncssh, the ssh binary and Ansible.

    python -m benchmarks.remote_parts.exec [--rounds 7] [--ansible DIR/bin/ansible]

One OpenSSH server on loopback is fifty hosts as far as every client is concerned: fifty addresses, each with its own
line in known_hosts. Raw asyncssh checks host keys against the same file. Sides take turns within a round, and the first
round does not count. For Ansible give the option or ANSIBLE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncssh

from benchmarks import remote as report
from remote import hostkeys, identity, remembered, resolve
from remote.connect import Rig
from tests.lab import rigs

HOSTS = 50
CALLS = 40  # commands in one sample of the warm case
Row = dict[str, Any]


def compared(what: str, against: str, unit: str, ours: list[float], other: list[float], wanted: str) -> Row:
    ratios = sorted(a / b for a, b in zip(ours, other, strict=True))
    return {
        "what": what,
        "ours": statistics.median(ours),
        "other": statistics.median(other),
        "unit": unit,
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "wanted": wanted,
        "against": against,
    }


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def warm(server: rigs.Sshd, rounds: int) -> list[Row]:
    user = next(iter(server.users))
    project = server.project(user)
    account = server.accounts.get(user, user)
    raw = await asyncssh.connect(
        server.address, server.port, username=account, client_keys=[str(server.root / "key")], config=None,
        known_hosts=str(server.root / "known_hosts"), agent_path=None,
    )  # fmt: skip
    control = ["ssh", "-F", str(server.root / "ssh_config"), "-o", f"ControlPath={server.root}/control"]
    start = [*control, "-o", "ControlMaster=yes", "-o", "ControlPersist=60", "-fN", "box"]
    await asyncio.to_thread(subprocess.run, start, check=True)
    samples: dict[str, list[float]] = {"ours": [], "raw": [], "program": [], "master": []}
    async with Rig(project) as rig:
        link = await rig.link("box")

        async def ours() -> None:
            assert (await link.run(["true"])).ok

        async def bare() -> None:
            assert (await raw.run("true", encoding=None)).exit_status == 0

        async def program() -> None:
            assert (await raw.run("exec /bin/true", encoding=None)).exit_status == 0

        async def master() -> None:
            process = await asyncio.create_subprocess_exec(*control, "box", "true", stdin=subprocess.DEVNULL)
            assert await process.wait() == 0

        for number in range(rounds + 1):
            found: dict[str, list[float]] = {name: [] for name in samples}
            # Call by call, so that whatever else the machine does falls on both alike, and each goes first as often as
            # the other: it pays for what the one before it left to be cleaned up.
            for turn in range(CALLS):
                for name, one in (("ours", ours), ("raw", bare), ("program", program))[:: 1 if turn % 2 else -1]:
                    found[name].append(await timed(one))
            for _ in range(CALLS // 4):
                found["master"].append(await timed(master))
            if number:
                for name, seconds in found.items():
                    samples[name].append(statistics.median(seconds) * 1000)
    await asyncio.to_thread(subprocess.run, [*control, "-O", "exit", "box"], check=False, capture_output=True)
    raw.close()
    return [
        compared("warm `exec true`", "raw asyncssh", "ms", samples["ours"], samples["raw"], "<= 1.3"),
        # `true` is built into bash, where raw asyncssh's command ends; ours, as any real command, is a program.
        compared("warm `exec true`", "raw asyncssh, `exec /bin/true`", "ms", samples["ours"], samples["program"], ""),
        compared("warm `exec true`", "ssh, ControlMaster", "ms", samples["ours"], samples["master"], "<= 1"),
    ]


def fifty(server: rigs.Sshd) -> tuple[list[str], list[str]]:
    """Fifty names and their addresses."""
    user = next(iter(server.users))
    key = (server.root / "host_key.pub").read_text()
    names = [f"h{number:02d}" for number in range(HOSTS)]
    addresses = [f"127.0.1.{number}" for number in range(1, HOSTS + 1)]
    lines = [f"Host {name}\n  HostName {address}\n" for name, address in zip(names, addresses, strict=True)]
    (server.root / "ssh_config").write_text(
        "".join(lines) + f"Host *\n  Port {server.port}\n  User {server.accounts.get(user, user)}\n"
        f"  IdentityFile {server.root}/key\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {server.root}/known_hosts\n"
    )
    (server.root / "known_hosts").write_text("".join(f"[{address}]:{server.port} {key}" for address in addresses))
    return names, addresses


async def many(server: rigs.Sshd, rounds: int) -> tuple[list[Row], list[float]]:
    names, addresses = fifty(server)
    project = rigs.project(server.root, "".join(rigs.host(name) for name in names))
    user = next(iter(server.users))

    async def new_process() -> None:
        for cache in (resolve._cache, hostkeys._files, identity._keys):
            cache.clear()  # type: ignore[attr-defined]
        await ours()

    async def never_asked() -> None:
        shutil.rmtree(cache_home, ignore_errors=True)
        resolve._defaults.cache_clear()
        await new_process()

    async def ours() -> None:
        async with Rig(project) as rig:

            async def one(name: str) -> None:
                assert (await (await rig.link(name)).run(["true"])).ok

            await asyncio.gather(*map(one, names))

    async def bare() -> None:
        async def one(address: str) -> None:
            async with asyncssh.connect(
                address, server.port, username=server.accounts.get(user, user), config=None, agent_path=None,
                client_keys=[str(server.root / "key")], known_hosts=str(server.root / "known_hosts"),
            ) as connection:  # fmt: skip
                assert (await connection.run("true", encoding=None)).exit_status == 0

        await asyncio.gather(*map(one, addresses))

    cache_home = server.root / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache_home)
    await asyncio.sleep(remembered.OLD_ENOUGH_S)  # a config that was written just now is not relied on
    found: dict[str, list[float]] = {"never": [], "new": [], "ours": [], "raw": []}
    for number in range(rounds + 1):
        for name, side in (("never", never_asked), ("new", new_process), ("ours", ours), ("raw", bare)):
            seconds = await timed(side)
            if number:
                found[name].append(seconds)
    what = f"{HOSTS} hosts, connect and run"
    return [
        compared(f"{what}, again", "raw asyncssh", "s", found["ours"], found["raw"], "<= 1.3"),
        # The first time in a process: files are parsed, what ssh said of each host is on disk.
        compared(what, "raw asyncssh", "s", found["new"], found["raw"], "<= 1.3"),
        # The first time at all, or after the ssh config was changed. Raw asyncssh reads no config.
        compared(f"{what}, ssh -G for each", "raw asyncssh", "s", found["never"], found["raw"], ""),
    ], found["new"]


def ansible(server: rigs.Sshd, ours: list[float], binary: str, rounds: int) -> list[Row]:
    """`ansible all -m ping` with as many forks as hosts, which is its best case."""
    if not shutil.which(binary):
        print(f"# Ansible is not installed ({binary}): give --ansible or ANSIBLE")
        return []
    names, _ = fifty(server)
    (server.root / "inventory").write_text("[all]\n" + "\n".join(names) + "\n")
    env = {
        **os.environ,
        "ANSIBLE_SSH_ARGS": f"-F {server.root}/ssh_config",  # without ControlPersist: both sides start cold
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_HOME": str(server.root / "ansible"),
        "LC_ALL": "C.UTF-8",
    }
    seconds = []
    command = [binary, "all", "-i", str(server.root / "inventory"), "-m", "ping", "-f", str(HOSTS), "-o"]
    for _ in range(min(rounds, 3)):
        began = time.perf_counter()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - began)
        if (good := done.stdout.count("SUCCESS")) != HOSTS:
            print(f"# Ansible reached {good} of {HOSTS}: {(done.stdout + done.stderr)[:300]}")
    few = ours[: len(seconds)]
    return [compared(f"{HOSTS} hosts, connect and run", "ansible ping", "s", few, seconds, "<= 0.1")]


@contextlib.contextmanager
def quiet(address: str) -> Iterator[rigs.Sshd]:
    """A server whose first user has no start-up file that prints."""
    with rigs.sshd("MaxStartups 200\nMaxSessions 64\n", address=address) as server:
        (next(iter(server.users.values())) / ".bashrc").write_text("")
        yield server


def main(rounds: int, binary: str | None = None) -> list[Row]:
    with quiet("127.0.0.1") as server:
        rows = asyncio.run(warm(server, rounds))
    with quiet("0.0.0.0") as server:
        more, ours = asyncio.run(many(server, rounds))
        return [*rows, *more, *ansible(server, ours, binary or os.environ.get("ANSIBLE", "ansible"), rounds)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ansible", help="the ansible program")
    args = parser.parse_args()
    for row in main(args.rounds, args.ansible):
        print(report.line(row), flush=True)
