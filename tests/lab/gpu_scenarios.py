"""Random scenarios of who holds GPUs, with real processes. Run inside of tests/lab/gpu_machine.py, one JSON line each.

    python gpu_scenarios.py DIR HOLDER SEED…  [--without TABLE:RULE]

A scenario is made of actors. Each knows, by how it was made and not by any rule of the product, what it is and whether
it may be ended: nothing here imports the classifier's knowledge. Plan and apply are the product's own, on a link
whose probe answers in this process, so that one rule may be taken out (`--without`): then some scenario must fail.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remote import cleanup
from remote.probe import program, ship

MIB = 1 << 20
GPUS = 4


@dataclass
class Actor:
    """A process, what it is, and whether it may be ended."""

    name: str
    pid: int
    kind: str | None  # the class that it must be given; None: it holds nothing and is not ours
    dies: bool
    vram: dict[int, int] = field(default_factory=dict)  # GPU -> bytes
    note: str = ""

    def alive(self) -> bool:
        return state(self.pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def starttime(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def wait_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while state(pid) not in ("", "Z", "X"):
        assert time.monotonic() < deadline, pid
        time.sleep(0.002)


class Stage:
    """One scenario: where its processes and job directories are."""

    def __init__(self, folder: Path, holder: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.holder = folder / f"s{seed}", holder
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "jobs").mkdir(parents=True)
        self.python = self.program("env/bin/python3")
        self.actors: list[Actor] = []
        self.spawned: list[subprocess.Popen[bytes]] = []
        self.locks: list[int] = []
        self.others: list[int] = []  # launchers and the like
        self.port = 20000 + self.random.randrange(20000)

    def program(self, path: str) -> str:
        """The holder under another path."""
        target = Path(path) if path.startswith("/") else self.folder / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.holder, target)
        return str(target)

    def job(self, id: str, running: bool) -> dict[str, str]:
        """A job directory as a supervisor leaves it, and the mark of its processes."""
        where = self.folder / "jobs" / id
        if not where.exists():
            where.mkdir()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            dead = {"pid": 999999, "starttime": 1}
            space = os.readlink("/proc/self/ns/pid")
            start = {"v": 1, "boot_id": boot, **dead, "supervisor": dead, "started": time.time(), "cgroup": "/"}
            start["pid_namespace"] = space
            (where / "spec.json").write_text(json.dumps({"id": id, "name": id, "run": f"run-{id}"}))
            (where / "start.json").write_text(json.dumps(start))
            (where / "lock").touch(0o600)
        if running:
            self.lock(id)
        return {"RIGBOOK_JOB": id, "RIGBOOK_JOB_DIR": str(where), "RIGBOOK_RUN": f"run-{id}"}

    def lock(self, id: str) -> None:
        """A job runs while somebody holds its lock."""
        descriptor = os.open(self.folder / "jobs" / id / "lock", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self.locks.append(descriptor)

    def next_port(self) -> int:
        self.port += 1
        return self.port

    def memory(self) -> dict[int, int]:
        gpus = self.random.sample(range(GPUS), self.random.choice([1, 1, 1, 2]))
        return {gpu: self.random.randrange(80, 4000) * MIB for gpu in gpus}

    def start(
        self,
        *steps: str,
        env: dict[str, str] | None = None,
        vram: dict[int, int] | None = None,
        program: str | None = None,
        ups: int = 1,
        wrap: tuple[str, ...] = (),
    ) -> tuple[list[int], list[int]]:
        """(those that say `via`, those that say `up`)."""
        clean = {"PATH": "/usr/bin:/bin", **(env or {})}
        if vram:
            clean["FAKE_VRAM"] = ",".join(f"{gpu}:{size}" for gpu, size in vram.items())
            steps = (*steps, *(f"/dev/nvidia{gpu}" for gpu in vram))
        process = subprocess.Popen(
            [*wrap, program or self.holder, *steps], env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        self.spawned.append(process)
        assert process.stdout is not None
        via, up = [], []
        while len(up) < ups:
            words = process.stdout.readline().split()
            assert len(words) == 2, (steps, words)
            (via if words[0] == b"via" else up).append(int(words[1]))
        self.others += via
        return via, up

    def add(self, name: str, pid: int, kind: str | None, dies: bool, vram: dict[int, int], note: str = "") -> Actor:
        actor = Actor(name, pid, kind, dies, vram, note)
        self.actors.append(actor)
        return actor

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            wait_dead(pid)

    def group(self, pid: int, path: str) -> None:
        """Put a process into a cgroup of this name."""
        where = Path(sys.argv[1]) / "cg" / path
        where.mkdir(parents=True, exist_ok=True)
        (where / "cgroup.procs").write_text(str(pid))

    def end(self) -> None:
        for pid in {*self.others, *(actor.pid for actor in self.actors), *(p.pid for p in self.spawned)} - {
            os.getpid()
        }:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.spawned:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for lock in self.locks:
            os.close(lock)
        shutil.rmtree(self.folder, ignore_errors=True)


# -- actors: (stage) -> None ---------------------------------------------------------------------------------------


def live_job(stage: Stage) -> None:
    vram = stage.memory()
    _, (pid,) = stage.start("--setsid", env=stage.job(f"live{len(stage.actors)}", True), vram=vram)
    stage.add("live job", pid, "live", False, vram)


def orphan(stage: Stage) -> None:
    vram = stage.memory()
    steps = ["--setsid", *(["--deaf"] if stage.random.random() < 0.3 else [])]
    _, (pid,) = stage.start(*steps, env=stage.job(f"dead{len(stage.actors)}", False), vram=vram)
    stage.add("orphan", pid, "orphan", True, vram)


def orphan_in_tree(stage: Stage) -> None:
    """It lost its mark; its supervisor had seen it."""
    vram = stage.memory()
    id = f"tree{len(stage.actors)}"
    stage.job(id, False)
    _, (pid,) = stage.start("--setsid", vram=vram)
    tree = {"processes": [[pid, starttime(pid)]]}
    (stage.folder / "jobs" / id / "tree.json").write_text(json.dumps(tree))
    stage.add("orphan in a tree", pid, "orphan", True, vram)


def respawning_pool(stage: Stage) -> None:
    """A pool of a dead job whose launcher ignores TERM and starts every worker anew."""
    mark = stage.job(f"pool{len(stage.actors)}", False)
    steps = ["--setsid", "--respawn", "--deaf", "--workers", "2", "--undeaf"]
    _, workers = stage.start(*steps, env=mark, vram=None, ups=2)
    launcher = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (launcher, *workers):
        stage.add("respawning pool", pid, "orphan", True, {})
    stage.actors[-1].note = f"family {mark['RIGBOOK_JOB']}"


def foreign(stage: Stage) -> None:
    vram = stage.memory()
    _, (pid,) = stage.start("--setsid", vram=vram)
    stage.add("foreign", pid, "foreign", False, vram)


def foreign_directory(stage: Stage) -> None:
    """Another project's job that has the id of a dead one of ours."""
    vram = stage.memory()
    mark = stage.job(f"twin{len(stage.actors)}", False)
    _, (pid,) = stage.start("--setsid", env={**mark, "RIGBOOK_JOB_DIR": "/elsewhere/" + mark["RIGBOOK_JOB"]}, vram=vram)
    stage.add("job of another directory", pid, "foreign", False, vram)


