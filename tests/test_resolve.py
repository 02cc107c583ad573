"""A target means what it means to `ssh`: compared with the real `ssh -G` and with what real servers are asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from remote import resolve
from remote.resolve import Target
from state.errors import RigbookError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files an ssh config may name. OpenSSH takes HOME from the password file, so we name a config."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


def config(home: Path, text: str) -> Path:
    (home / "config").write_text(text)
    return home / "config"


def test_includes_are_read_in_order_and_match_is_obeyed(home: Path) -> None:
    (home / "conf.d").mkdir()
    # The names sort otherwise than a directory lists them.
    for name, user in (("30-c", "c"), ("00-z", "z"), ("20-b", "b"), ("10-a", "a")):
        (home / "conf.d" / name).write_text(f"Host box\n  User {user}\n")
    file = config(
        home,
        f"Include {home}/conf.d/*\n"
        "Match host box exec true\n  Port 2022\n"
        "Match host box exec false\n  Port 3033\n"
        'Match originalhost box user z\n  HostName "box.%h.example"\n'
        f'Host box\n  IdentityFile "{home}/my %h key"\n  CertificateFile {home}/%n-cert.pub\n  HostKeyAlias A-%h\n'
        f'  UserKnownHostsFile "{home}/known %h" /other\n  ProxyJump me@[::1]:2200,second:99\n',
    )
    found = resolve.resolve(Target("box"), file)
    said = subprocess.run(["ssh", "-F", file, "-G", "box"], capture_output=True, text=True, check=True).stdout
    assert f"user {found.user}\nhostname {found.host}\nport {found.port}\n" in said
    assert (found.user, found.host, found.port) == ("z", "box.box.example", 2022)
    assert found.identities == (home / "my box.box.example key",)
    assert found.certificates == (home / "box-cert.pub",)
    assert found.where() == ("a-box.box.example", 22)
    assert found.known_hosts[:2] == (home / "known box.box.example", Path("/other"))
    assert found.jumps == (Target("::1", "me", 2200), Target("second", None, 99))
    assert resolve.resolve(Target("box", "root", 5), file).user == "root"


def test_what_nobody_configured_is_left_to_us(home: Path) -> None:
    found = resolve.resolve(Target("plain"), config(home, "Host other\n  Ciphers aes128-ctr\n"))
    assert not found.values and not found.named_identities and found.agent == ""
    assert {path.name for path in found.identities} >= {"id_rsa", "id_ed25519", "id_ed25519_sk"}
    other = resolve.resolve(Target("other"), home / "config")
    assert other.names("ciphers") == ["aes128-ctr"]


@pytest.mark.parametrize(
    ("line", "agent"),
    [("", "/env"), ("IdentityAgent none", ""), ("IdentityAgent SSH_AUTH_SOCK", "/env"), ("IdentityAgent /a%%b", "/a%b"),
     ("IdentityAgent ${OTHER}", "/other")],
)  # fmt: skip
def test_the_agent(home: Path, monkeypatch: pytest.MonkeyPatch, line: str, agent: str) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/env")
    monkeypatch.setenv("OTHER", "/other")
    assert resolve.resolve(Target("x"), config(home, f"Host x\n  {line}\n")).agent == agent


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """How often ssh was started to ask it."""
    calls: list[list[str]] = []
    run = subprocess.run

    def counted(words: list[str], **options: object) -> object:
        if "-v" in words:
            calls.append(words)
        return run(words, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counted)
    return calls


def test_an_answer_is_kept_until_a_file_changes(home: Path, asked: list[list[str]]) -> None:
    (home / "conf.d").mkdir()
    (home / "conf.d" / "b").write_text("Host x\n  Port 1\n")
    file = config(home, f"Include {home}/conf.d/*\n")
    assert [resolve.resolve(Target("x"), file).port for _ in range(3)] == [1, 1, 1] and len(asked) == 1
    (home / "conf.d" / "a").write_text("Host x\n  Port 2\n")  # a new file, in front
    assert resolve.resolve(Target("x"), file).port == 2
    (home / "conf.d" / "a").write_text("Host x\n  Port 33\n")
    assert resolve.resolve(Target("x"), file).port == 33
    os.unlink(home / "conf.d" / "a")
    assert resolve.resolve(Target("x"), file).port == 1
    assert len(asked) == 4


STARTED = time.time()


@pytest.fixture
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a user who never ran us. Answers that stand on an old file are kept there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return home / "cache" / "rigbook" / "ssh-config"


def another_process(file: Path, minutes: int) -> None:
    """Forget what this process knows; the config is as old as `minutes`."""
    resolve._cache.clear()
    then = STARTED - 60 * minutes
    os.utime(file, (then, then))


def test_an_answer_outlives_the_process(home: Path, cache: Path, asked: list[list[str]]) -> None:
    file = config(home, "Host box\n  User one\n")
    another_process(file, 5)
    first = resolve.resolve(Target("box"), file)
    another_process(file, 5)
    assert resolve.resolve(Target("box"), file) == first and len(asked) == 1
    assert cache.stat().st_mode & 0o077 == 0
    file.write_text("Host box\n  User two\n")  # as long as before
    another_process(file, 4)
    assert resolve.resolve(Target("box"), file).user == "two" and len(asked) == 2
    for kept in cache.iterdir():  # damaged: asked for again
        kept.write_bytes(kept.read_bytes()[:40])
    another_process(file, 4)
    assert resolve.resolve(Target("box"), file).user == "two" and len(asked) == 3


def test_a_file_changed_just_now_or_a_cache_of_others_is_not_relied_on(
    home: Path, cache: Path, asked: list[list[str]]
) -> None:
    file = config(home, "Host box\n  User one\n")
    resolve.resolve(Target("box"), file)
    resolve._cache.clear()
    assert resolve.resolve(Target("box"), file).user == "one" and len(asked) == 2
    another_process(file, 5)
    resolve.resolve(Target("box"), file)
    cache.chmod(0o777)
    another_process(file, 5)
    resolve.resolve(Target("box"), file)
    assert len(asked) == 4


def test_what_depends_on_more_than_files_is_asked_each_time(home: Path, asked: list[list[str]]) -> None:
    file = config(home, f'Match host x exec "test -e {home}/flag"\n  Port 7\n')
    assert resolve.resolve(Target("x"), file).port == 22
    (home / "flag").touch()
    assert resolve.resolve(Target("x"), file).port == 7 and len(asked) == 2


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=touch x", "a b", "$(id)", "a`id`", "u;id@host", "-l@host", "a@b@", ""]
)
def test_a_target_that_a_shell_or_ssh_would_read_otherwise_is_refused(text: str) -> None:
    with pytest.raises(RigbookError) as caught:
        resolve.parse(text)
    assert (caught.value.id, caught.value.exit_code) == ("host.bad-address", 2)


def test_targets() -> None:
    assert resolve.parse("box") == Target("box")
    assert resolve.parse("me@box:22") == Target("box", "me", 22)
    assert resolve.parse("ssh://me@[fe80::1%eth0]:22") == Target("fe80::1%eth0", "me", 22)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Prot 22\n", "prot"),
        ("Host x\n  Port many\n", "many"),
        ("Host x\n  IdentityFile %y\n", "%y"),
        ('User "a\n', ""),
    ],
)
def test_a_config_that_cannot_be_read_is_quoted(home: Path, text: str, said: str) -> None:
    with pytest.raises(RigbookError) as caught:
        resolve.resolve(Target("x"), config(home, text))
    assert caught.value.id == "host.ssh-config" and said in caught.value.message.lower()


def test_without_the_ssh_program(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(
        home,
        f"Host box\n  HostName 10.0.0.1\n  User me\n  Port 77\n  IdentityFile {home}/%%k\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {home}/known\n  ProxyJump jump\n  HostKeyAlias pinned\n",
    )
    with_ssh = resolve.resolve(Target("box"), file)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    without = resolve.resolve(Target("box"), file)
    assert (with_ssh.source, without.source) == ("ssh -G", "asyncssh")
    for name in ("host", "port", "user", "identities", "jumps", "alias", "named_identities"):
        assert getattr(without, name) == getattr(with_ssh, name), name
    assert without.known_hosts[0] == home / "known" and without.on("identitiesonly")
    assert "sorts no Include" in resolve.differences(Target("box"), file)[0]


def test_doctor_is_told_where_asyncssh_reads_otherwise_and_what_is_not_followed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Host odd\n  StrictHostKeyChecking no\n  ForwardAgent yes\n  VerifyHostKeyDNS yes\n"
    told = "\n".join(resolve.differences(Target("odd"), config(home, text)))
    for word in ("StrictHostKeyChecking no", "ForwardAgent", "VerifyHostKeyDNS"):
        assert word in told
    (home / "conf.d").mkdir()
    for name in "12":
        (home / "conf.d" / name).write_text(f"Host odd\n  User user{name}\n")
    listed = Path.glob
    # As directories often list: in no order.
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(listed(self, pattern), reverse=True))
    (told,) = resolve.differences(Target("odd"), config(home, f"Include {home}/conf.d/*\n"))
    assert "User" in told and "user1" in told and "user2" in told
    assert resolve.differences(Target("even"), config(home, "Host even\n  Port 5\n")) == []
