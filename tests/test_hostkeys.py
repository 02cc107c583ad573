"""Host keys: unknown, changed, revoked and signed are told apart; no config and no flag makes us take a wrong one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from remote import hostkeys
from remote.connect import Rig
from state.errors import RigbookError
from tests.lab import rigs
from tests.lab.proxmox import ProxmoxRig, proxmox_rig


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as server:
        yield server


@pytest.fixture
def known(box: rigs.Sshd) -> Iterator[Path]:
    """The user's known_hosts file, as it was before each test; no pins."""
    file = box.root / "known_hosts"
    before = file.read_text()
    yield file
    file.write_text(before)
    (box.root / ".rigbook" / "known_hosts").unlink(missing_ok=True)


def where(box: rigs.Sshd) -> str:
    return f"[127.0.0.1]:{box.port}"


def shown(box: rigs.Sshd) -> asyncssh.SSHKey:
    return asyncssh.read_public_key(str(box.root / "host_key.pub"))


def keygen(*words: str | Path) -> None:
    subprocess.run(["ssh-keygen", *words], check=True, capture_output=True)


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


async def route(box: rigs.Sshd, extra: str = "", *, accept_new: bool = False) -> dict[str, str]:
    async with Rig(box.project(next(iter(box.users)), extra), accept_new=accept_new) as rig:
        link = await rig.link("box")
        assert (await link.run(["true"])).ok
        return link.route()


async def refused(box: rigs.Sshd, extra: str = "", *, accept_new: bool = False) -> RigbookError:
    with pytest.raises(RigbookError) as caught:
        await route(box, extra, accept_new=accept_new)
    assert caught.value.exit_code == 3 and caught.value.host == "box"
    return caught.value


@pytest.mark.report(20)
async def test_unknown_and_changed(box: rigs.Sshd, known: Path) -> None:
    known.write_text("")
    error = await refused(box)
    assert error.id == "host.key-unknown" and shown(box).get_fingerprint() in error.message

    old = asyncssh.generate_private_key("ssh-ed25519")
    known.write_text(f"{where(box)} {public(old)}\n")
    error = await refused(box, accept_new=True)
    assert error.id == "host.key-changed"
    assert shown(box).get_fingerprint() in error.message and old.get_fingerprint() in error.message
    assert f"ssh-keygen -R '{where(box)}' -f '{known}'" in (error.hint or "")
    keygen("-R", where(box), "-f", known)
    assert (await refused(box)).id == "host.key-unknown", "the command of the hint removes the line"

    # Another type of key than the one on file.
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
    known.write_text(f"{where(box)} {public(other)}\n")
    error = await refused(box)
    assert error.id == "host.key-changed" and other.get_fingerprint() in error.message
    # The right one of another type counts, too.
    known.write_text(f"{where(box)} {public(other)}\n{where(box)} {public(shown(box))}\n")
    assert (await route(box))["host_key"] == shown(box).get_fingerprint()


@pytest.mark.parametrize(
    "line",
    ["StrictHostKeyChecking no", "StrictHostKeyChecking accept-new", "UserKnownHostsFile none",
     "UserKnownHostsFile /dev/null", "NoHostAuthenticationForLocalhost yes", "CheckHostIP no", "VerifyHostKeyDNS yes"],
)  # fmt: skip
@pytest.mark.report(29)
async def test_no_config_switches_the_check_off(box: rigs.Sshd, known: Path, line: str) -> None:
    known.write_text("")
    # In front, since the first value counts.
    project = box.project(next(iter(box.users)))
    config = box.root / "ssh_config"
    config.write_text(f"Host box\n  {line}\n{config.read_text()}")
    with pytest.raises(RigbookError) as caught:
        async with Rig(project) as rig:
            await rig.link("box")
    assert caught.value.id == "host.key-unknown"


