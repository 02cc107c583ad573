"""`rigbook doctor` on real machines that have each fault: it names it, says what it saw, and what to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote import checks, shell
from remote.check_list import CHECKS
from remote.connect import Rig
from state.checks import HERE
from tests.lab import mounts, rigs
from tests.lab.systemd import PLAIN, SystemdHost, systemd_host
from tests.test_rig_commands import rigbook
from tui.cli.status import explanations

HOST = '[hosts.box]\nkind = "linux"\nssh = "box"\n'
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="users and mounts of our own need root")


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as server:
        yield server


def write(root: Path, hosts: str = HOST) -> Path:
    (root / "rigbook.toml").write_text(f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{hosts}')
    return root


def doctor(root: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """(exit code, what was found or found in order, by check)."""
    done = rigbook(root, "--json", "doctor", *words)
    assert b"Traceback" not in done.stderr and done.stdout, done.stderr
    return done.returncode, {row["check"]: row for row in json.loads(done.stdout)}


def bad(found: dict[str, Any]) -> set[str]:
    return {id for id, row in found.items() if row["state"] != "ok"}


def test_every_check_is_explained_once() -> None:
    known = explanations()
    for id, check in {**CHECKS, **HERE}.items():
        assert known[id] == check.text() and check.fix and check.explain, id


@needs_root
def test_what_is_a_note_does_not_fail(box: rigs.Sshd) -> None:
    """No sftp, sudo with a password, start-up files that print: told, and nothing is wrong."""
    box.project("rbbash")
    code, found = doctor(write(box.root), "box")
    assert code == 0
    assert {"host.no-sftp", "host.login-noise"} <= bad(found)
    assert "Welcome to the machine" in found["host.login-noise"]["evidence"]
    assert found["host.no-python"]["state"] == found["host.max-sessions"]["state"] == "ok"
    text = rigbook(box.root, "doctor", "box").stdout.decode()
    assert "nothing wrong" in text and "[host.no-sftp]" in text and CHECKS["host.no-sftp"].fix in text


@needs_root
def test_a_server_that_allows_little_and_sends_a_locale(tmp_path: Path) -> None:
    settings = "MaxSessions 3\nSubsystem sftp internal-sftp\nSetEnv LC_ALL=xx_YY.UTF-8\n"
    with rigs.sshd(settings) as server:
        server.project("rbbash")
        home = server.users["rbbash"]
        (home / ".bashrc").write_text("")
        (home / "tools").mkdir()
        (home / "tools" / "uv").write_text("#!/bin/sh\n")
        (home / "tools" / "uv").chmod(0o755)
        (home / ".profile").write_text("PATH=$HOME/tools:/usr/bin:/bin\n")
        os.chmod(server.root / "key", 0o644)
        code, found = doctor(write(server.root))
        assert code == 6
        assert "3 sessions were opened on one connection, 5 refused" in found["host.max-sessions"]["message"]
        assert "xx_YY" in found["host.locale"]["evidence"] and "host.no-sftp" not in found
        assert "host.login-noise" not in found
        assert "mode 644" in found["local.key-open"]["evidence"]
        if "host.path" in found:  # not where the machine itself has a uv in its PATH
            assert f"{home}/tools/uv" in found["host.path"]["message"]
            assert f"a login shell's: {home}/tools:/usr/bin:/bin" in found["host.path"]["evidence"]


@needs_root
@pytest.mark.report(26)
def test_where_jobs_would_live(box: rigs.Sshd) -> None:
    box.project("rbzsh")

    def at(place: Path) -> tuple[int, dict[str, Any]]:
        return doctor(write(box.root, f'{HOST}state_dir = "{place}/state"\n'), "box")

    with mounts.full() as place:
        code, found = at(place)
        assert code == 6 and "No space left" in found["host.state-unwritable"]["message"]
    with mounts.small("64m", "noexec") as place:
        code, found = at(place)
        assert code == 6 and {"host.state-noexec", "host.state-space", "host.state-volatile"} <= bad(found)
        assert found["host.state-unwritable"]["state"] == "ok" and os.listdir(place / "state") == []
    with mounts.small("64m") as place:
        (place / "state").mkdir(mode=0o555)
        code, found = at(place)
        assert code == 6 and "Permission denied" in found["host.state-unwritable"]["message"]


@needs_root
@pytest.mark.report(27)
def test_a_clock_that_differs() -> None:
    """The far side's `date` is a stand-in that is an hour ahead."""
    with mounts.small() as place, rigs.sshd(f"SetEnv PATH={place}:/usr/bin:/bin\n") as server:
        (place / "date").write_text('#!/bin/sh\n/bin/date -d "+1 hour" "$@"\n')
        (place / "date").chmod(0o755)
        server.project("rbzsh")
        code, found = doctor(write(server.root))
        assert code == 6 and "ahead of ours" in found["host.clock-skew"]["message"]