def forgotten_job(stage: Stage) -> None:
    vram = stage.memory()
    mark = stage.job(f"lost{len(stage.actors)}", False)
    shutil.rmtree(mark["RIGBOOK_JOB_DIR"])
    _, (pid,) = stage.start("--setsid", env=mark, vram=vram)
    stage.add("job without a directory", pid, "foreign", False, vram)


def unclaimed(stage: Stage) -> None:
    vram = stage.memory()
    via, (pid,) = stage.start("--setsid", "--fork", program=stage.python, vram=vram)
    stage.kill(*via)
    stage.add("worker of nobody's", pid, "unclaimed", True, vram)


def _almost(name: str, *steps: str, dead: tuple[int, ...] = (0,), **more: Any) -> Callable[[Stage], None]:
    """A worker that differs in one thing from one of nobody's."""

    def make(stage: Stage) -> None:
        vram = stage.memory()
        words = [str(stage.next_port()) if step == "PORT" else step for step in steps]
        via, (pid,) = stage.start(*words, vram=vram, **{"program": stage.python, **more})
        stage.kill(*(via[at] for at in dead))
        stage.add(name, pid, "foreign", False, vram)

    return make


launcher_alive = _almost("its launcher lives", "--setsid", "--fork", "--fork")
leads_group = _almost("started to run alone", "--setsid", "--fork", "--setpgid")
group_alive = _almost("its group's leader lives", "--setsid", "--fork", "--setpgid", "--fork", "--fork", dead=(0, 2))
session_alive = _almost("in a session", "--setsid", "--fork", "--setpgid", "--fork", dead=(1,))
serves = _almost("it serves", "--setsid", "--fork", "--port", "PORT")


