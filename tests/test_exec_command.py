"""`rigbook exec` and `rigbook do` beyond one command on one host: scripts, sudo, limits, many hosts, a cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.result import Result
from remote.scripts import sudo_refusal
from state.book import open_book
from tests.lab import rigs
from tests.test_rig_commands import rigbook

ACTIONS = """
[actions.look]
host = "llm"
run = ["sh", "-c", "echo looked; exit 3"]
[actions.slow]
host = "llm"
run = ["sh", "-c", "echo begun; exec sleep 60"]
[actions.late]
host = "llm"
run = ["sleep", "60"]
timeout = 0.5
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("project")
    with rigs.played(root, {"llm": "lxc", "vm": "vm"}):
        hosts = rigs.host("llm") + rigs.host("vm")
        (root / "rigbook.toml").write_text(f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{hosts}{ACTIONS}')
        yield root


def test_a_script_runs_by_its_own_interpreter(root: Path, tmp_path: Path) -> None:
    def script(text: bytes, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        (tmp_path / "script").write_bytes(text)
        return rigbook(root, "exec", "llm", "--script", str(tmp_path / "script"), "--", *arguments, input=input)

    odd = ["a b", "it's", "$HOME", "new\nline", "-n", "--"]
    done = script(b'printf "%s|" "$@"; cat; exit 7', *odd, input=b"in")
    assert (done.returncode, done.stdout) == (7, "|".join([*odd, ""]).encode() + b"in")
    python = b"#!/usr/bin/env python3\nimport sys\nprint(sys.argv[1:], sys.stdin.read())\nsys.exit(5)\n"
    done = script(python, "x y", input=b"in")
    assert (done.returncode, done.stdout) == (5, b"['x y'] in\n"), done.stderr
    done = script(b"#!/bin/bash -e\necho ${BASH_VERSION:+bash}\nfalse\necho not here")
    assert (done.returncode, done.stdout) == (1, b"bash\n")
    big = b"#!/bin/sh\n" + b"# filler \xff\n" * 30_000 + b"echo end"
    assert script(big).stdout == b"end\n", "longer than an argument may be, and not UTF-8"
    done = rigbook(root, "exec", "llm", "--script", "-", input=b"ps -o args= -p $$ | grep -c secret")
    assert done.stdout == b"0\n", "what a script says does not show in ps"
    missing = rigbook(root, "exec", "llm", "--script", "no/such")
    assert missing.returncode == 2 and b"exec.no-script" in missing.stderr


def test_output_is_cut_at_the_limit_and_it_is_said(root: Path) -> None:
    done = rigbook(root, "exec", "llm", "--limit", "1000", "--", "sh", "-c", "yes | head -c 5000; echo err >&2; exit 4")
    assert (done.returncode, done.stdout) == (4, b"y\n" * 500)
    assert (
        b"stdout was cut after 1000 bytes; 4000 more were dropped" in done.stderr and b"stderr was" not in done.stderr
    )
    row = json.loads(rigbook(root, "--json", "exec", "llm", "--limit", "3", "--", "printf", "a\\377bcd").stdout)
    assert (row["stdout"], row["stdout_base64"], row["stdout_dropped"], row["stderr_dropped"]) == (
        "a\\xffb",
        "Yf9i",
        2,
        0,
    )


def test_many_hosts_end_in_a_table_or_in_lines(root: Path) -> None:
    command = ["sh", "-c", 'test "$RIGBOOK_PLAYED_HOST" = llm || exit 9']
    done = rigbook(root, "exec", "--all", "--", *command)
    assert done.returncode == 9
    text = done.stderr.decode()
    assert "vm    exit code 9" in text and "1 of 2 succeeded" in text
    lines = rigbook(root, "--json", "exec", "llm", "vm", "llm", "--", *command).stdout.splitlines()
    assert {row["host"]: row["code"] for row in map(json.loads, lines)} == {"llm": 0, "vm": 9} and len(lines) == 2
    assert rigbook(root, "exec", "--all", "llm", "--", "true").returncode == 2


def test_the_first_failure_gives_the_others_up(root: Path) -> None:
    command = ["sh", "-c", 'test "$RIGBOOK_PLAYED_HOST" = llm && exit 9; exec sleep 60']
    done = rigbook(root, "exec", "--all", "--first-failure", "--", *command)
    assert done.returncode == 9 and b"given up, since it failed on llm" in done.stderr
    rows = rigbook(root, "--json", "exec", "--all", "--first-failure", "--", *command).stdout.splitlines()
    ended = {row["host"]: row for row in map(json.loads, rows)}
    assert ended["vm"]["state"] == "unknown" and ended["vm"]["error"]["id"] == "exec.given-up"


@pytest.mark.report(17)
def test_what_a_login_shell_would_find_is_told(tmp_path: Path) -> None:
    with rigs.sshd() as server:
        user = next(iter(server.users))
        home = server.users[user]
        if os.geteuid() != 0:
            pytest.skip("start-up files of a user of our own need root")
        tools = home / "tools"
        tools.mkdir()
        (tools / "my-nvcc").write_text("#!/bin/sh\necho cuda\n")
        (tools / "my-nvcc").chmod(0o755)
        (home / ".profile").write_text("echo Welcome; PATH=$HOME/tools:$PATH\n")
        server.project(user)
        (server.root / "rigbook.toml").write_text(
            '[project]\nname = "lab"\nssh_config = "ssh_config"\n[hosts.box]\nkind = "linux"\nssh = "box"\n'
        )
        done = rigbook(server.root, "exec", "box", "--", "my-nvcc")
        assert done.returncode == 127 and f"a login shell finds {tools}/my-nvcc".encode() in done.stderr
        done = rigbook(server.root, "exec", "box", "--", "no-such-tool")
        assert done.returncode == 127 and b"nor in that of a login shell" in done.stderr
        (home / "plain").write_text("x")
        done = rigbook(server.root, "exec", "box", "--", "./plain")
        assert done.returncode == 126 and b"chmod +x" in done.stderr
        assert rigbook(server.root, "exec", "box", "--", "sh", "-c", "exit 127").stderr == b""


@pytest.mark.report(18)
@pytest.mark.skipif(shutil.which("sudo") is None or os.geteuid() != 0, reason="needs sudo, and root to make users")
def test_sudo_is_refused_at_once_with_its_reason() -> None:
    with rigs.sshd() as server:
        user = next(iter(server.users))
        server.project(user)
        (server.root / "rigbook.toml").write_text(
            '[project]\nname = "lab"\nssh_config = "ssh_config"\n[hosts.box]\nkind = "linux"\nssh = "box"\n'
        )
        user = server.users[user].owner()
        rule = Path(f"/etc/sudoers.d/{user}")
        try:
            for rules in ("", f"{user} ALL=(root) ALL\n", f"{user} ALL=(root) NOPASSWD: /bin/true\n"):
                rule.write_text(rules)
                rule.chmod(0o440)
                done = rigbook(server.root, "exec", "box", "--sudo", "--timeout", "20", "--", "id", "-u")
                assert done.returncode == 1 and b"error[exec.sudo-refused]" in done.stderr, (rules, done.stderr)
                assert done.stdout == b"" and b"NOPASSWD" in done.stderr
            rule.write_text(f"{user} ALL=(root) NOPASSWD: ALL\n")
            done = rigbook(server.root, "exec", "box", "--sudo", "--", "id", "-u")
            assert done.stdout == b"0\n", done.stderr
            done = rigbook(server.root, "exec", "box", "--sudo", "--", "sh", "-c", "cat; exit 1", input=b"in")
            assert (done.returncode, done.stdout) == (1, b"in") and b"sudo-refused" not in done.stderr
            done = rigbook(server.root, "exec", "box", "--sudo", "--script", "-", "--", "x", input=b'id -u; echo "$1"')
            assert done.stdout == b"0\nx\n"
        finally:
            rule.unlink(missing_ok=True)


def test_what_a_command_says_is_not_taken_for_sudo() -> None:
    def refusal(exit: int, err: bytes, out: bytes = b"") -> str | None:
        return sudo_refusal(Result("exited", exit, stdout=out, stderr=err))

    assert refusal(1, b"sudo: a password is required\n") == "a password is required"
    assert refusal(1, b"Sorry, user x is not allowed to execute '/bin/ls' as root on y.\n")
    assert refusal(127, b"/bin/sh: 1: exec: sudo: not found\n") == "there is no sudo on this host"
    assert refusal(1, b"ls: cannot access 'x'\n") is None
    assert refusal(1, b"sudo: a password is required\n", b"output") is None
    assert refusal(2, b"sudo: a password is required\n") is None


def actions(root: Path) -> list[tuple[str, str, int | None]]:
    return [(run.name, run.status, run.exit) for run in open_book(root).runs.values() if run.what == "action"]


def test_an_action_is_recorded_however_it_ends(root: Path) -> None:
    dry = json.loads(rigbook(root, "--json", "--dry-run", "do", "late").stdout)
    assert (dry["dry_run"], dry["timeout"]) == (True, 0.5) and actions(root) == []
    told = json.loads(rigbook(root, "--json", "--yes", "do", "look").stdout)
    assert (told["code"], told["stdout"], told["action"]) == (3, "looked\n", "look")
    assert rigbook(root, "--yes", "do", "late").returncode == 124
    assert actions(root) == [("look", "failed", 3), ("late", "failed", None)]

    def begin() -> subprocess.Popen[bytes]:
        # Who runs the tests in the background ignores SIGINT, and hands that on.
        env = ["env", "--default-signal=INT"]
        command = [*env, sys.executable, "-m", "tui.cli.main", "-C", str(root), "--yes", "do", "slow"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        assert process.stdout and process.stdout.readline() == b"begun\n"
        return process

    interrupted = begin()
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(30) == 130
    assert actions(root)[-1] == ("slow", "lost", None)
    killed = begin()
    killed.kill()
    killed.wait()
    assert actions(root)[-1] == ("slow", "running", None)
    assert rigbook(root, "--yes", "do", "look").returncode == 3
    assert actions(root)[-2:] == [("slow", "lost", None), ("look", "failed", 3)]


@pytest.mark.parametrize("hosts", [["box"], ["box", "again"]], ids=["one", "two"])
def test_ctrl_c_ends_the_command_there(hosts: list[str]) -> None:
    script = "echo $$; exec sleep 60"
    env = ["env", "--default-signal=INT"]
    with rigs.sshd() as box:
        box.project(next(iter(box.users)))
        text = '[project]\nname = "lab"\nssh_config = "ssh_config"\n'
        text += "".join(f'[hosts.{name}]\nkind = "linux"\nssh = "box"\n' for name in hosts)
        (box.root / "rigbook.toml").write_text(text)
        words = ["-C", str(box.root), "exec", *hosts, "--", "sh", "-c", script]
        command = [*env, sys.executable, "-m", "tui.cli.main", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert process.stdout
        pids = [int(process.stdout.readline().split()[-1]) for _ in hosts]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130 and b"interrupted" in errors and b"Traceback" not in errors
        rigs.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