@pytest.mark.report(29)
async def test_lines_that_look_like_trust_and_are_none(box: rigs.Sshd, known: Path) -> None:
    key = public(shown(box))
    for line in (
        f"@cert-authority {where(box)} {key}",  # the key of an authority is no host's key
        f"127.0.0.2,127.0.0.1x {key}",
        f"[127.0.0.1]:{box.port + 1} {key}",
        f"!127.0.0.1,{where(box)}x {key}",
        f"# {where(box)} {key}",
        f"{where(box)} ssh-ed25519 AAAA",
    ):
        known.write_text(f"{line}\n")
        assert (await refused(box)).id == "host.key-unknown", line
    # And lines that are: a pattern, a hash, a name without the port (as OpenSSH), among garbage.
    hashed = box.root / "hashed"
    hashed.write_text(f"{where(box)} {key}\n")
    keygen("-H", "-f", hashed)
    assert where(box) not in hashed.read_text()
    for text in (hashed.read_text(), f"[127.0.0.*]:{box.port} {key}", f"other,{where(box)} {key}", f"127.0.0.1 {key}"):
        known.write_text(f"garbage\n@cert-authority *.x ssh-rsa !!!\n\n{text}\n")
        assert (await route(box))["host_key"] == shown(box).get_fingerprint()


async def test_revoked(box: rigs.Sshd, known: Path) -> None:
    good, key = known.read_text(), public(shown(box))
    known.write_text(f"{good}\n@revoked * {key}\n")
    assert (await refused(box, accept_new=True)).id == "host.key-revoked"
    known.write_text(good)
    listed = box.root / "revoked keys"
    line = f'  RevokedHostKeys "{listed}"\n'
    assert (await refused(box, line)).id == "host.key-revoked", (
        "as with OpenSSH, a list that is not there trusts nobody"
    )
    listed.write_text(f"# stolen\n{key}\n")
    error = await refused(box, line)
    assert error.id == "host.key-revoked" and shown(box).get_fingerprint() in error.message
    other = asyncssh.generate_private_key("ssh-ed25519")
    listed.write_text(f"{public(other)}\n")
    assert (await route(box, line))["route"] == "ssh"
    (box.root / "other.pub").write_text(public(other))
    for file, expected in ((box.root / "host_key.pub", "host.key-revoked"), (box.root / "other.pub", "")):
        listed.unlink()
        keygen("-q", "-k", "-f", listed, file)  # the binary form
        if expected:
            assert (await refused(box, line)).id == expected
        else:
            await route(box, line)


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[tuple[rigs.Sshd, Path]]:
    """A server with a certificate by ssh-keygen, and the authority's key."""
    ca = tmp_path / "ca"
    keygen("-q", "-t", "ed25519", "-N", "", "-f", ca)
    with rigs.sshd() as server:
        yield server, ca


def certify(server: rigs.Sshd, ca: Path, names: str, *options: str) -> None:
    """Sign the server's key and have sshd show the certificate."""
    keygen("-q", "-s", ca, "-I", "box", "-h", "-n", names, *options, server.root / "host_key.pub")
    settings = (server.root / "sshd_config").read_text()
    if "HostCertificate" not in settings:
        (server.root / "sshd_config").write_text(f"{settings}\nHostCertificate {server.root}/host_key-cert.pub\n")
    log = server.root / "sshd.log"
    begun = log.read_text().count("Server listening")
    server.process.send_signal(1)  # sshd reads its files again
    rigs.until(lambda: log.read_text().count("Server listening") > begun)


