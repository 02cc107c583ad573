"""What the clean-up and the ownership map do on a real GPU, driven by rigbook's own commands on the `local` route.

    python tests/gpu/run_all.py --out DIR [--serve-env /opt/serve/env.sh] [--model DIR] [--only NAME,…] [--no-server]

Needs one idle NVIDIA GPU, torch in `--python` (default: ours), and for the server scenarios SGLang in the environment
that `--serve-env` sets up. Every scenario has its own time limit; one that fails does not stop the next. DIR gets at
most eight files, with paths, UUIDs and names of the machine replaced: summary.json (what held and what was measured),
numbers.md, and a recording for each group. Exit code 1 when something that must hold did not.

`--stand-in` runs the same on a machine without a GPU (tests/lab/gpu_machine.py): that is how these scripts are tested.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
MIB = 1 << 20
PORT = 30000


class Failed(Exception):
    """Something that must hold did not."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Failed(what)


class Bench:
    """A project on this machine, the command, and what is written down."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.root = Path(tempfile.mkdtemp(prefix="rigbook-gpu-"))
        paths = ":".join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
        self.env = {
            **os.environ,
            "PYTHONPATH": paths,
            "COLUMNS": "80",
            **({"STAND_IN": "1"} if args.stand_in else {}),
        }
        (self.root / "rigbook.toml").write_text(
            '[project]\nname = "gpu-tests"\n[hosts.here]\nkind = "local"\n'
            f'state_dir = "{self.root}/state"\n[envs.work]\nhost = "here"\npython = "{args.python}"\n'
        )
        self.records: dict[str, list[str]] = {}
        self.numbers: dict[str, Any] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.group = ""
        self.errors = (self.root / "errors.txt").open("wb")

    # -- words ---------------------------------------------------------------------------------------------------

    def write(self, title: str, text: str) -> None:
        self.records.setdefault(self.group, []).append(f"## {title}\n{text.rstrip()}\n")

    def rigbook(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "tui.cli.main", "-C", str(self.root), *words],
            env=self.env,
            cwd=REPO,
            capture_output=True,
            timeout=180,
        )
        text = done.stdout.decode("utf-8", "replace")
        errors = done.stderr.decode("utf-8", "replace")
        self.write("rigbook " + " ".join(words) + f"   (exit code {done.returncode})", text + errors)
        return done.returncode, text

    def look(self) -> dict[str, Any]:
        code, text = self.rigbook("gpus", "--json")
        must(code == 0, "rigbook gpus works")
        host: dict[str, Any] = json.loads(text)["hosts"][0]
        must(host["state"] == "ok", f"NVML works: {host['state']} {host['reason']}")
        return dict(host["gpus"][0])

    def used(self) -> int:
        return int(self.look()["memory"]["used"])

    def plan(self) -> dict[str, Any]:
        code, text = self.rigbook("clean", "--json")
        (plan,) = json.loads(text)
        must(code == (6 if plan["items"] else 0), f"clean exits 6 with a plan and 0 without, not {code}")
        return dict(plan)

    def apply(self, plan: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        code, text = self.rigbook("clean", "--apply", plan["id"], "--yes", "--json")
        (outcome,) = json.loads(text)
        outcome["command_seconds"] = round(time.monotonic() - began, 2)
        outcome["exit_code"] = code
        return dict(outcome)

    def state(self, title: str) -> None:
        """The machine as the usual tools see it."""
        text = _said(["ps", "-eo", "pid,ppid,pgid,sid,stat,args", "--forest"])
        wanted = ("workload", "spawn_main", "sglang", "stand_in", "resource_tracker", "supervisor", "PPID")
        lines = [line[:300] for line in text.splitlines() if any(word in line for word in wanted)]
        smi = _said(["nvidia-smi", "--query-compute-apps=pid,process_name,used_gpu_memory", "--format=csv"])
        smi += _said(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"])
        self.write(title, "\n".join(lines) + "\n" + smi)

    # -- processes -----------------------------------------------------------------------------------------------

    def workload(self, *words: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Start workload.py outside of rigbook, as somebody would by hand: no mark, a session of its own."""
        argv = [self.args.python, str(HERE / "workload.py"), *words]
        process = subprocess.Popen(
            argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )
        self.started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().decode().split()
        must(line and line[0] == "ready", f"workload {words} came up: {line}")
        return process, [int(word) for word in line[1:]]

    def job(self, id: str, *argv: str) -> dict[str, Any]:
        code, _ = self.rigbook("jobs", "start", "here", "--id", id, "--", *argv)
        must(code == 0, f"job {id} starts")
        return self.show(id)

    def show(self, id: str) -> dict[str, Any]:
        code, text = self.rigbook("jobs", "show", id, "--json")
        must(code in (0, 6), f"job {id} is known")
        return dict(json.loads(text))

    def log(self, id: str) -> str:
        file = self.root / "state" / "jobs" / id / "out.log"
        return file.read_text("utf-8", "replace") if file.exists() else ""

    def server(self, id: str, *more: str) -> dict[str, Any]:
        """A serving server as a rigbook job."""
        if self.args.stand_in:
            argv = [sys.executable, str(HERE / "stand_in_server.py"), str(PORT), "4096"]
        else:
            words = [
                self.args.python,
                "-m",
                "sglang.launch_server",
                "--model-path",
                self.args.model,
                "--host",
                "127.0.0.1",
            ]
            words += ["--port", str(PORT), "--attention-backend", "triton", "--sampling-backend", "pytorch"]
            words += [
                "--grammar-backend",
                "none",
                "--mem-fraction-static",
                "0.3",
                "--max-running-requests",
                "64",
                *more,
            ]
            line = " ".join(map(_quote, words))
            argv = ["bash", "-c", f"unset PYTHONPATH; . {_quote(self.args.serve_env)} && exec {line}"]
        self.job(id, *argv)
        began = time.monotonic()
        over = self.root / "state" / "jobs" / id / "exit.json"
        until(lambda: health() == 200 or over.exists(), 300, f"server {id} is ready", 0.5)
        must(health() == 200, "the server is ready: " + self.log(id)[-800:])
        self.numbers[f"{id}: seconds to ready"] = round(time.monotonic() - began, 1)
        return self.show(id)

    def children(self, pid: int, name: str) -> int:
        for other in below(pid):
            # The kernel keeps 15 characters of a name.
            if name[:7] in _read(f"/proc/{other}/comm") or name in _read(f"/proc/{other}/cmdline"):
                return other
        raise Failed(f"the server has a {name}")

    def end(self) -> None:
        """Whatever a scenario left behind: only what this script started."""
        for process in self.started:
            for pid in [*below(process.pid), process.pid]:
                kill(pid)
            process.wait()
            if process.stdout:
                process.stdout.close()
        self.started.clear()
        jobs = self.root / "state" / "jobs"
        for start in jobs.glob("*/start.json") if jobs.exists() else ():
            self.rigbook("jobs", "stop", start.parent.name, "--grace", "3")


