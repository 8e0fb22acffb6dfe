"""A file that appears under its final name complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path

from lf_format._errors import FormatError

_IOV_MAX = 1024  # of Linux


class AtomicFile:
    """Writes go to a temporary name in the same directory; `publish` renames it.

    `discard`, garbage collection and interpreter exit remove the temporary file. Only a killed process
    leaves one behind, under a name that starts with a dot and ends with .tmp.
    """

    def __init__(self, path: Path) -> None:
        check_output(path)
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        # Not mkstemp: its 0600 would survive the rename; the user's umask should decide.
        self._fd = os.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._cleanup = weakref.finalize(self, _remove, self._fd, self.temporary, os.getpid())

    def write_at(self, data: bytes, offset: int) -> None:
        """Writes all of `data` at `offset`; OSError when the disk is full."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def write_pieces_at(self, pieces: Sequence[bytes | memoryview], offset: int) -> None:
        """Writes `pieces` one after another from `offset` on; OSError when the disk is full."""
        for at in range(0, len(pieces), _IOV_MAX):
            part = pieces[at : at + _IOV_MAX]
            size = sum(map(len, part))
            written = os.pwritev(self._fd, part, offset)
            if written < size:
                self.write_at(b"".join(part)[written:], offset + written)
            offset += size

    def seal(self) -> None:
        """Makes the content durable under the temporary name."""
        os.fsync(self._fd)

    def publish(self) -> None:
        """Gives the sealed file its final name and makes the name durable."""
        os.rename(self.temporary, self.path)
        self._cleanup.detach()
        os.close(self._fd)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Removes the temporary file; nothing happens after `publish`."""
        self._cleanup()


def _remove(fd: int, temporary: Path, owner: int) -> None:
    # A forked child inherits this finalizer but not the file.
    if os.getpid() == owner:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def check_output(path: Path) -> None:
    """FormatError for a device or a FIFO, which publishing a file would replace."""
    if path.exists() and not path.is_file():
        raise FormatError("output path is no regular file", path=path)


def refuse_same(inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """FormatError when `output` is one of `inputs`, which publishing it would replace."""
    for path in inputs:
        if Path(output).exists() and os.path.samefile(path, output):
            raise FormatError("output is one of the inputs", path=output)


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
