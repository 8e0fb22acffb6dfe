"""A store on anything that fsspec reaches (extra `lf-ckpt[fsspec]`): S3, GCS, Azure, SFTP, memory.

Nothing is renamed, appended to or locked. Small files are put at once, long ones streamed in parts; on object stores
neither is visible before it is complete. Reads are ranges, so several threads read in parallel.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from .errors import CkptError
from .storage import Buffer, Traits

PART_BYTES: Final = 8 << 20  # of a streamed upload; S3 wants at least 5 MiB and at most 10,000 parts
_WHOLE: Final = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "cos"}
)


def object_layer(url: str) -> tuple[ObjectLayer, str]:
    """Layer and path of a URL. CkptError when fsspec, or the package that it needs for the URL, is not installed."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CkptError(f"{url}: needs fsspec: pip install 'lf-ckpt[fsspec]'") from error
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CkptError(f"{url}: {error}") from error
    return ObjectLayer(system), path.rstrip("/")


class ObjectLayer:
    """`Storage` over an fsspec file system. Whatever that raises becomes an OSError with an errno."""

    def __init__(self, system: Any, part_bytes: int = PART_BYTES) -> None:
        self._system, self._part_bytes = system, part_bytes
        names = (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
        whole = not _WHOLE.isdisjoint(names)
        why = f"{names[0]} {'shows files when they are complete' if whole else 'may show unfinished files'}"
        self.traits = Traits(f"fsspec {names[0]}", why, shared=True, whole=whole)
        self._open: dict[int, _Upload | _Object] = {}
        self._numbers = itertools.count(1)

    def create(self, path: str) -> int:
        """Begin an upload; nothing is visible of it yet."""
        return self._register(_Upload(self._system, path, self._part_bytes))

    def open_direct(self, path: str) -> int | None:
        """None: there is no page cache here."""
        return None

    def open(self, path: str) -> int:
        """Look a file up."""
        return self._register(_Object(path, int(self._info(path)["size"])))

    def close(self, fd: int) -> None:
        """Forget a descriptor; an upload that was not synced is thrown away."""
        file = self._open.pop(fd)
        if isinstance(file, _Upload):
            file.discard()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Add to an upload; pieces may come in any order and wait for those before them."""
        self._upload(fd).write(b"".join(buffers), offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """One range request."""
        file = self._object(fd)
        end = min(offset + len(view), file.size)
        if offset >= end:
            return 0
        with _os_errors(file.path):
            data = self._system.cat_file(file.path, start=offset, end=end)
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        """Length when it was opened."""
        return self._object(fd).size

    def sync(self, fd: int) -> None:
        """Finish an upload: the file appears."""
        self._upload(fd).finish()

    def sync_dir(self, path: str) -> None:
        """Nothing to do: there are no directories."""

    def rename(self, old: str, new: str) -> NoReturn:
        """Refused: most stores can only copy."""
        raise OSError(errno.ENOSYS, "object stores do not rename", old)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        with _os_errors(path):
            self._system.rm_file(path)

    def mkdir(self, path: str) -> None:
        """Create a directory where there are such."""
        if not self.traits.whole:
            with _os_errors(path):
                self._system.mkdir(path, create_parents=False)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory where there are such."""
        if not self.traits.whole:
            with _os_errors(path):
                self._system.rmdir(path)

    def names(self, path: str) -> list[str]:
        """Names below a prefix; none when nothing is there."""
        try:
            with _os_errors(path):
                self._system.invalidate_cache(path)
                found = self._system.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [
            name
            for full in found
            if (name := os.path.basename(full.rstrip("/"))) and full.rstrip("/") != path
        ]

    def exists(self, path: str) -> bool:
        """Whether a file is there. fsspec's own `exists` takes every error for a no, also a lost network."""
        try:
            self._info(path)
        except FileNotFoundError:
            return False
        return True

    def plain_folder(self, path: str) -> bool:
        """Always: prefixes are no links."""
        return True

    def free(self, path: str) -> int:
        """No limit is known."""
        return sys.maxsize

    def lock(self, path: str) -> NoReturn:
        """Refused: the owner record decides."""
        raise OSError(errno.ENOLCK, "object stores have no locks", path)

    def unlock(self, fd: int) -> NoReturn:
        """Refused, as `lock` is."""
        raise OSError(errno.ENOLCK, "object stores have no locks")

    def put(self, fd: int, data: bytes) -> NoReturn:
        """Refused, as `lock` is."""
        raise OSError(errno.ENOLCK, "object stores have no locks")

    def claim(self, path: str, data: bytes) -> bool:
        """Create if absent: a conditional put where fsspec's file system has one, else a look and a put."""
        if self.exists(path):
            return False
        try:
            with _os_errors(path):
                self._system.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _info(self, path: str) -> dict[str, Any]:
        with _os_errors(path):
            self._system.invalidate_cache(path)
            info: dict[str, Any] = self._system.info(path)
            return info

    def _register(self, file: _Upload | _Object) -> int:
        number = next(self._numbers)
        self._open[number] = file
        return number

    def _upload(self, fd: int) -> _Upload:
        file = self._open[fd]
        if not isinstance(file, _Upload):
            raise OSError(errno.EBADF, "opened for reading", file.path)
        return file

    def _object(self, fd: int) -> _Object:
        file = self._open[fd]
        if not isinstance(file, _Object):
            raise OSError(errno.EBADF, "opened for writing", file.path)
        return file


@dataclass(frozen=True)
class _Object:
    path: str
    size: int


class _Upload:
    """A file on its way: gathered up to a part, then streamed. Thread-safe."""

    def __init__(self, system: Any, path: str, part_bytes: int) -> None:
        self.path = path
        self._system, self._part_bytes = system, part_bytes
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._part = bytearray()
        self._stream: Any = None
        self._finished = False

    def write(self, data: bytes, offset: int) -> None:
        """Take a piece; OSError(EINVAL) when it goes back behind what was sent."""
        with self._lock:
            if offset < self._next:
                raise OSError(errno.EINVAL, "an object cannot be written twice", self.path)
            if data:
                self._waiting[offset] = data
            while (piece := self._waiting.pop(self._next, None)) is not None:
                self._next += len(piece)
                self._part += piece
                if len(self._part) >= self._part_bytes:
                    self._send()

    def finish(self) -> None:
        """Make the file visible."""
        with self._lock:
            if self._finished:
                return
            if self._waiting:
                raise OSError(errno.EINVAL, f"bytes from {self._next} on were never written", self.path)
            if self._stream is None:
                with _os_errors(self.path):
                    self._system.pipe_file(self.path, bytes(self._part))
            else:
                self._send()
                with _os_errors(self.path):
                    self._stream.close()
            self._finished, self._part = True, bytearray()

    def discard(self) -> None:
        """Throw away what was streamed, unless it is finished."""
        stream, self._stream = self._stream, None
        if stream is None or self._finished:
            return
        with contextlib.suppress(Exception):
            stream.discard()
        # Closing, also when it is garbage collected, would publish the torn file.
        with contextlib.suppress(Exception):
            stream.closed = True

    def _send(self) -> None:
        with _os_errors(self.path):
            if self._stream is None:
                self._stream = self._system.open(self.path, "wb", block_size=self._part_bytes)
            self._stream.write(bytes(self._part))
        self._part.clear()


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Errors of fsspec file systems, which often lack an errno or are of the network library, as OSError with one."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
    except PermissionError as error:
        raise PermissionError(errno.EACCES, str(error), path) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