def _quote(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _said(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, timeout=30).stdout.decode("utf-8", "replace")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def below(pid: int) -> list[int]:
    text = _read(f"/proc/{pid}/task/{pid}/children")
    found = []
    for task in os.listdir(f"/proc/{pid}/task") if os.path.exists(f"/proc/{pid}/task") else ():
        text = _read(f"/proc/{pid}/task/{task}/children")
        for child in map(int, text.split()):
            found += [child, *below(child)]
    return found


def alive(pid: int) -> bool:
    stat = _read(f"/proc/{pid}/stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] not in "ZX"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(what: Callable[[], object], seconds: float, name: str, every: float = 0.1) -> float:
    began = time.monotonic()
    while not what():
        must(time.monotonic() - began < seconds, f"within {seconds:g} s: {name}")
        time.sleep(every)
    return time.monotonic() - began


def health(path: str = "/health", timeout: float = 5.0) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def generate() -> int:
    body = json.dumps({"text": "The", "sampling_params": {"max_new_tokens": 8}}).encode()
    ask = urllib.request.Request(f"http://127.0.0.1:{PORT}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(ask, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


# -- scenarios ------------------------------------------------------------------------------------------------------


def check_clean(bench: Bench, plan: dict[str, Any], pids: list[int], name: str) -> None:
    """A plan names exactly these; carried out, they and their memory are gone."""
    must(sorted(item["pid"] for item in plan["items"]) == sorted(pids), f"the plan names {pids}: {plan['items']}")
    outcome = bench.apply(plan)
    must(outcome["exit_code"] == 0 and outcome["verified"], f"given back and proved: {outcome}")
    must(not any(map(alive, pids)), "all of them are gone")
    for process in outcome["processes"]:
        bench.numbers[f"{name}: {process['outcome']}, seconds"] = process["seconds"]
    for gpu in outcome["gpus"]:
        bench.numbers[f"{name}: seconds from the last end to memory back"] = gpu["seconds"]
        bench.numbers[f"{name}: MiB before -> after"] = f"{gpu['used_before'] // MIB} -> {gpu['used_after'] // MIB}"


def baseline(bench: Bench) -> None:
    """On a machine where nothing is wrong `clean` changes nothing and exits 0."""
    gpu = bench.look()
    bench.write("nvidia-smi", _said(["nvidia-smi"]))
    bench.numbers["idle: used MiB"] = gpu["memory"]["used"] // MIB
    bench.rigbook("gpus")
    must(bench.plan()["items"] == [], "nothing to give back")


def pool(bench: Bench) -> None:
    """The recording's orphans: two workers of a spawn pool whose parent was killed."""
    launcher, workers = bench.workload("pool", "2048", "2")
    bench.state("live")
    must(bench.plan()["items"] == [], "a live pool is in no plan")
    before = bench.used()
    kill(launcher.pid)
    launcher.wait()
    time.sleep(1)
    bench.state("parent killed")
    must(all(map(alive, workers)), "the workers outlive their parent")
    must(bench.used() > before - 64 * MIB, "and hold their memory")
    bench.rigbook("gpus")
    plan = bench.plan()
    check_clean(bench, plan, workers, "orphan pool")
    bench.state("given back")
    must(bench.plan()["items"] == [], "nothing is left")


def deaf(bench: Bench) -> None:
    """A context held by a child that ignores SIGTERM, of a job whose launcher and supervisor were killed."""
    bench.job("deaf", bench.args.python, str(HERE / "workload.py"), "deaf", "1024")
    until(lambda: "ready" in bench.log("deaf"), 120, "the child holds")
    child = int(bench.log("deaf").split()[1])
    must(bench.plan()["items"] == [], "a live job is in no plan")
    crash(bench, "deaf")
    plan = bench.plan()
    must([item["kind"] for item in plan["items"]] == ["orphan"], "it is ours, and orphaned")
    check_clean(bench, plan, [child], "deaf child")


def crash(bench: Bench, id: str) -> None:
    """Kill supervisor and main process at once, as the kernel does when memory runs out."""
    job = bench.show(id)
    for pid in (job["supervisor"], job["pid"]):
        if pid:
            kill(int(pid["pid"] if isinstance(pid, dict) else pid))
    until(lambda: bench.show(id)["state"] == "vanished", 20, "the job has vanished")


def forked(bench: Bench) -> None:
    """A context whose opener is killed while a forked child keeps the files: does the memory stay, and who is named?"""
    process, (parent, child) = bench.workload("forked", "1024")
    bench.look()
    kill(parent)
    process.wait()
    time.sleep(1)
    gpu = bench.look()
    bench.state("opener killed, its forked child lives")
    bench.rigbook("gpus")
    bench.numbers["forked child: MiB still used"] = gpu["memory"]["used"] // MIB
    bench.numbers["forked child: how it is told"] = gpu["unattributed"] and gpu["unattributed"]["reason"]
    bench.numbers["forked child: NVML lists"] = [holder["pid"] for holder in gpu["holders"] if holder["used"]]
    must(any(holder["pid"] == child for holder in gpu["holders"]), "the child is named as a holder by its files")
    kill(child)
    until(lambda: not alive(child), 10, "the child is gone")


def attribution(bench: Bench) -> None:
    """Every byte that NVML calls used is somebody's, or is said to be nobody's."""
    bench.workload("pool", "1024", "3")
    gpu = bench.look()
    shares = sum(share for holder in gpu["holders"] for share in holder["used"].values() if share)
    rest = gpu["unattributed"]["bytes"] if gpu["unattributed"] else 0
    used = gpu["memory"]["used"]
    must(shares + rest == used, f"{shares} + {rest} == {used}")
    bench.numbers["three workers: attributed MiB"] = round(shares / MIB, 1)
    bench.numbers["three workers: NVML used MiB"] = round(used / MIB, 1)
    bench.numbers["three workers: unattributed MiB"] = round(rest / MIB, 1)
    bench.numbers["reserved MiB (not in used)"] = round((gpu["memory"]["reserved"] or 0) / MIB, 1)
    must(rest < 256 * MIB, "nearly all of it has an owner")


def cost(bench: Bench) -> None:
    """What looking costs, in the probe: 30 looks a second apart, holders every 5 s."""
    code = (
        "import asyncio, json, sys, pathlib\n"
        "from remote import gpus\nfrom remote.connect import Rig\nfrom state.project import load\n"
        "async def main():\n"
        "    project = load(pathlib.Path(sys.argv[1]))\n"
        "    async with Rig(project) as rig:\n"
        "        link = await rig.link('here')\n"
        "        await gpus.look(link, project)\n"
        "        rows = []\n"
        "        for _ in range(int(sys.argv[2])):\n"
        "            look = await gpus.look(link, project, max_age=gpus.HOLDERS_S)\n"
        "            rows.append(dict(look.cost))\n"
        "            await asyncio.sleep(1)\n"
        "        deep = await gpus.look(link, project, deep=True)\n"
        "        print(json.dumps({'rows': rows, 'deep': dict(deep.cost), 'gpus': len(deep.gpus)}))\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", code, str(bench.root), "5" if bench.args.stand_in else "30"]
    done = subprocess.run(argv, env=bench.env, cwd=REPO, capture_output=True, timeout=120)
    must(done.returncode == 0, done.stderr.decode("utf-8", "replace")[-500:])
    found = json.loads(done.stdout)
    rows = found["rows"]
    cpu = sum(row["cpu_seconds"] for row in rows) / len(rows)
    bench.numbers["cost: processes on the machine"] = sum(name.isdigit() for name in os.listdir("/proc"))
    bench.numbers["cost: GPUs"] = found["gpus"]
    bench.numbers["cost: percent of a core at 1 Hz"] = round(100 * cpu, 3)
    bench.numbers["cost: NVML read, ms (median)"] = round(1000 * sorted(row["nvml"] for row in rows)[len(rows) // 2], 2)
    bench.numbers["cost: a deep look, ms"] = round(1000 * found["deep"]["seconds"], 1)
    bench.write("rows", json.dumps(found))


def side_by_side(bench: Bench) -> None:
    """A server of ours that lives, beside orphans and a stranger: it answers throughout and keeps its memory."""
    job = bench.server("server-a")
    _, strangers = bench.workload("pool", "256", "1")
    launcher, orphans = bench.workload("pool", "1024", "2")
    kill(launcher.pid)
    launcher.wait()
    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(generate())
            time.sleep(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        time.sleep(1)
        bench.state("a live server, a stranger's pool, two orphans")
        bench.rigbook("gpus")
        plan = bench.plan()
        check_clean(bench, plan, orphans, "beside a server")
    finally:
        stop.set()
        asking.join()
    bench.numbers["beside a server: requests answered"] = f"{answers.count(200)} of {len(answers)}"
    must(len(answers) > 5 and set(answers) == {200}, f"every request was answered: {answers}")
    must(all(map(alive, strangers)), "the stranger was left alone")
    must(bench.show("server-a")["state"] == "running" and alive(int(job["pid"])), "the server lives")
    bench.rigbook("gpus")


def server_kill(bench: Bench, id: str, whom: str) -> None:
    """SIGKILL of one of a serving server's processes: what stays, for how long, and what clean-up makes of it."""
    if health() != 200:
        bench.server(id, "--disable-cuda-graph")
    job = bench.show(id)
    main = int(job["pid"])
    tree = [main, *below(main)]
    before = bench.used()
    bench.state(f"before SIGKILL of {whom}")
    began = time.monotonic()
    if whom == "parent":
        crash_at_once(job)
    else:
        kill(bench.children(main, whom))
    timeline = []
    back = None
    while time.monotonic() - began < 20:
        gpu = bench.look()
        now = time.monotonic() - began
        left = [pid for pid in tree if alive(pid)]
        timeline.append({"seconds": round(now, 1), "MiB": gpu["memory"]["used"] // MIB, "alive": len(left)})
        if back is None and gpu["memory"]["used"] < before / 4:
            back = now
        if not left and back is not None:
            break
        time.sleep(0.5)
    bench.write("timeline", "\n".join(map(str, timeline)))
    bench.numbers[f"server, {whom} killed: seconds to memory back by itself"] = None if back is None else round(back, 1)
    bench.numbers[f"server, {whom} killed: processes left after {timeline[-1]['seconds']} s"] = timeline[-1]["alive"]
    bench.state(f"after SIGKILL of {whom}")
    plan = bench.plan()
    left = [pid for pid in tree if alive(pid)]
    bench.numbers[f"server, {whom} killed: processes in the plan"] = len(plan["items"])
    if plan["items"]:
        must({item["pid"] for item in plan["items"]} <= set(left), "only what the server left behind is in the plan")
        outcome = bench.apply(plan)
        must(outcome["verified"], f"given back and proved: {outcome}")
    until(lambda: bench.used() < max(before / 4, 64 * MIB), 60, "the memory is back", 0.5)
    bench.rigbook("jobs", "stop", id, "--grace", "10")
    must(bench.plan()["items"] == [], "nothing is left")


def crash_at_once(job: dict[str, Any]) -> None:
    supervisor = job["supervisor"]
    for pid in (supervisor["pid"] if isinstance(supervisor, dict) else supervisor, job["pid"]):
        if pid:
            kill(int(pid))


SCENARIOS: dict[str, tuple[str, int, Callable[[Bench], None]]] = {
    "baseline": ("pool", 60, baseline),
    "pool": ("pool", 120, pool),
    "deaf": ("pool", 120, deaf),
    "forked": ("pool", 120, forked),
    "attribution": ("attribution", 120, attribution),
    "cost": ("attribution", 120, cost),
    "side_by_side": ("side_by_side", 400, side_by_side),
    "scheduler": ("kills", 200, lambda bench: server_kill(bench, "server-a", "scheduler")),
    "detokenizer": ("kills", 400, lambda bench: server_kill(bench, "server-b", "detokenizer")),
    "parent": ("kills", 400, lambda bench: server_kill(bench, "server-c", "parent")),
}
SERVER = {"side_by_side", "scheduler", "detokenizer", "parent"}
KEEPS = {"side_by_side"}  # its server is the next scenario's


def masked(text: str, bench: Bench) -> str:
    """Without what names this machine."""
    text = re.sub(r"(GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{27}", r"\1-11111111-2222-3333-4444-555555555555", text)
    for path, word in (
        (bench.root, "/project"),
        (REPO, "/rigbook"),
        (Path.home(), "~"),
        (Path(bench.args.out), "/out"),
    ):
        if str(path) != "/":
            text = text.replace(str(path), word)
    text = re.sub(r"/(?:tmp|var|opt|root|home|srv|workspace|mnt)/[\w./-]*?(python3?[\d.]*)\b", r"/opt/env/bin/\1", text)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?<!555555555555)", "BOOT-ID", text)
    return text.replace(os.uname().nodename, "machine") if len(os.uname().nodename) > 3 else text


def alarm(seconds: int) -> None:
    def late(*_: object) -> None:
        raise Failed(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch (and SGLang's, if served)")
    parser.add_argument("--serve-env", default="/opt/serve/env.sh")
    parser.add_argument("--model", default="/opt/serve/models/smollm2")
    parser.add_argument("--only", default="")
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds; scenarios that would begin later are skipped"
    )
    args = parser.parse_args()
    args.out = str(Path(args.out).resolve())
    os.makedirs(args.out, exist_ok=True)
    began, bench = time.monotonic(), Bench(args)
    results: dict[str, Any] = {}
    try:
        for name, (group, seconds, work) in SCENARIOS.items():
            if (args.only and name not in args.only.split(",")) or (args.no_server and name in SERVER):
                continue
            left = args.limit - (time.monotonic() - began)
            if left < 20:
                results[name] = {"result": "skipped", "why": "no time was left"}
                continue
            bench.group = group
            bench.write(f"---- {name}", (work.__doc__ or "").strip())
            at = time.monotonic()
            try:
                alarm(int(min(seconds, left)))
                work(bench)
                results[name] = {"result": "held"}
            except Failed as error:
                results[name] = {"result": "FAILED", "why": str(error)[:2000]}
            except Exception as error:
                results[name] = {"result": "FAILED", "why": f"{type(error).__name__}: {error}"}
                bench.write("traceback", traceback.format_exc())
            finally:
                signal.alarm(0)
            results[name]["seconds"] = round(time.monotonic() - at, 1)
            print(name, results[name], flush=True)
            if not (name in KEEPS and results[name]["result"] == "held"):
                bench.end()
            store(bench, results)
    finally:
        signal.alarm(0)
        bench.end()
        store(bench, results)
        shutil.rmtree(bench.root, ignore_errors=True)
    return int(any(result["result"] == "FAILED" for result in results.values()))


def store(bench: Bench, results: dict[str, Any]) -> None:
    out = Path(bench.args.out)
    version = _said(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).strip()
    summary = {"machine": version, "cores": os.cpu_count(), "scenarios": results, "numbers": bench.numbers}
    (out / "summary.json").write_text(masked(json.dumps(summary, indent=1), bench) + "\n")
    rows = [f"| {name} | {value} |" for name, value in bench.numbers.items()]
    (out / "numbers.md").write_text(masked("\n".join(["| what | value |", "| --- | --- |", *rows]), bench) + "\n")
    for group, parts in bench.records.items():
        if group:
            (out / f"{group}.txt").write_text(masked("\n".join(parts), bench)[-8_000_000:])


if __name__ == "__main__":
    sys.exit(main())