def test_the_clock_is_bounded_from_both_sides() -> None:
    def skew(first: str, last: str) -> list[str]:
        found = checks._clock("x", {"begin": [first], "end": [last]}, 1000.0, 1010.0)
        return [finding.message for finding in found]

    assert skew("1003.0", "1007.0") == [], "a slow look is no skew"
    assert skew("1001.N", "1009.N") == [] and skew("1001", "1009") == []
    assert skew("940.0", "947.0") == ["its clock is 60.0 s behind ours"]
    assert skew("1073.0", "1077.0") == ["its clock is 67.0 s ahead of ours"]


async def test_a_host_without_python(box: rigs.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "FIND_PYTHON", "exit 127")
    async with Rig(box.project(next(iter(box.users)))) as rig:
        found = {finding.check.id: finding for finding in await checks.look(await rig.link("box"))}
    assert "no Python 3.9 or newer" in found["host.no-python"].message and found["host.no-python"].evidence


def test_keys_and_hosts_that_do_not_answer(box: rigs.Sshd) -> None:
    box.project(next(iter(box.users)))
    root = write(box.root)
    known = (box.root / "known_hosts").read_text()
    try:
        (box.root / "known_hosts").write_text("")
        code, found = doctor(root)
        assert code == 6 and "host.key-unknown" in found["host.key"]["evidence"]
        other = box.root / "other"
        rigs.make_key(other)
        public = (box.root / "other.pub").read_text()
        (box.root / "known_hosts").write_text(f"[127.0.0.1]:{box.port} {public}")
        code, found = doctor(root)
        assert code == 6 and "host.key-changed" in found["host.key"]["evidence"]
    finally:
        (box.root / "known_hosts").write_text(known)
    box.project("nobody-of-that-name")
    code, found = doctor(root)
    assert code == 6 and bad(found) == {"host.login"}
    config = (box.root / "ssh_config").read_text()
    (box.root / "ssh_config").write_text(config.replace(f"Port {box.port}", f"Port {rigs.free_port()}"))
    code, found = doctor(root)
    assert code == 4 and bad(found) == {"host.unreachable"}


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdHost]:
    with systemd_host() as made:
        yield made


@pytest.mark.report(6)
@pytest.mark.report(7)
def test_what_systemd_does_at_logout(machine: SystemdHost) -> None:
    project = machine.project(PLAIN)
    root = write(project.root)
    machine.kill_user_processes(False)
    machine.linger(False)
    code, found = doctor(root, "box")
    assert code == 6 and "host.no-linger" in bad(found) and found["host.kill-user-processes"]["state"] == "ok"
    machine.kill_user_processes(True)
    code, found = doctor(root, "box")
    assert code == 6 and found["host.kill-user-processes"]["severity"] == "error"
    machine.linger(True)
    code, found = doctor(root, "box")
    assert not {"host.no-linger", "host.kill-user-processes"} & bad(found)


def test_played_hosts_and_this_machine_pass(tmp_path: Path) -> None:
    with rigs.played(tmp_path):
        write(tmp_path, rigs.host("llm") + '[hosts.here]\nkind = "local"\n')
        code, found = doctor(tmp_path, "llm")
        assert code == 0 and bad(found) == set() and "played" in found["host.reached"]["message"]
        began = time.monotonic()
        code, found = doctor(tmp_path, "here")
        assert code in (0, 6) and time.monotonic() - began < 60
    (tmp_path / "rigbook.toml").write_text("[projekt]\n")
    code, found = doctor(tmp_path)
    assert code == 6 and bad(found) == {"project.wrong"}