def other_interpreter(stage: Stage) -> None:
    vram = stage.memory()
    via, (pid,) = stage.start("--setsid", "--fork", program=stage.program("another/bin/python3"), vram=vram)
    stage.kill(*via)
    stage.add("of another interpreter", pid, "foreign", False, vram)


def serving_child(stage: Stage) -> None:
    """A process that holds, with a child that serves and does not."""
    vram = stage.memory()
    clean = {"FAKE_VRAM": ",".join(f"{gpu}:{size}" for gpu, size in vram.items()), "PATH": "/usr/bin:/bin"}
    nodes = [f"/dev/nvidia{gpu}" for gpu in vram]
    # The parent opens the nodes; its child says so by closing none of them: it is a holder, too.
    process = subprocess.Popen(
        [stage.python, "--setsid", "--fork", *nodes, "--fork", "--setsid", "--port", str(stage.next_port())],
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    stage.spawned.append(process)
    assert process.stdout is not None
    first, second, child = (int(process.stdout.readline().split()[1]) for _ in range(3))
    stage.kill(first)
    stage.others += [second, child]
    stage.add("its child serves", second, "foreign", False, vram)
    stage.add("a child that serves", child, "foreign", False, vram)


def service(stage: Stage) -> None:
    vram = stage.memory()
    via, (pid,) = stage.start("--setsid", "--fork", program=stage.python, vram=vram)
    stage.group(pid, f"system.slice/train{pid}.service")
    stage.kill(*via)
    stage.add("of a system service", pid, "foreign", False, vram)


def daemon(stage: Stage) -> None:
    """A system service that carries a dead job's mark: the job had started it."""
    vram = stage.memory()
    name = stage.random.choice(["nvidia-persistenced", "nv-fabricmanager", "nvidia-cuda-mps-server", "nv-hostengine"])
    mark = stage.job(f"daemon{len(stage.actors)}", False)
    _, (pid,) = stage.start("--setsid", env=mark, vram=vram, program=stage.program(f"/opt/nvidia/{name}"))
    stage.add("system service", pid, "protected", False, vram)


def virtual_machine(stage: Stage) -> None:
    mark = stage.job(f"vm{len(stage.actors)}", False)
    program = stage.program("x/qemu-system-x86_64" if stage.random.random() < 0.5 else "x/anything")
    _, (pid,) = stage.start("--setsid", "/dev/vfio/12", env=mark, program=program)
    stage.add("virtual machine", pid, "protected", False, {})


def monitor(stage: Stage) -> None:
    mark = stage.job(f"monitor{len(stage.actors)}", False)
    vram = stage.memory()
    _, (pid,) = stage.start("--setsid", env=mark, vram=vram)
    stage.group(pid, "lxc.monitor/101")
    stage.add("keeper of a container", pid, "protected", False, vram)


def another_probe(stage: Stage) -> None:
    """Somebody else's look at the GPUs, started out of a job that is over."""
    mark = stage.job(f"probe{len(stage.actors)}", False)
    _, (pid,) = stage.start("--setsid", "/dev/nvidia0", env={**mark, "RIGBOOK_PROBE": "1"})
    stage.add("another probe", pid, "protected", False, {})


def container(stage: Stage) -> None:
    """A container in namespaces of its own: its first process and an orphan, both with the mark of a dead job."""
    mark = stage.job(f"ct{len(stage.actors)}", False)
    vram = stage.memory()
    # What keeps it (here unshare) carries no mark, as lxc-start does not.
    words = [f"{name}={value}" for name, value in mark.items()]
    words.append("FAKE_VRAM=" + ",".join(f"{gpu}:{size}" for gpu, size in vram.items()))
    nodes = [f"/dev/nvidia{gpu}" for gpu in vram]
    stage.start("--fork", *nodes, wrap=("unshare", "-p", "--fork", "--kill-child", "env", *words))
    outer = stage.spawned[-1].pid
    (first,) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())
    (second,) = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
    stage.others.append(first)
    stage.add("a container's first", first, "protected", False, {})
    stage.add("a container's orphan", second, "orphan", True, vram)


