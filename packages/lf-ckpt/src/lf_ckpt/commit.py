"""How a small file (MANIFEST, FORMAT) becomes visible: complete or not at all, on every kind of storage.

RenameCommit      NAME.tmp, fsync, rename, fsync of the directory: local file systems.
MarkerLastCommit  where rename is refused or not to be trusted (object stores mounted through FUSE answer ENOSYS or
                  EPERM, safetensors#792). NAME is written in place while NAME.tmp, complete and durable, stands beside
                  it; NAME.tmp goes last. A bad NAME with a NAME.tmp is unfinished, a bad NAME without one is damaged.
PutCommit         object stores, where a file appears whole when it is synced.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Protocol

from .errors import CkptError
from .files import read_all
from .storage import Storage

_log = logging.getLogger("lf_ckpt")
TEMPORARY = ".tmp"
_NO_RENAME = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV)
_NO_SYNC_DIR = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class Commit(Protocol):
    """One way of making files visible."""

    @property
    def note(self) -> str:
        """What is done, and what was met that made it so."""

    def publish(self, folder: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write `folder/name` so that readers see all of it or nothing; `durable=False` for mere hints."""

    def sync_dir(self, path: str) -> None:
        """Make names in a directory durable as far as the storage can."""


class RenameCommit:
    """Rename into place. Goes over to MarkerLastCommit when rename is refused, unless the user asked for "local"."""

    def __init__(self, files: Storage) -> None:
        self._files, self._strict = files, files.traits.asked == "local"
        self._instead: MarkerLastCommit | None = None
        self._names = _Names(files)
        self._met = ""

    @property
    def note(self) -> str:
        """See Commit."""
        return (self._instead.note + self._met) if self._instead else "rename" + self._names.met

    def publish(self, folder: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """See Commit. CkptError when rename is refused and mode="local" was asked for."""
        if self._instead is not None:
            self._instead.publish(folder, name, data, durable=durable)
            return
        temporary, final = os.path.join(folder, name + TEMPORARY), os.path.join(folder, name)
        write_file(self._files, temporary, data, durable=durable)
        try:
            self._files.rename(temporary, final)
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            self._instead = self._without_rename(error, final)
            self._instead.publish(folder, name, data, durable=durable)
            return
        if durable:
            self.sync_dir(folder)

    def sync_dir(self, path: str) -> None:
        """See Commit."""
        self._names.sync(path)

    def _without_rename(self, error: OSError, path: str) -> MarkerLastCommit:
        if self._strict:
            raise CkptError(
                f'{path}: rename is refused here ({error.strerror}); open with mode="shared"'
            ) from error
        _log.warning("%s: rename is refused (%s); steps are committed by a marker written last", path, error)
        self._met = f" (rename refused: {error.strerror})"
        return MarkerLastCommit(self._files)


class MarkerLastCommit:
    """Write in place, guarded by a complete copy under another name."""

    def __init__(self, files: Storage) -> None:
        self._files, self._names = files, _Names(files)

    @property
    def note(self) -> str:
        """See Commit."""
        return "marker last" + self._names.met

    def publish(self, folder: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """See Commit."""
        guard, final = os.path.join(folder, name + TEMPORARY), os.path.join(folder, name)
        if not durable:
            write_file(self._files, final, data, durable=False)
            return
        write_file(self._files, guard, data, durable=True)
        self.sync_dir(folder)
        write_file(self._files, final, data, durable=True)
        self.sync_dir(folder)
        self._read_back(final, data)
        self._files.unlink(guard)

    def sync_dir(self, path: str) -> None:
        """See Commit."""
        self._names.sync(path)

    def _read_back(self, path: str, data: bytes) -> None:
        """Close-to-open: what a fresh open shows is what the server has."""
        if read_all(self._files, path, len(data)) != data:
            raise OSError(errno.EIO, "a file reads back differently after fsync", path)


class PutCommit:
    """One put."""

    note = "put last"

    def __init__(self, files: Storage) -> None:
        self._files = files

    def publish(self, folder: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """See Commit; a hint is as durable as the rest."""
        write_file(self._files, os.path.join(folder, name), data, durable=True)

    def sync_dir(self, path: str) -> None:
        """Nothing to do: there are no directories."""


def choose_commit(files: Storage) -> Commit:
    """The way that fits the storage."""
    if files.traits.whole:
        return PutCommit(files)
    return MarkerLastCommit(files) if files.traits.shared else RenameCommit(files)


def write_file(files: Storage, path: str, data: bytes, *, durable: bool) -> None:
    """Write a small file under its own name."""
    fd = files.create(path)
    try:
        files.write(fd, [data], 0)
        if durable:
            files.sync(fd)
    finally:
        files.close(fd)


class _Names:
    """Directory fsync, where there is one."""

    def __init__(self, files: Storage) -> None:
        self._files, self.met = files, ""

    def sync(self, path: str) -> None:
        """Fsync a directory; a refusal is remembered, and an error only when mode="local" was asked for."""
        try:
            self._files.sync_dir(path)
        except OSError as error:
            if error.errno not in _NO_SYNC_DIR:
                raise
            if self._files.traits.asked == "local":
                raise CkptError(
                    f'{path}: directory fsync is refused here ({error.strerror}); open with mode="shared"'
                ) from error
            if not self.met:
                _log.warning("%s: directory fsync is refused (%s)", path, error)
            self.met = f" (directory fsync refused: {error.strerror})"
