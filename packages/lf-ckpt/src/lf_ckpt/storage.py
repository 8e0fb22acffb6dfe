"""What the store asks of a place that holds files, and what it has to know about one.

`FileLayer` (POSIX) and `ObjectLayer` (fsspec) are the two that come with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

Buffer: TypeAlias = bytes | memoryview
Mode: TypeAlias = Literal["auto", "local", "shared"]


@dataclass(frozen=True)
class Traits:
    """How a place differs from a local disk.

    kind: its name, as mounted ("ext4", "nfs4") or as fsspec calls it. why: the reason for `shared`, in words.
    asked: the mode that the user wanted. shared: other hosts see it, so no rename, O_DIRECT or directory fsync is
    relied on, and an open file may be taken away. whole: a file appears at `sync`, complete (object stores).
    """

    kind: str
    why: str
    asked: Mode = "auto"
    shared: bool = False
    whole: bool = False


LOCAL = Traits("local", "not looked at")


class Storage(Protocol):
    """Files by path and descriptor. Errors are OSError with an errno; FileNotFoundError where nothing is there."""

    traits: Traits

    def create(self, path: str) -> int:
        """Open `path` for writing, empty."""

    def open_direct(self, path: str) -> int | None:
        """Open an existing file for writes past the cache; None where that is refused."""

    def open(self, path: str) -> int:
        """Open `path` for reading."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write the buffers one after another at `offset`. Every byte up to the end is written once before `sync`."""

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`; the bytes read are fewer only at the end of the file."""

    def size(self, fd: int) -> int:
        """Length of an open file in bytes."""

    def sync(self, fd: int) -> None:
        """Make data and length durable; with `traits.whole` the file appears here, and only here."""

    def sync_dir(self, path: str) -> None:
        """Make creations, renames and removals in a directory durable."""

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` in one step."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def mkdir(self, path: str) -> None:
        """Create one directory; FileExistsError when it is there."""

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""

    def names(self, path: str) -> list[str]:
        """Names in a directory."""

    def exists(self, path: str) -> bool:
        """Whether a path exists."""

    def plain_folder(self, path: str) -> bool:
        """Whether removing the files of a folder and then the folder removes it, and nothing elsewhere."""

    def free(self, path: str) -> int:
        """Bytes that can still be written near `path`."""

    def lock(self, path: str) -> tuple[int, str] | None:
        """Take an exclusive lock that ends with this process; None when it is held, OSError(ENOLCK) when there is none.

        The descriptor of the lock's file and the kind of lock.
        """

    def unlock(self, fd: int) -> None:
        """Drop a lock and close its file."""

    def put(self, fd: int, data: bytes) -> None:
        """Replace the whole content of the small file that `lock` opened."""

    def claim(self, path: str, data: bytes) -> bool:
        """Create a small durable file; False when it is there already."""
