"""Directories travel whole: links, modes and odd names kept, hostile archives refused, and the rest told."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from remote import files, sync, trees
from remote.connect import Link, Rig
from state.errors import RigbookError
from tests.lab import rigs
from tests.test_exec import box, played, proxmox, where  # noqa: F401 (fixtures)
from tests.test_files import FarPath, far, link, mounted, needs_root, not_in_a_container  # noqa: F401 (fixtures)


def make(root: Path) -> Path:
    """One of everything."""
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    for name in [
        "plain",
        "a b",
        "it's",
        "new\nline",
        "-n",
        "é",
        "\udcff",
        ".hidden",
        "..two",
        "sub/x",
        "sub/deep/" + "n" * 200,
    ]:
        (root / name).write_bytes(os.urandom(len(name) * 1000))
    (root / "sub" / "run").write_text("#!/bin/sh\n")
    (root / "sub" / "run").chmod(0o750)
    (root / "to-file").symlink_to("plain")
    (root / "to-nothing").symlink_to("no/such")
    (root / "to-dir").symlink_to("sub")
    os.utime(root / "plain", (1_000_000_000, 1_000_000_000))
    return root


def seen(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content: object = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "directory"
        )
        if not stat.S_ISFIFO(info.st_mode):
            found[os.fspath(path.relative_to(root))] = (
                stat.S_IFMT(info.st_mode),
                content,
                path.is_symlink() or info.st_mode & 0o777,
            )
    return found


async def test_a_directory_there_and_back(link: Link, far: FarPath, tmp_path: Path) -> None:  # noqa: F811
    source = make(tmp_path / "source")
    os.mkfifo(source / "pipe")
    sent = await files.put_tree(link, source, f"{far}/new/copy")
    copy = far.here.joinpath("new", "copy")
    assert seen(copy) == seen(source) and (copy / "plain").stat().st_mtime == 1_000_000_000
    assert (sent.files, sent.links, sent.directories, sent.skipped) == (12, 3, 3, ["pipe"])
    assert os.listdir(far.here.joinpath("new")) == ["copy"], "nothing of the way there is left"
    got = await files.get_tree(link, f"{far}/new/copy", tmp_path / "back")
    assert seen(tmp_path / "back") == seen(source) and (got.files, got.links) == (12, 3)
    assert sorted(os.listdir(tmp_path)) == ["back", "source"]


async def test_files_move_into_a_directory_that_exists(link: Link, far: FarPath, tmp_path: Path) -> None:  # noqa: F811
    source = make(tmp_path / "source")
    await link.run(["mkdir", "-p", f"{far}/there/sub"])
    await files.write(link, f"{far}/there/sub/own", b"stays")
    await files.write(link, f"{far}/there/plain", b"old")
    await files.put_tree(link, source, f"{far}/there")
    assert far.here.joinpath("there", "plain").read_bytes() == (source / "plain").read_bytes()
    assert far.here.joinpath("there", "sub", "own").read_bytes() == b"stays"
    there = seen(far.here.joinpath("there"))
    assert {name: what for name, what in there.items() if name not in ("sub/own", "sub")} == {
        name: what for name, what in seen(source).items() if name != "sub"
    }
    back = tmp_path / "back"
    (back / "sub").mkdir(parents=True)
    (back / "sub" / "mine").touch()
    await files.get_tree(link, f"{far}/there", back)
    assert set(seen(back)) == set(there) | {"sub/mine"}
    await link.run(["mkdir", f"{far}/clash"])
    await link.run(["mkdir", f"{far}/clash/plain"])
    with pytest.raises(RigbookError) as caught:
        await files.put_tree(link, source, f"{far}/clash")
    assert caught.value.id == "file.is-directory" and "plain" not in str(caught.value.hint or "")
    with pytest.raises(RigbookError) as caught:
        await files.put_tree(link, source, f"{far}/there/plain")
    assert caught.value.id == "file.not-directory"
    with pytest.raises(RigbookError) as caught:
        await files.get_tree(link, f"{far}/there/none", tmp_path / "none")
    assert caught.value.id == "file.not-found" and not (tmp_path / "none").exists()


@needs_root
async def test_a_full_disk_leaves_nothing(link: Link, far: FarPath, tmp_path: Path) -> None:  # noqa: F811
    not_in_a_container(link)
    source = make(tmp_path / "source")
    (source / "big").write_bytes(os.urandom(2 << 20))
    with mounted("", far.here.joinpath("small")) as small:
        with pytest.raises(RigbookError) as caught:
            await files.put_tree(link, source, f"{small}/copy")
        assert caught.value.id == "file.no-space" and os.listdir(small) == []
    with mounted("ro", far.here.joinpath("ro")) as read_only:
        with pytest.raises(RigbookError) as caught:
            await files.put_tree(link, source, f"{read_only}/copy")
        assert caught.value.id == "file.read-only"
    here = tmp_path / "here"
    far.here.joinpath("big").mkdir(mode=0o755)
    far.here.joinpath("big", "x").write_bytes(os.urandom(2 << 20))
    with mounted("", here):
        with pytest.raises(RigbookError) as caught:
            await files.get_tree(link, f"{far}/big", here / "copy")
        assert caught.value.id == "file.no-space" and os.listdir(here) == []


async def test_a_cut_directory_is_not_there(box: rigs.Sshd, tmp_path: Path) -> None:  # noqa: F811
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / str(number)).write_bytes(os.urandom(200_000))
    async with Rig(box.project(next(iter(box.users)))) as rig:
        link = await rig.link("box")
        far = (await link.run(["mktemp", "-d", "/tmp/rb-files-XXXXXX"])).text().strip()
        reached = asyncio.Event()
        put = asyncio.ensure_future(
            files.put_tree(link, source, f"{far}/copy", progress=lambda done, total, now=reached: now.set())
        )
        await reached.wait()
        box.cut()
        with pytest.raises(RigbookError) as caught:
            await put
        assert caught.value.exit_code == 4
        rigs.until(lambda: os.listdir(far) == [])
        await files.put_tree(link, source, f"{far}/copy")
        reached.clear()
        get = asyncio.ensure_future(
            files.get_tree(link, f"{far}/copy", tmp_path / "back", progress=lambda done, total, now=reached: now.set())
        )
        await reached.wait()
        box.cut()
        with pytest.raises(RigbookError) as caught:
            await get
        assert caught.value.exit_code == 4 and os.listdir(tmp_path) == ["source"]
        await link.run(["rm", "-rf", far])


def archive(*entries: tuple[str, bytes, str]) -> tarfile.TarFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
    buffer.seek(0)
    return tarfile.open(fileobj=buffer, mode="r|")


F, L, H, D, P = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("../out", F, "")],
        [("/out", F, "")],
        [("a/../../out", F, "")],
        [("l", L, ".."), ("l/out", F, "")],
        [("l", L, "/tmp"), ("l/x/out", F, "")],
        [("d", D, ""), ("d/l", L, "../.."), ("d/l/out", D, "")],
        [("f", F, ""), ("f/out", F, "")],
        [("h", H, "/etc/passwd")],
        [("h", H, "../out")],
        [("l", L, "/etc/passwd"), ("h", H, "l"), ("h", F, "")],
        [("d", D, ""), ("d", L, "..")],
    ],
)
def test_a_hostile_archive_is_refused(entries: list[tuple[str, bytes, str]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(RigbookError) as caught:
        trees.unpack(archive(*entries), root, trees.TreeCopied())
    assert caught.value.id == "file.bad-name" and os.listdir(tmp_path) == ["root"]


def test_what_is_odd_but_harmless_is_kept(tmp_path: Path) -> None:
    root, copied = tmp_path / "root", trees.TreeCopied()
    root.mkdir()
    entries = [
        ("./", D, ""),
        ("./f", F, ""),
        ("f", F, ""),
        ("h", H, "./f"),
        ("l", L, "/etc"),
        ("l", F, ""),
        ("p", P, ""),
    ]
    trees.unpack(archive(*entries), root, copied)
    assert sorted(os.listdir(root)) == ["f", "h", "l"] and not (root / "l").is_symlink()
    assert copied.skipped == ["p"] and (root / "h").stat().st_nlink == 2


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
async def test_sync_sends_only_what_changed(link: Link, far: FarPath, tmp_path: Path) -> None:  # noqa: F811
    source = make(tmp_path / "source")
    first = await files.sync_tree(link, source, f"{far}/it's a copy")
    copy = far.here.joinpath("it's a copy")
    assert first.by == "rsync" and first.files == 12 and seen(copy) == seen(source)
    (source / "plain").write_bytes(b"changed")
    (source / "sub" / "x").unlink()
    again = await files.sync_tree(link, source, f"{far}/it's a copy")
    assert again.files == 1 and (copy / "sub" / "x").exists()
    await files.sync_tree(link, source, f"{far}/it's a copy", delete=True)
    assert seen(copy) == seen(source)
    back = await files.sync_tree(link, tmp_path / "back", f"{far}/it's a copy", fetch=True)
    assert back.files == 11 and seen(tmp_path / "back") == seen(source)
    with pytest.raises(RigbookError) as caught:
        await files.sync_tree(link, tmp_path / "back", f"{far}/none", fetch=True)
    assert caught.value.id == "file.not-found"


@needs_root
@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
async def test_sync_names_a_full_disk(link: Link, far: FarPath, tmp_path: Path) -> None:  # noqa: F811
    not_in_a_container(link)
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(3 << 20))
    with mounted("", far.here.joinpath("small")) as small:
        with pytest.raises(RigbookError) as caught:
            await files.sync_tree(link, source, os.fspath(small))
        assert caught.value.id == "file.no-space"


async def test_without_rsync_everything_goes_by_tar(
    link: Link, far: FarPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    source = make(tmp_path / "source")

    async def none(link: Link) -> bool:
        return False

    monkeypatch.setattr(sync, "has_rsync", none)
    assert (await files.sync_tree(link, source, f"{far}/copy")).by == "tar"
    assert seen(far.here.joinpath("copy")) == seen(source)
    with pytest.raises(RigbookError) as caught:
        await files.sync_tree(link, source, f"{far}/copy", delete=True)
    assert caught.value.id == "file.no-rsync"


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
@pytest.mark.parametrize("fetch", [False, True], ids=["there", "back"])
async def test_a_cut_sync_leaves_the_next_one_alone(box: rigs.Sshd, tmp_path: Path, fetch: bool) -> None:  # noqa: F811
    """Whatever was open when the link went, its number may be given to the next connection."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / str(number)).write_bytes(os.urandom(12 << 20))
    async with Rig(box.project(next(iter(box.users)))) as rig:
        link = await rig.link("box")
        far = (await link.run(["mktemp", "-d", "/tmp/rb-files-XXXXXX"])).text().strip()
        try:
            if fetch:
                await files.put_tree(link, source, f"{far}/source")
            for round_ in range(6):
                here = tmp_path / f"copy{round_}" if fetch else source
                there = f"{far}/source" if fetch else f"{far}/copy{round_}"
                reached = asyncio.Event()
                work = asyncio.ensure_future(
                    files.sync_tree(link, here, there, fetch=fetch, progress=lambda done, total, now=reached: now.set())
                )
                await asyncio.wait_for(reached.wait(), 60)
                box.cut()
                with pytest.raises(RigbookError) as caught:
                    await asyncio.wait_for(work, 60)
                assert caught.value.exit_code == 4, caught.value
                assert (await asyncio.wait_for(link.run(["echo", "well"]), 30)).stdout == b"well\n"
            whole = await asyncio.wait_for(files.sync_tree(link, here, there, fetch=fetch), 60)
            assert whole.by == "rsync"
            if fetch:
                assert seen(here) == seen(source)
        finally:
            await link.run(["rm", "-rf", far])