def ourselves(stage: Stage) -> None:
    """We ourselves are what a dead job's supervisor saw."""
    stage.job("own", False)
    tree = {"processes": [[os.getpid(), starttime(os.getpid())]]}
    (stage.folder / "jobs" / "own" / "tree.json").write_text(json.dumps(tree))
    stage.add("ourselves", os.getpid(), "protected", False, {})


ACTORS = {
    make.__name__: make
    for make in (
        *(live_job, orphan, orphan_in_tree, respawning_pool, foreign, foreign_directory, forgotten_job, unclaimed),
        *(other_interpreter, serving_child, service, daemon, virtual_machine, monitor, another_probe),
    )
} | {
    "launcher_alive": launcher_alive,
    "leads_group": leads_group,
    "group_alive": group_alive,
    "session_alive": session_alive,
    "serves": serves,
}


# -- what happens between plan and apply ---------------------------------------------------------------------------


def _victim(stage: Stage, name: str, *steps: str, mark: dict[str, str] | None = None) -> Actor:
    """An orphan that is in the plan, and to which something then happens."""
    vram = stage.memory()
    mark = mark or stage.job(f"v{len(stage.actors)}", False)
    _, (pid,) = stage.start("--setsid", *steps, env=mark, vram=vram)
    return stage.add(name, pid, "orphan", False, vram)


def pid_reused(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    """Its pid becomes that of a younger process of the same job, which the plan has not seen."""
    mark = stage.job(f"r{len(stage.actors)}", False)
    old = _victim(stage, "pid reused", mark=mark)

    def then(items: dict[int, dict[str, Any]]) -> None:
        stage.kill(old.pid)
        stage.spawned[-1].poll()
        for process in stage.spawned:
            process.poll()
        while starttime_now() <= items[old.pid]["starttime"] + 2:
            time.sleep(0.01)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(old.pid - 1))
        _, (pid,) = stage.start(env=mark, vram=old.vram)
        assert pid == old.pid, "the pid was not reused"
        items[old.pid]["expect"] = ("gone", "the pid belongs to another process now")

    return then


