"""A file has its name only when all of it is there, whatever the route, the login files and the disk are like."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote import courier, download, files, shell, upload
from remote.connect import Link, Rig
from state.errors import RigbookError
from state.project import Project
from tests.lab import rigs
from tests.test_exec import box, played, proxmox, where  # noqa: F401 (fixtures)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
async def link(where: tuple[Project, str]) -> AsyncIterator[Link]:  # noqa: F811
    async with Rig(where[0]) as rig:
        yield await rig.link(where[1])


class FarPath(str):
    """A directory on the far side by its name there; `here` is where the tests look into it."""

    here: Path


@pytest.fixture
async def far(link: Link, request: pytest.FixtureRequest) -> AsyncIterator[FarPath]:
    name = FarPath((await link.run(["mktemp", "-d", "/tmp/rb-files-XXXXXX"])).check("mktemp").text().strip())
    name.here = Path(name)
    if link.name == "ct":  # a container has a file system of its own
        rig = request.getfixturevalue("proxmox")
        pid = rig.container.lxc("info", "-pH").strip()
        name.here = Path(f"/proc/{rig.far.space.pid}/root/proc/{pid}/root{name}")
    yield name
    await link.run(["rm", "-rf", name])


def not_in_a_container(link: Link) -> None:
    if link.name == "ct":
        pytest.skip("a mount of ours is not seen in the container")


@pytest.fixture(params=["courier", "sh"])
def without_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promises hold with and without a Python on the far side."""
    if request.param == "sh":

        async def none(link: Link) -> None:
            return None

        monkeypatch.setattr(upload, "python_of", none)
        monkeypatch.setattr(download, "python_of", none)


def parts(folder: str | Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".part")]


NAMES = ["plain", "a b", "it's", "new\nline", "-n", "é", "\udcff", ".hidden", "x" * 255]


@pytest.mark.usefixtures("without_python")
async def test_files_arrive_whole_with_their_mode(link: Link, far: FarPath, tmp_path: Path) -> None:
    for name in NAMES:
        source, back = tmp_path / "source", tmp_path / "back"
        data = os.urandom(300_007)
        source.write_bytes(data)
        source.chmod(0o640)
        sent = await files.put(link, source, f"{far}/{name}")
        assert (sent.size, sent.sha256, sent.checked) == (len(data), hashlib.sha256(data).hexdigest(), True)
        assert far.here.joinpath(name).read_bytes() == data and far.here.joinpath(name).stat().st_mode & 0o777 == 0o640
        seen: list[tuple[int, int]] = []
        got = await files.get(link, f"{far}/{name}", back, progress=lambda done, total, s=seen: s.append((done, total)))  # type: ignore[misc]
        assert back.read_bytes() == data and got.sha256 == sent.sha256
        assert seen[-1] == (len(data), len(data))
        os.unlink(far.here.joinpath(name))
    assert os.listdir(far.here) == [] and not parts(tmp_path)
    (tmp_path / "empty").touch()
    assert (await files.put(link, tmp_path / "empty", f"{far}/empty")).size == 0
    assert (await files.get(link, f"{far}/empty", back)).size == 0 and back.read_bytes() == b""
    await files.write(link, f"{far}/small", b"bytes", 0o600)
    assert await files.read(link, f"{far}/small", 1, 3) == b"yte"


@pytest.mark.usefixtures("without_python")
async def test_what_cannot_be_written_says_why_and_changes_nothing(link: Link, far: FarPath, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"new")
    os.mkfifo(far.here.joinpath("pipe"))
    far.here.joinpath("folder").mkdir()
    far.here.joinpath("file").write_bytes(b"old")
    os.chmod(far.here.joinpath("folder"), 0o777)
    cases = {"folder": "file.is-directory", "pipe": "file.special", "file/x": "file.not-directory",
             "no/such/x": "file.not-found", "y" * 256: "file.bad-name"}  # fmt: skip
    for name, id in cases.items():
        with pytest.raises(RigbookError) as caught:
            await files.put(link, source, f"{far}/{name}")
        assert caught.value.id == id, (name, caught.value)
    for name, id in {"folder": "file.is-directory", "pipe": "file.special", "none": "file.not-found"}.items():
        with pytest.raises(RigbookError) as caught:
            await asyncio.wait_for(files.get(link, f"{far}/{name}", tmp_path / "back"), 30)
        assert caught.value.id == id, (name, caught.value)
    await files.put(link, source, f"{far}/folder/")
    assert far.here.joinpath("folder", "source").read_bytes() == b"new"
    assert sorted(os.listdir(far.here)) == ["file", "folder", "pipe"] and not (tmp_path / "back").exists()