@pytest.mark.report(29)
async def test_signed_by_an_authority(signed: tuple[rigs.Sshd, Path]) -> None:
    server, ca = signed
    plain, authority = (server.root / "known_hosts").read_text(), Path(f"{ca}.pub").read_text()
    known = server.root / "known_hosts"
    certify(server, ca, "127.0.0.1,box.example")
    known.write_text(f"@cert-authority {where(server)} {authority}")
    told = await route(server)
    ca_print = asyncssh.read_public_key(f"{ca}.pub").get_fingerprint()
    assert told["host_key"] == f"{shown(server).get_fingerprint()}, signed by CA {ca_print}"

    # An authority for other machines signs nothing here.
    known.write_text(f"@cert-authority *.example {authority}")
    assert (await refused(server)).id == "host.key-unknown"
    # A revoked authority takes its certificates with it.
    known.write_text(f"@cert-authority {where(server)} {authority}@revoked * {authority}")
    assert (await refused(server)).id == "host.key-revoked"
    # A stranger's certificate around a key that is on file: the key counts (asyncssh alone would refuse it).
    known.write_text(f"@cert-authority {where(server)} {public(asyncssh.generate_private_key('ssh-ed25519'))}\n{plain}")
    assert (await route(server))["host_key"] == shown(server).get_fingerprint()

    known.write_text(f"@cert-authority {where(server)} {authority}")
    for names, options, said in (
        ("other", [], "not for 127.0.0.1"),
        ("127.0.0.1", ["-V", "20200101:20200102"], "expired"),
    ):
        certify(server, ca, names, *options)
        error = await refused(server)
        assert error.id == "host.key-unknown" and said in error.message.lower()
    certify(server, ca, "127.0.*")
    assert "signed by CA" in (await route(server))["host_key"]


async def test_a_command_that_knows_hosts(box: rigs.Sshd, known: Path) -> None:
    line = known.read_text()
    known.write_text("")
    (box.root / "answer").write_text(line)
    script = box.root / "keys"
    script.write_text(f'#!/bin/sh\necho "$@" >{box.root}/asked\ncat {box.root}/answer\n')
    script.chmod(0o755)
    assert (await route(box, f"  KnownHostsCommand {script} %H\n"))["route"] == "ssh"
    assert (box.root / "asked").read_text() == f"{where(box)}\n"
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RigbookError) as caught:
        await route(box, f"  KnownHostsCommand {script} %H\n")
    assert caught.value.id == "host.ssh-config"


async def test_a_new_key_is_accepted_only_by_name_and_then_kept(box: rigs.Sshd, known: Path) -> None:
    known.write_text("")
    await route(box, accept_new=True)
    pins = box.root / ".rigbook" / "known_hosts"
    assert pins.read_text() == f"box {public(shown(box))}\n"
    await route(box)  # from now on without the flag
    pins.write_text(f"box {public(asyncssh.generate_private_key('ssh-ed25519'))}\n")
    error = await refused(box, accept_new=True)
    assert error.id == "host.key-changed" and f"ssh-keygen -R 'box' -f '{pins}'" in (error.hint or "")