def starttime_now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _stale(key: str, value: Any, outcome: str, reason: str) -> Callable[[Stage], Callable[..., None]]:
    """The plan says something else of it than what is so."""

    def make(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
        actor = _victim(stage, f"stale {key}")

        def then(items: dict[int, dict[str, Any]]) -> None:
            items[actor.pid].update({key: value, "expect": (outcome, reason)})

        return then

    return make


other_boot = _stale("boot_id", "00000000-0000-0000-0000-000000000000", "gone", "the machine was started anew since")
other_namespace = _stale("pid_namespace", "pid:[1]", "refused", "it is in another pid namespace than planned")


def moved(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    actor = _victim(stage, "moved to another cgroup")

    def then(items: dict[int, dict[str, Any]]) -> None:
        stage.group(actor.pid, f"elsewhere/{actor.pid}")
        items[actor.pid]["expect"] = ("refused", "it is in another cgroup than planned")

    return then


def became(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    other = stage.program("y/something")
    actor = _victim(stage, "became another program", "--become", other)

    def then(items: dict[int, dict[str, Any]]) -> None:
        turn(actor.pid, other)
        items[actor.pid]["expect"] = ("refused", "it runs another program than planned")

    return then


def changed_job(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    """It is another dead job's now: its old plan says nothing about that one."""
    other = stage.job(f"j{len(stage.actors)}", False)
    steps = [f"--with {name}={value}".split(" ", 1) for name, value in other.items()]
    words = [word for step in steps for word in step]
    actor = _victim(stage, "became another job's", "--become", stage.holder, *words)

    def then(items: dict[int, dict[str, Any]]) -> None:
        wanted = os.fsencode(other["RIGBOOK_JOB"])
        os.kill(actor.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while wanted not in Path(f"/proc/{actor.pid}/environ").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        items[actor.pid]["expect"] = ("refused", "nothing says any more that it belongs to the job")

    return then


def turn(pid: int, program: str) -> None:
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while os.readlink(f"/proc/{pid}/exe") != program:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def revived(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    mark = stage.job(f"z{len(stage.actors)}", False)
    actor = _victim(stage, "its job runs again", mark=mark)

    def then(items: dict[int, dict[str, Any]]) -> None:
        stage.lock(mark["RIGBOOK_JOB"])
        items[actor.pid]["expect"] = ("refused", "it is live now: its job is running")

    return then


def ended(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    actor = _victim(stage, "ended by itself")
    actor.dies = True

    def then(items: dict[int, dict[str, Any]]) -> None:
        stage.kill(actor.pid)
        for process in stage.spawned:
            process.poll()
        items[actor.pid]["expect"] = ("gone", "it had ended before")

    return then


def newcomer(stage: Stage) -> Callable[[dict[int, dict[str, Any]]], None]:
    """An orphan that comes after the plan was made is not in it."""

    def then(items: dict[int, dict[str, Any]]) -> None:
        _victim(stage, "newcomer")

    return then


EVENTS = {
    "pid_reused": pid_reused,
    "other_boot": other_boot,
    "other_namespace": other_namespace,
    "moved": moved,
    "became": became,
    "changed_job": changed_job,
    "revived": revived,
    "ended": ended,
    "newcomer": newcomer,
}


# -- the product, in this process ----------------------------------------------------------------------------------


class Probe:
    """The probe's own functions, called here."""

    async def call(self, name: str, **args: Any) -> Any:
        module, function = program.CALLS[name].split(".")
        __import__("remote.probe." + module)
        work = getattr(sys.modules["remote.probe." + module], function)
        return json.loads(json.dumps(work(**args)))

    async def __aenter__(self) -> Probe:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Link:
    name = "here"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def probe(self) -> Probe:
        return Probe()

    open_probe = probe

    async def state_dir(self) -> str:
        return str(self.folder)


def chosen(seed: int) -> tuple[list[str], list[str]]:
    """The actors and events of a scenario."""
    choice = random.Random(seed * 7919)
    actors = choice.choices(sorted(ACTORS), k=choice.randrange(4, 9))
    if choice.random() < 0.25:
        actors.append("container")
    if choice.random() < 0.25:
        actors.append("ourselves")
    return actors, choice.choices(sorted(EVENTS), k=choice.randrange(1, 4))


async def play(folder: Path, holder: str, seed: int) -> str:
    """Run one scenario; what went wrong, or nothing."""
    stage = Stage(folder, holder, seed)
    try:
        actors, events = chosen(seed)
        for name in actors:
            {**ACTORS, "container": container, "ourselves": ourselves}[name](stage)
        thens = [EVENTS[name](stage) for name in events]
        link: Any = Link(stage.folder)
        plan = await cleanup.plan(link, interpreters=[stage.python])
        kinds = await _kinds(link, stage)
        for actor in stage.actors:
            if actor.kind is not None and kinds.get(actor.pid) != actor.kind:
                return f"{actor.name} is {kinds.get(actor.pid)}, not {actor.kind}"
        planned = {item.pid for item in plan.items}
        wanted = {actor.pid for actor in stage.actors if actor.kind in ("orphan", "unclaimed")}
        if planned != wanted:
            return f"planned {planned}, not {wanted}"
        total = {gpu: sum(actor.vram.get(gpu, 0) for actor in stage.actors) for gpu in range(GPUS)}
        for gpu in plan.gpus:
            at = int(gpu.uuid[4:12], 16)
            mine = sum(actor.vram.get(at, 0) for actor in stage.actors if actor.pid in planned)
            if (gpu.used, gpu.held, gpu.others) != (total[at], mine, total[at] - mine):
                return f"GPU {at} is planned as {gpu}, not {total[at]} with {mine}"
        items = {item.pid: {"starttime": item.starttime} for item in plan.items}
        for then in thens:
            then(items)
        keys = ("boot_id", "pid_namespace")
        told = tuple(
            replace(item, **{key: items[item.pid][key] for key in keys if key in items[item.pid]})
            for item in plan.items
        )
        expected = {pid: entry["expect"] for pid, entry in items.items() if "expect" in entry}
        outcome = await cleanup.apply(link, replace(plan, items=told), grace=0.1, memory_wait=2.0)
        for process in outcome.processes:
            want = expected.get(process["pid"])
            if want and (process["outcome"], process["reason"]) != want:
                return f"pid {process['pid']}: {process['outcome']} ({process['reason']}), not {want}"
        for actor in stage.actors:
            if actor.alive() == actor.dies:
                return f"{actor.name} (pid {actor.pid}) is {'alive' if actor.alive() else 'dead'}"
        family = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _marked(p, stage, "pool")]
        if family:
            return f"a respawned worker lives: {family}"
        refused = any(entry["expect"][0] == "refused" for entry in items.values() if "expect" in entry)
        left = any(actor.name in ("pid reused", "stale boot_id") for actor in stage.actors)
        if outcome.verified == (refused or left) or outcome.refused != refused:
            return f"verified {outcome.verified}, refused {outcome.refused}: {outcome.describe()}"
        for record in outcome.gpus:
            at = int(record["uuid"][4:12], 16)
            alive = sum(actor.vram.get(at, 0) for actor in stage.actors if actor.alive())
            if record["used_after"] != alive:
                return f"the proof says {record['used_after']} for GPU {at}, not {alive}"
        return ""
    finally:
        stage.end()


def _marked(pid: int, stage: Stage, word: str) -> bool:
    try:
        return f"RIGBOOK_JOB_DIR={stage.folder}/jobs/{word}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


async def _kinds(link: Any, stage: Stage) -> dict[int, str]:
    seen = await cleanup.scan(await link.probe(), f"{stage.folder}/jobs", [stage.python])
    return {entry["pid"]: entry["class"] for entry in seen["processes"]}


def without(rule: str) -> None:
    """Take one rule out of its table."""
    from remote.probe import classes, reclaim

    table, _, name = rule.partition(":")
    rules = getattr(reclaim if table == "CHANGES" else classes, table)
    kept = [entry for entry in rules if entry[0] != name]
    assert len(kept) == len(rules) - 1, rule
    rules[:] = kept


def main() -> None:
    folder, holder = Path(sys.argv[1]), sys.argv[2]
    words = sys.argv[3:]
    cleanup.AGAIN_S, cleanup.SETTLE_S = 0.01, 0.5
    from remote.probe import nvml

    nvml.load(ship.pynvml())
    rules: list[str] = [""]
    if "--without" in words:
        at = words.index("--without")
        words, rules = words[:at], words[at + 1 :]
    seeds = list(map(int, words))
    for rule in rules:
        # Each rule in a process of its own, which has it taken out for good.
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        if rule:
            without(rule)
        for seed in seeds:
            began = time.monotonic()
            try:
                if os.environ.get("PROFILE"):
                    import cProfile

                    cProfile.runctx("asyncio.run(play(folder, holder, seed))", globals(), locals(), sort="cumtime")
                problem = asyncio.run(play(folder, holder, seed))
            except AssertionError as error:
                problem = f"the scenario itself: {error!r}" if not rule else f"assertion {error!r}"
            took = round(time.monotonic() - began, 2)
            print(json.dumps({"seed": seed, "rule": rule, "problem": problem, "seconds": took}), flush=True)
            if rule and problem:
                break
        os._exit(0)


if __name__ == "__main__":
    main()
