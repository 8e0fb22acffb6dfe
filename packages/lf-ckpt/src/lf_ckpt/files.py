"""The only place where lf-ckpt touches a file system.

Every effect of the store is one of these methods, so a test can fail, tear or stop at any of them, and another
kind of storage is another class with the same methods.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Sequence

from .storage import LOCAL, Buffer, Storage, Traits

__all__ = ["Buffer", "FileLayer", "exhausted", "gone", "read_all"]
_NO_LOCK = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FileLayer:
    """POSIX files. All methods raise OSError as the kernel reports it; paths are absolute."""

    traits: Traits = LOCAL

    def create(self, path: str) -> int:
        """Open `path` for writing, empty."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def open_direct(self, path: str) -> int | None:
        """Open an existing file for writes past the page cache; None where that is refused.

        Such writes need memory, offset and length at 4 KiB edges. They spare the copy into the cache, and fsync then
        has nothing left to do.
        """
        if self.traits.shared:
            return None
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise

    def open_direct_read(self, path: str) -> int | None:
        """Open a file for reads past the page cache; None where that is refused."""
        if self.traits.shared:
            return None
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise

    def cached(self, fd: int, offset: int) -> bool:
        """Whether the block at `offset` can be read without the disk; False where the kernel does not say."""
        try:
            return os.preadv(fd, [bytearray(4096)], offset, os.RWF_NOWAIT) > 0
        except OSError:
            return False

    def open(self, path: str) -> int:
        """Open `path` for reading; a pipe of that name does not make the caller wait for a writer."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write the buffers one after another at `offset`; short writes are continued."""
        todo = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while todo:
            done = os.pwritev(fd, todo, offset)
            offset += done
            while todo and done >= len(todo[0]):
                done -= len(todo.pop(0))
            if todo:
                todo[0] = todo[0][done:]

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`; the bytes read are fewer only at the end of the file."""
        got = 0
        while got < len(view):
            more = os.preadv(fd, [view[got:]], offset + got)
            if more == 0:
                break
            got += more
        return got

    def size(self, fd: int) -> int:
        """Length of an open file in bytes."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """Make data and length of an open file durable."""
        os.fsync(fd)

    def sync_dir(self, path: str) -> None:
        """Make creations, renames and removals in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` in one step."""
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Create one directory; FileExistsError when it is there."""
        os.mkdir(path, 0o755)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def names(self, path: str) -> list[str]:
        """Names in a directory."""
        return os.listdir(path)

    def exists(self, path: str) -> bool:
        """Whether a path exists. An answer that cannot be had is an error: "no" would mark a step as unfinished."""
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself leads nowhere, for certain
                return False
            raise
        return True

    def plain_folder(self, path: str) -> bool:
        """Whether a folder lies here itself and holds files only: no link, no file of its name."""
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return False
            with os.scandir(path) as entries:
                return not any(entry.is_dir(follow_symlinks=False) for entry in entries)
        except FileNotFoundError:
            return True

    def free(self, path: str) -> int:
        """Bytes that an unprivileged process can still write to the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str) -> tuple[int, str] | None:
        """Open `path` and take an exclusive lock that the kernel drops with this process; None when it is held.

        (descriptor, "OFD" or "flock"); OSError(ENOLCK) when the file system refuses both.
        """
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                kind = _lock_ofd(fd) or _lock_flock(fd)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd, kind
            except BlockingIOError:
                os.close(fd)
                return None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the file was replaced between the two calls: its lock is nobody's

    def unlock(self, fd: int) -> None:
        """Drop the lock, also for copies of the descriptor in other processes, and close it."""
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def put(self, fd: int, data: bytes) -> None:
        """Replace the whole content of a small open file (the lock's owner record)."""
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        os.fsync(fd)

    def claim(self, path: str, data: bytes) -> bool:
        """Create a small durable file; False when it is there already."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.pwrite(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return True


def _flock(kind: int) -> bytes:
    """struct flock of the kernel on 64-bit Linux over the whole file; l_pid must be 0 for OFD locks."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _lock_ofd(fd: int) -> str | None:
    """Lock the open file description; None where that is refused, BlockingIOError when it is held."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from error
        if error.errno in _NO_LOCK:
            return None
        raise
    return "OFD"


def _lock_flock(fd: int) -> str:
    """The same by flock; OSError(ENOLCK) where that is refused too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCK:
            raise OSError(errno.ENOLCK, f"OFD lock and flock are refused: {error.strerror}") from error
        raise
    return "flock"


def read_all(files: Storage, path: str, limit: int) -> bytes | None:
    """Content of a small file, or None when it is longer than `limit` bytes."""
    fd = files.open(path)
    try:
        size = files.size(fd)
        if size > limit:
            return None
        data = bytearray(size)
        got = files.read(fd, memoryview(data), 0)
        return bytes(data[:got])
    finally:
        files.close(fd)


def gone(error: BaseException) -> bool:
    """Whether an error says that a file was removed: by name or, over a network, under an open descriptor."""
    return isinstance(error, FileNotFoundError) or (
        isinstance(error, OSError) and error.errno == errno.ESTALE
    )


def exhausted(error: BaseException) -> bool:
    """Whether an error says that this process or host lacks descriptors or memory: nothing about the file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