def trust(root: Path, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tui.cli.main", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.report(21)
def test_nobody_is_asked_where_nobody_can_answer(box: rigs.Sshd, known: Path) -> None:
    known.write_text("")
    box.project(next(iter(box.users)))
    (box.root / "rigbook.toml").write_text(
        '[project]\nname = "lab"\nssh_config = "ssh_config"\n[hosts.box]\nkind = "linux"\nssh = "box"\n'
    )
    # A terminal that would show a question; there is none, and it does not wait.
    master, slave = pty.openpty()
    began = time.monotonic()
    done = trust(box.root, "exec", "box", "--", "true", stdin=slave)
    assert done.returncode == 255 and b"host.key-unknown" in done.stderr and time.monotonic() - began < 20
    assert trust(box.root, "hosts", stdin=slave).returncode == 4
    os.close(master)
    os.close(slave)
    unattended = trust(box.root, "hosts", "trust", "box", stdin=subprocess.DEVNULL)
    assert unattended.returncode == 3 and shown(box).get_fingerprint().encode() in unattended.stderr
    assert trust(box.root, "hosts", "trust", "box", "--yes", stdin=subprocess.DEVNULL).returncode == 2
    taken = trust(box.root, "hosts", "trust", "box", "--accept-new", stdin=subprocess.DEVNULL)
    assert taken.returncode == 0 and shown(box).get_fingerprint().encode() in taken.stdout
    assert trust(box.root, "exec", "box", "--", "true", stdin=subprocess.DEVNULL).returncode == 0
    assert b"already" in trust(box.root, "hosts", "trust", "box", stdin=subprocess.DEVNULL).stdout


@pytest.fixture(scope="module")
def proxmox() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as rig:
        yield rig


def guests(rig: ProxmoxRig, known: str = "/dev/null") -> str:
    return "".join(
        f"Host {name}\n  HostName {address}\n  User root\n  IdentityFile {rig.far.sshd.root}/key\n"
        f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {known}\n"
        for name, address in (("inct", rig.container.address), ("invm", rig.vm.address))
    )


GUESTS = (
    '[hosts.g]\nkind = "lxc"\non = "pve"\nvmid = 101\nssh = "inct"\n'
    '[hosts.v]\nkind = "vm"\non = "pve"\nvmid = 200\nssh = "invm"\n'
)


async def test_the_key_of_a_guest_comes_through_its_host(proxmox: ProxmoxRig) -> None:
    project = proxmox.project(GUESTS, guests(proxmox))
    pins = project.root / ".rigbook" / "known_hosts"
    async with Rig(project) as rig:
        for name, made in (("g", proxmox.container), ("v", proxmox.vm)):
            link = await rig.link(name)
            assert (await link.run(["uname", "-n"])).ok and link.route()["route"] == "ssh"
            pinned = {line.partition(" ")[2] for line in pins.read_text().splitlines() if line.startswith(f"{name} ")}
            assert pinned == set(made.host_keys())
    # A machine in between shows another key than the one that the host tells: changed, not unknown.
    pins.write_text("")
    stolen = project.root / "known"
    proxmox.container.run("mv", "/etc/ssh/ssh_host_ed25519_key.pub", "/root/kept")
    proxmox.container.run("mv", "/etc/ssh/ssh_host_ecdsa_key.pub", "/root/kept2")
    key = public(asyncssh.generate_private_key("ssh-ed25519"))
    proxmox.container.run("sh", "-c", f"echo '{key}' >/etc/ssh/ssh_host_ed25519_key.pub")
    try:
        async with Rig(proxmox.project(GUESTS, guests(proxmox, str(stolen)))) as rig:
            with pytest.raises(RigbookError) as caught:
                await rig.link("g")
        assert caught.value.id == "host.key-changed"
    finally:
        proxmox.container.run("mv", "/root/kept", "/etc/ssh/ssh_host_ed25519_key.pub")
        proxmox.container.run("mv", "/root/kept2", "/etc/ssh/ssh_host_ecdsa_key.pub")
    # `hosts trust` asks the host again and replaces what was pinned, without a question.
    text = f'[project]\nname = "lab"\nssh_config = "ssh_config"\n[hosts.pve]\nkind = "proxmox"\nssh = "box"\n{GUESTS}'
    (project.root / "rigbook.toml").write_text(text)
    done = trust(project.root, "hosts", "trust", "g", stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.count(b"g SHA256:") == 2, done.stderr
    assert trust(project.root, "exec", "g", "--", "true", stdin=subprocess.DEVNULL).returncode == 0


def test_one_bad_line_does_not_hide_the_others(tmp_path: Path) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    file = tmp_path / "known_hosts"
    file.write_text(f"garbage\n@cert-authority *.x ssh-rsa !!!\nbox {key.export_public_key().decode()}")
    assert hostkeys.lookup(hostkeys.load([file]), "box", "", 22) == [key.convert_to_public()]


def test_pins_of_two_at_once_are_both_kept(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    code = (
        "import sys; from pathlib import Path; import asyncssh; from remote import hostkeys\n"
        "for n in range(8): hostkeys.pin(Path(sys.argv[1]), f'{sys.argv[2]}{n}', 22,"
        " asyncssh.generate_private_key('ssh-ed25519').export_public_key().decode())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in "abc"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(file.read_text().splitlines()) == 24