@pytest.mark.usefixtures("without_python")
async def test_a_link_is_written_through_and_told(link: Link, far: FarPath, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    far.here.joinpath("real").write_bytes(b"old")
    far.here.joinpath("link").symlink_to("real")
    sent = await files.put(link, tmp_path / "source", f"{far}/link")
    assert far.here.joinpath("link").is_symlink() and far.here.joinpath("real").read_bytes() == b"new"
    assert sent.by == "sh" or sent.through == f"{far}/real"
    got = await files.get(link, f"{far}/link", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"new" and (got.by == "sh" or got.through == f"{far}/real")


@contextmanager
def mounted(options: str, at: Path, size: str = "1m") -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "lab", at], check=True)
    try:
        if options:
            subprocess.run(["mount", "-o", f"remount,{options}", at], check=True)
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=False)


@needs_root
@pytest.mark.report(26)
@pytest.mark.usefixtures("without_python")
async def test_full_and_read_only_disks_are_told_apart(link: Link, far: FarPath, tmp_path: Path) -> None:
    not_in_a_container(link)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    with mounted("", far.here.joinpath("small")) as small:
        (small / "kept").write_bytes(b"old")
        with pytest.raises(RigbookError) as caught:
            await files.put(link, source, f"{small}/kept")
        assert caught.value.id == "file.no-space" and caught.value.exit_code == 1
        assert os.listdir(small) == ["kept"] and (small / "kept").read_bytes() == b"old"
    with mounted("ro", far.here.joinpath("ro")) as read_only:
        with pytest.raises(RigbookError) as caught:
            await files.put(link, source, f"{read_only}/x")
        assert caught.value.id == "file.read-only"
    if link.name != "here":
        far.here.joinpath("shut").mkdir(mode=0o500)
        user = (await link.run(["id", "-u"])).text().strip()
        if user != "0":
            with pytest.raises(RigbookError) as caught:
                await files.put(link, source, f"{far}/shut/x")
            assert caught.value.id == "file.denied"


@needs_root
@pytest.mark.report(25)
async def test_a_noexec_disk_takes_files_and_is_told(link: Link, far: FarPath, tmp_path: Path) -> None:
    not_in_a_container(link)
    (tmp_path / "tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tool").chmod(0o755)
    with mounted("noexec", far.here.joinpath("noexec")) as place:
        sent = await files.put(link, tmp_path / "tool", f"{place}/tool")
        assert sent.noexec and (place / "tool").exists()
        ran = await link.run([f"{place}/tool"])
        assert ran.exit == 126
    assert not (await files.put(link, tmp_path / "tool", f"{far}/tool")).noexec


async def test_holes_stay_holes(link: Link, far: FarPath, tmp_path: Path) -> None:
    """A sparse file of a terabyte costs what is in it."""
    source, back = tmp_path / "source", tmp_path / "back"
    with source.open("wb") as file:
        for at, data in ((0, b"begin"), (1 << 30, b"middle"), (1 << 40, b"end")):
            file.seek(at)
            file.write(data)
        file.truncate((1 << 40) + (1 << 20))
    sent = await files.put(link, source, f"{far}/sparse")
    assert sent.size == source.stat().st_size and sent.sha256 is None and sent.checked
    copy = far.here.joinpath("sparse")
    assert copy.stat().st_size == source.stat().st_size and copy.stat().st_blocks * 512 < 1 << 20
    await files.get(link, f"{far}/sparse", back)
    assert back.stat().st_size == source.stat().st_size and back.stat().st_blocks * 512 < 1 << 20
    for path in (copy, back):
        with path.open("rb") as file:
            for at, data in ((0, b"begin"), (1 << 30, b"middle"), (1 << 40, b"end")):
                file.seek(at)
                assert file.read(len(data)) == data


@pytest.fixture
def one_user(box: rigs.Sshd) -> Project:  # noqa: F811
    return box.project(next(iter(box.users)))


