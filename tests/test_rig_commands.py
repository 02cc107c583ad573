"""The rig's commands as a user types them: data on stdout, talk on stderr, and the exit codes that are promised."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote import demo_rig
from remote.probe import procs
from state.book import open_book
from tests.lab import rigs
from tests.test_clean import LAUNCHER, WORKER

ACTIONS = '[actions.look]\nhost = "llm"\nrun = ["sh", "-c", "echo looked; exit 3"]\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("project")
    with rigs.played(root, {"llm": "lxc", "vm": "vm"}):
        hosts = rigs.host("llm") + rigs.host("vm")
        (root / "rigbook.toml").write_text(f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{hosts}{ACTIONS}')
        yield root


def rigbook(root: Path, *words: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tui.cli.main", "-C", str(root), *words]
    return subprocess.run(command, input=input, capture_output=True, timeout=90)


def test_exec_is_exact(root: Path) -> None:
    done = rigbook(
        root, "exec", "llm", "--", "sh", "-c", "cat; printf 'a\\377b'; echo 'x  y' >&2; exit 42", input=b"in "
    )
    assert (done.returncode, done.stdout, done.stderr) == (42, b"in a\xffb", b"x  y\n")
    assert rigbook(root, "exec", "llm", "--", "sh", "-c", "kill -TERM $$").returncode == 143
    assert rigbook(root, "exec", "llm", "--", "printf", "%s|", "--", "--json", "-C").stdout == b"--|--json|-C|"
    late = rigbook(root, "exec", "--timeout", "0.5", "llm", "--", "sleep", "100")
    assert late.returncode == 124 and b"0.5 s" in late.stderr
    assert rigbook(root, "exec", "llm", "true").returncode == 2
    unknown = rigbook(root, "exec", "nowhere", "--", "true")
    assert unknown.returncode == 2 and b"llm, vm" in unknown.stderr


def test_exec_on_several_hosts(root: Path) -> None:
    done = rigbook(root, "exec", "llm", "vm", "--", "sh", "-c", 'echo $RIGBOOK_PLAYED_HOST; test "$USER" = x')
    assert sorted(done.stdout.splitlines()) == [b"llm: llm", b"vm: vm"] and done.returncode == 1
    both = [json.loads(line) for line in rigbook(root, "--json", "exec", "llm", "vm", "--", "pwd").stdout.splitlines()]
    assert {row["host"]: row["stdout"].strip() for row in both} == {h: str(root / h / "home") for h in ("llm", "vm")}


def test_exec_imports_neither_toolkit_nor_torch(root: Path) -> None:
    code = (
        "import sys; from tui.cli.main import run\n"
        "try: run(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(sorted({'textual','torch','transformers','jinja2','httpx','paramiko'} & set(sys.modules)))"
    )
    words = ["-C", str(root), "exec", "llm", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.stdout == b"[]\n", done.stderr


def test_hosts_and_probe(root: Path) -> None:
    rows = json.loads(rigbook(root, "--json", "hosts").stdout)
    assert [(row["host"], row["state"], row["route"]) for row in rows] == [
        ("llm", "answers", "ssh"),
        ("vm", "answers", "ssh"),
    ]
    assert rigbook(root, "probe").returncode == 0
    facts = {row["key"] for row in json.loads(rigbook(root, "probe", "llm", "--json").stdout)}
    assert "hosts.llm.hw.cores" in facts and not any(key.startswith("hosts.vm") for key in facts)


def test_put_and_get(root: Path, tmp_path: Path) -> None:
    data = os.urandom(700_001)
    (tmp_path / "a b").write_bytes(data)
    assert rigbook(root, "put", "llm", str(tmp_path / "a b"), "~/it's here").returncode == 0
    assert (root / "llm" / "home" / "it's here").read_bytes() == data
    assert rigbook(root, "get", "llm", "~/it's here", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == data
    missing = rigbook(root, "get", "llm", "~/nothing", str(tmp_path / "back"))
    assert missing.returncode == 1 and b"error[file.not-found]" in missing.stderr
    assert (tmp_path / "back").read_bytes() == data, "a failed copy leaves what was there"
    tree = tmp_path / "tree" / "sub"
    tree.mkdir(parents=True)
    (tree / "x").write_bytes(b"x")
    assert rigbook(root, "put", "llm", str(tmp_path / "tree"), "~/tree").returncode == 0
    assert (root / "llm" / "home" / "tree" / "sub" / "x").read_bytes() == b"x"


def test_an_action_is_shown_asked_for_and_recorded(root: Path) -> None:
    dry = rigbook(root, "do", "look", "--dry-run")
    assert dry.returncode == 0 and b"looked" not in dry.stdout
    assert rigbook(root, "do", "look").returncode == 3
    done = rigbook(root, "do", "look", "--yes")
    assert (done.returncode, done.stdout) == (3, b"looked\n")
    (run,) = [run for run in open_book(root).runs.values() if run.what == "action"]
    assert (run.name, run.status, run.exit) == ("look", "failed", 3)


def test_jobs_from_start_to_stop(root: Path) -> None:
    started = rigbook(root, "jobs", "start", "vm", "--id", "j1", "--", "sh", "-c", "echo one; exec sleep 1000")
    assert (started.returncode, started.stdout) == (0, b"j1\n")
    same = ("jobs", "start", "vm", "--id", "j1", "--", "sh", "-c", "echo one; exec sleep 1000")
    assert rigbook(root, *same).stdout == b"j1\n", "the same job"
    other = rigbook(root, "jobs", "start", "vm", "--id", "j1", "--", "sh", "-c", "true")
    assert other.returncode == 3 and b"job.other-command" in other.stderr and not other.stdout
    (job,) = json.loads(rigbook(root, "--json", "jobs", "list", "--running").stdout)
    assert (job["id"], job["host"], job["state"]) == ("j1", "vm", "running")
    rigs.until(lambda: rigbook(root, "jobs", "logs", "j1").stdout == b"one\n", every=0.2)
    assert rigbook(root, "--json", "jobs", "logs", "j1").stdout == b'{"line": "one"}\n'
    assert rigbook(root, "jobs", "stop", "j1").returncode == 3, "unattended it is not assumed"
    stopped = json.loads(rigbook(root, "--json", "--yes", "jobs", "stop", "j1", "--grace", "2").stdout)
    assert (stopped["state"], stopped["signal"], stopped["stopped"]) == ("finished", "TERM", True)
    assert rigbook(root, "jobs", "wait", "j1").returncode == 143
    assert b"j1" in rigbook(root, "jobs", "show", "j1").stdout
    assert rigbook(root, "jobs", "show", "j2").returncode == 1


def test_clean_plans_then_applies_exactly_that(root: Path) -> None:
    assert rigbook(root, "clean").returncode == 0
    port = rigs.free_port()
    place = root / "llm" / "home"
    (place / "worker.py").write_text(WORKER)
    command = [sys.executable, "-c", LAUNCHER, str(port)]
    rigbook(root, "jobs", "start", "llm", "--id", "crash", "--cwd", str(place), "--", *command)
    rigs.until(lambda: b"ready" in rigbook(root, "jobs", "logs", "crash").stdout, every=0.2)
    job = json.loads(rigbook(root, "--json", "jobs", "show", "crash").stdout)
    for pid in (job["supervisor"], job["pid"]):
        os.kill(pid, signal.SIGKILL)
    rigs.until(lambda: rigbook(root, "clean").returncode == 6, every=0.2)
    plans = json.loads(rigbook(root, "--json", "clean").stdout)
    (plan,) = [plan for plan in plans if plan["items"]]
    assert plan["items"][0]["ports"] == [port] and (root / ".rigbook" / "plans" / f"{plan['id']}.json").exists()
    assert rigbook(root, "clean", "--apply", "clean-0000000000").returncode == 2
    assert rigbook(root, "--dry-run", "clean", "--apply", plan["id"]).returncode == 0
    worker = plan["items"][0]
    assert procs.alive(worker["pid"], worker["starttime"])
    applied = rigbook(root, "--json", "clean", "--apply", plan["id"])
    (outcome,) = json.loads(applied.stdout)
    assert applied.returncode == 0 and outcome["verified"] and outcome["ports_free"] == [port]
    assert rigbook(root, "clean").returncode == 0
    assert [p.verified for p in open_book(root).plans.values()] == [True]


def test_a_shell_has_a_terminal(root: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tui.cli.main", "-C", str(root), "shell", "llm"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    text, typed, deadline = b"", False, time.monotonic() + 30
    with contextlib.suppress(OSError):  # EIO: the other end is closed, so the shell has ended
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.5)[0]:
                text += os.read(master, 4096)
            if text and not typed:  # the prompt
                typed = bool(os.write(master, b"tty && echo home=$HOME; exit 7\n"))
    assert process.wait(10) == 7
    assert b"/dev/pts/" in text and f"home={root}/llm/home".encode() in text
    os.close(master)


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    with rigs.played(tmp_path, {"llm": "lxc"}):
        (tmp_path / "rigbook.toml").write_text(
            f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{rigs.host("llm")}'
        )
        rigbook(tmp_path, "jobs", "start", "llm", "--id", "far", "--", "true")
        demo_rig.stop(tmp_path)
        assert rigbook(tmp_path, "exec", "llm", "--", "true").returncode == 255
        (row,) = json.loads(rigbook(tmp_path, "--json", "hosts").stdout)
        assert (row["state"], row["route"], row["target"]) == ("unreachable", "ssh", "llm")
        for words in (["hosts"], ["probe"], ["jobs", "list"], ["jobs", "wait", "far"], ["clean"]):
            done = rigbook(tmp_path, *words)
            assert done.returncode == 4, (words, done)
            assert b"Traceback" not in done.stderr
