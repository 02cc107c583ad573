"""On what kind of file system a folder lies."""

from __future__ import annotations

from pathlib import Path

# SQLite in WAL mode needs shared memory and sound locks between all who have the file open; on these it has neither.
NETWORK = ("nfs", "cifs", "smb", "sshfs", "ceph", "lustre", "gpfs", "afs", "beegfs", "gluster", "s3fs")


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds `folder` (or its nearest existing parent); "" when not known."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        text = mounts.read_text("utf-8", "replace")
        place = str(folder.resolve())
    except OSError:
        return ""
    best, kind = "", ""
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        columns = head.split(" ")
        if len(columns) < 5 or not tail:
            continue
        mount = columns[4].replace("\\040", " ").replace("\\011", "\t")
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of several on one point, the last hides the others
            best, kind = mount, tail.split(" ", 1)[0]
    return kind
