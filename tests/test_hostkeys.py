"""A key nobody vouched for and a key that changed are two different refusals, each with the prints to compare."""

from __future__ import annotations

from pathlib import Path

import asyncssh
import pytest

from remote import hostkeys
from remote.connect import Rig
from state.errors import RigbookError
from tests.lab import rigs


async def refused(server: rigs.Sshd, known: str, extra: str = "") -> RigbookError:
    (server.root / "known_hosts").write_text(known)
    with pytest.raises(RigbookError) as caught:
        async with Rig(server.project(next(iter(server.users)), extra)) as rig:
            await rig.link("box")
    assert caught.value.exit_code == 3
    return caught.value


async def test_unknown_changed_and_pinned() -> None:
    with rigs.sshd() as server:
        shown = asyncssh.read_public_key(str(server.root / "host_key.pub"))
        where = f"[127.0.0.1]:{server.port}"

        error = await refused(server, "")
        assert error.id == "host.key-unknown" and shown.get_fingerprint() in error.message

        old = asyncssh.generate_private_key("ssh-ed25519")
        error = await refused(server, f"{where} {old.export_public_key().decode()}")
        assert error.id == "host.key-changed"
        assert shown.get_fingerprint() in error.message and old.get_fingerprint() in error.message
        assert "ssh-keygen -R" in (error.hint or "")

        # Another type of key than the one on file: the exchange fails before a key is shown.
        other = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
        error = await refused(server, f"{where} {other.export_public_key().decode()}")
        assert error.id == "host.key-changed" and other.get_fingerprint() in error.message

        # `none` switches checking off in asyncssh; here it must not.
        assert (await refused(server, "", "  UserKnownHostsFile none\n")).id == "host.key-unknown"

        project = server.project(next(iter(server.users)))
        pins = project.root / ".rigbook" / "known_hosts"
        hostkeys.pin(pins, "127.0.0.1", server.port, (server.root / "host_key.pub").read_text())
        async with Rig(project) as rig:
            assert (await (await rig.link("box")).run(["true"])).ok


def test_one_bad_line_does_not_hide_the_others(tmp_path: Path) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    file = tmp_path / "known_hosts"
    file.write_text(f"garbage\n@cert-authority *.x ssh-rsa !!!\nbox {key.export_public_key().decode()}")
    assert hostkeys.lookup(hostkeys.load([file]), "box", "", 22) == [key.convert_to_public()]
