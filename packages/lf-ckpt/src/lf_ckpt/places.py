"""Where a path leads: a local file system, one that other hosts share, or an object store."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote

from .errors import CkptError
from .files import FileLayer
from .storage import Mode, Storage, Traits

# Anything else (nfs, nfs4, lustre, gpfs, ceph, cifs, 9p, virtiofs, beegfs, fuse.*, and names not known yet) is shared:
# the safe way works everywhere.
_LOCAL_TYPES: Final = frozenset(
    {
        *("bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs"),
        *("overlay", "ramfs", "reiserfs", "rootfs", "tmpfs", "xfs", "zfs"),
    }
)

_HALF_URL: Final = re.compile(r"[a-z][a-z0-9]+:/[^/]")


def locate(
    path: str | os.PathLike[str], mode: Mode = "auto", files: Storage | None = None
) -> tuple[Storage, str]:
    """The storage of a path or URL and the path within it, links resolved. CkptError when they do not fit `mode`."""
    text = os.fspath(path)
    if not isinstance(path, str) and _HALF_URL.match(text):
        raise ValueError(f"{text}: a Path folds the // of a URL; give it as a string")
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    if "://" in text:
        if files is not None:
            raise ValueError(f"{text}: a URL names its own storage; leave `files` out")
        if mode == "local":
            raise CkptError(f'{text}: mode="local" is for paths; leave it out')
        from .objects import object_layer

        return object_layer(text)
    if files is None:
        files = FileLayer()
    if not isinstance(files, FileLayer):
        return files, text
    where = os.path.realpath(text)  # resolved once: a link changed later does not move the store
    files.traits = posix_traits(where, mode, _mounts())
    return files, where


def posix_traits(path: str, mode: Mode, mounts: str) -> Traits:
    """Traits of a resolved path; `mounts` is the text of /proc/self/mountinfo. Pure."""
    kind = file_system(path, mounts)
    if mode != "auto":
        return Traits(kind or "unknown", f"mode={mode!r}, as asked", mode, mode == "shared")
    if kind is None:
        return Traits("unknown", "/proc/self/mountinfo does not tell the file system", shared=True)
    if kind in _LOCAL_TYPES:
        return Traits(kind, f"{kind} belongs to one host")
    return Traits(kind, f"{kind} may be seen by other hosts", shared=True)


def file_system(path: str, mounts: str) -> str | None:
    """Type of the file system that holds a resolved path: the deepest mount; of several at one point the last."""
    best, found = -1, None
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        if not dash or len(fields) < 6 or not kind:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), kind
    return found


def _unescape(text: str) -> str:
    """Octal escapes of mountinfo (blank, tab, newline, backslash)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mounts() -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