async def test_a_cut_copy_goes_on_where_it_was(box: rigs.Sshd, one_user: Project, tmp_path: Path) -> None:  # noqa: F811
    source, back = tmp_path / "source", tmp_path / "back"
    data = os.urandom(6 * upload.LARGE)
    source.write_bytes(data)
    async with Rig(one_user) as rig:
        link = await rig.link("box")
        far = (await link.run(["mktemp", "-d", "/tmp/rb-files-XXXXXX"])).check("mktemp").text().strip()

        async def cut(work: asyncio.Task[files.Copied], reached: asyncio.Event) -> None:
            await reached.wait()
            box.cut()
            with pytest.raises(RigbookError) as caught:
                await work
            assert caught.value.exit_code == 4 and caught.value.id in ("host.unknown", "file.short")

        def watch() -> tuple[asyncio.Event, files.Progress]:
            reached = asyncio.Event()
            return reached, lambda done, total: reached.set() if done > total // 2 else None

        reached, progress = watch()
        await cut(asyncio.ensure_future(files.put(link, source, f"{far}/x", progress=progress)), reached)
        assert not Path(far, "x").exists()
        rigs.until(lambda: parts(far))
        rigs.until(lambda: not _locked(Path(far, parts(far)[0])))
        sent = await files.put(link, source, f"{far}/x")
        assert 0 < sent.resumed < len(data) and sent.sha256 == hashlib.sha256(data).hexdigest()
        assert Path(far, "x").read_bytes() == data and parts(far) == []

        reached, progress = watch()
        await cut(asyncio.ensure_future(files.get(link, f"{far}/x", back, progress=progress)), reached)
        assert not back.exists() and len(parts(tmp_path)) == 1
        got = await files.get(link, f"{far}/x", back)
        assert 0 < got.resumed < len(data) and got.sha256 == sent.sha256
        assert back.read_bytes() == data and parts(tmp_path) == []

        # A part that is not a beginning of this file is begun anew.
        info = source.stat()
        with source.open("rb") as file:
            key = upload._key(file.fileno(), info)
        part = Path(far, os.fsdecode(courier.part_name(b"y", key)))
        part.write_bytes(b"\0" * upload.LARGE)
        os.chown(part, Path(far).stat().st_uid, -1)
        sent = await files.put(link, source, f"{far}/y")
        assert sent.resumed == 0 and Path(far, "y").read_bytes() == data
        await link.run(["rm", "-rf", far])


def _locked(path: Path) -> bool:
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


async def test_two_copies_at_once_do_not_mix(link: Link, far: FarPath, tmp_path: Path) -> None:
    source = tmp_path / "source"
    data = os.urandom(2 * upload.LARGE)
    source.write_bytes(data)
    await asyncio.gather(*(files.put(link, source, f"{far}/x") for _ in range(3)))
    assert far.here.joinpath("x").read_bytes() == data and os.listdir(far.here) == ["x"]


@pytest.mark.report(24)
async def test_files_need_no_sftp_subsystem(tmp_path: Path) -> None:
    """OpenSSH without `Subsystem sftp`, and users whose start-up files print: both break sftp."""
    with rigs.sshd() as server:
        assert "sftp" not in (server.root / "sshd_config").read_text()
        async with Rig(server.project(next(iter(server.users)))) as rig:
            link = await rig.link("box")
            (tmp_path / "x").write_bytes(b"data")
            await files.put(link, tmp_path / "x", "~/x")
            await files.get(link, "~/x", tmp_path / "y")
            assert (tmp_path / "y").read_bytes() == b"data"
            sftp = await link.run(script=f"command -v sftp-server || ls {shell.path('~')}")
            assert sftp.ok


async def test_a_guest_agent_carries_small_files(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It takes all input first and gives all output last: no conversation, and little room."""
    rig = request.getfixturevalue("proxmox")
    async with Rig(rig.project(vm=True)) as hosts:
        link = await hosts.link("vm")
        data = os.urandom(200_000)
        (tmp_path / "x").write_bytes(data)
        sent = await files.put(link, tmp_path / "x", "/root/x")
        assert sent.checked and sent.sha256 == hashlib.sha256(data).hexdigest()
        await files.get(link, "/root/x", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data
        await link.run(script="head -c 9000000 /dev/zero | tr '\\0' x >/root/large")
        assert (await files.get(link, "/root/large", tmp_path / "large")).size == 9_000_000
        (tmp_path / "large").write_bytes(b"x" * (2 << 20))
        with pytest.raises(RigbookError) as caught:
            await files.put(link, tmp_path / "large", "/root/large")
        assert caught.value.id == "host.bootstrap-only"
        rig.node(agent_output_limit=100_000)
        with pytest.raises(RigbookError) as caught:
            await files.get(link, "/root/x", tmp_path / "back")
        assert caught.value.id == "file.short" and "guest agent cut" in str(caught.value)
        rig.node(agent_output_limit=16 << 20)


def test_every_reason_is_explained() -> None:
    from remote.copying import ERRNO, REASONS
    from tui.cli.status import explanations

    assert {*ERRNO.values(), *REASONS.values(), "file.failed", "file.noexec"} <= explanations().keys()
