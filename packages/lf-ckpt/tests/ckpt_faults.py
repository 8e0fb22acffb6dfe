"""File layers that fail, tear, stop or lose power at a chosen call."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lf_ckpt import FileLayer
from lf_ckpt.files import Buffer

EFFECTS = ("create", "write", "sync", "sync_dir", "rename", "unlink", "mkdir", "rmdir")


PAGE = 4096


class Killed(BaseException):
    """The simulated end of the process: nothing of the store may run after it."""


class Recorder(FileLayer):
    """Writes down every effect as (name, bytes written before it)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.written = 0

    def effect(self, name: str, action: Callable[[], None]) -> None:
        """Hook around every effect."""
        self.calls.append((name, self.written))
        action()

    def create(self, path: str) -> int:
        fds: list[int] = []
        self.effect("create", lambda: fds.append(FileLayer.create(self, path)))
        return fds[0]

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self.effect("write", lambda: self.put_buffers(fd, buffers, offset))

    def put_buffers(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """The real write."""
        FileLayer.write(self, fd, buffers, offset)
        self.written += sum(len(buffer) for buffer in buffers)

    def sync(self, fd: int) -> None:
        self.effect("sync", lambda: FileLayer.sync(self, fd))

    def sync_dir(self, path: str) -> None:
        self.effect("sync_dir", lambda: FileLayer.sync_dir(self, path))

    def rename(self, old: str, new: str) -> None:
        self.effect("rename", lambda: FileLayer.rename(self, old, new))

    def unlink(self, path: str) -> None:
        self.effect("unlink", lambda: FileLayer.unlink(self, path))

    def mkdir(self, path: str) -> None:
        self.effect("mkdir", lambda: FileLayer.mkdir(self, path))

    def rmdir(self, path: str) -> None:
        self.effect("rmdir", lambda: FileLayer.rmdir(self, path))


class StopAtCall(Recorder):
    """Dies before effect number `at` counted from `arm`, and at every effect after it."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None

    def arm(self, at: int) -> None:
        """Die before the effect number `at` from now."""
        self.left = at

    def effect(self, name: str, action: Callable[[], None]) -> None:
        if self.left is not None:
            if self.left <= 0:
                raise Killed(name)
            self.left -= 1
        super().effect(name, action)

    def put(self, fd: int, data: bytes) -> None:
        if self.left is not None and self.left <= 0:
            raise Killed("put")
        super().put(fd, data)


class KillAtCall(Recorder):
    """Really kills its process (SIGKILL) before effect number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def effect(self, name: str, action: Callable[[], None]) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        super().effect(name, action)


class KillAtByte(Recorder):
    """Really kills its process (SIGKILL) once `limit` bytes are written, tearing the write that crosses it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def put_buffers(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self.written + len(data) >= self.limit:
            plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)  # a torn write need not be aligned
            os.pwrite(plain, data[: self.limit - self.written], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        super().put_buffers(fd, buffers, offset)


class FailAtCall(Recorder):
    """Raises OSError(code) at one effect, then works again."""

    def __init__(self, at: int, code: int) -> None:
        super().__init__()
        self.at, self.code, self.armed = at, code, False

    def effect(self, name: str, action: Callable[[], None]) -> None:
        if self.armed:
            self.at -= 1
            if self.at == -1:
                raise OSError(self.code, os.strerror(self.code))
        super().effect(name, action)


class FailAtLook(FailAtCall):
    """The same for the calls that only look: open, read, size, names, exists."""

    def effect(self, name: str, action: Callable[[], None]) -> None:
        Recorder.effect(self, name, action)

    def look(self, name: str) -> None:
        """Hook around every look."""
        FailAtCall.effect(self, name, lambda: None)

    def open(self, path: str) -> int:
        self.look("open")
        return super().open(path)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self.look("read")
        return super().read(fd, view, offset)

    def size(self, fd: int) -> int:
        self.look("size")
        return super().size(fd)

    def names(self, path: str) -> list[str]:
        self.look("names")
        return super().names(path)

    def exists(self, path: str) -> bool:
        self.look("exists")
        return super().exists(path)


class Volatile(StopAtCall):
    """Remembers what has not been fsynced; `cut_power` takes it back.

    The worst the POSIX rules allow: unsynced data reads as zeros, unsynced names are undone, newest first. Or only some
    of it, as `cut_power_out_of_order` has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[int, str] = {}
        self.unsynced: dict[str, int] = {}
        self.names_pending: list[tuple[str, Callable[[], None]]] = []

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.paths[fd] = path
        self.unsynced[path] = 0
        self._pending(path, lambda: _forget(path))
        return fd

    def open_direct(self, path: str) -> int | None:
        fd = super().open_direct(path)
        if fd is not None:
            self.paths[fd] = path
        return fd

    def put_buffers(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        super().put_buffers(fd, buffers, offset)
        self.unsynced.setdefault(self.paths[fd], offset)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced.pop(self.paths[fd], None)

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self.names_pending = [(folder, undo) for folder, undo in self.names_pending if folder != path]

    def rename(self, old: str, new: str) -> None:
        before = _content(new)
        super().rename(old, new)
        if old in self.unsynced:
            self.unsynced[new] = self.unsynced.pop(old)
        self._pending(new, lambda: _unrename(old, new, before))

    def unlink(self, path: str) -> None:
        before = _content(path)
        super().unlink(path)
        self._pending(path, lambda: _restore(path, before))

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._pending(path, lambda: shutil.rmtree(path, ignore_errors=True))

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        self._pending(path, lambda: os.makedirs(path, exist_ok=True))

    def cut_power(self, *, lose_data: bool, lose_names: bool) -> None:
        """Bring the directory to a state that a power cut may leave."""
        if lose_data:
            for path in self.unsynced:
                _zero(path)
        if lose_names:
            for _, undo in reversed(self.names_pending):
                undo()

    def cut_power_out_of_order(self, seed: int) -> None:
        """Another state that a power cut may leave: any pages of unsynced data, the first few names of each folder."""
        chance = random.Random(seed)
        for path in sorted(self.unsynced):
            _zero(path, lambda: chance.random() < 0.5)
        made = Counter(folder for folder, _ in self.names_pending)
        kept = {folder: chance.randint(0, made[folder]) for folder in sorted(made)}
        lost = []
        for folder, undo in self.names_pending:
            kept[folder] -= 1
            if kept[folder] < 0:
                lost.append(undo)
        for undo in reversed(lost):
            undo()

    def _pending(self, path: str, undo: Callable[[], None]) -> None:
        self.names_pending.append((os.path.dirname(path), undo))


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _forget(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _zero(path: str, chosen: Callable[[], bool] = lambda: True) -> None:
    """Zeros in the place of the pages that `chosen` says yes to, one after another."""
    with contextlib.suppress(FileNotFoundError):
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            for at in range(0, size, PAGE):
                if chosen():
                    file.seek(at)
                    file.write(bytes(min(PAGE, size - at)))


def _restore(path: str, content: bytes | None) -> None:
    if content is not None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _unrename(old: str, new: str, before: bytes | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(new, old)
    _restore(new, before)


class Refuses(Volatile):
    """A file system that refuses some calls with an error of its own, as FUSE mounts of object stores do."""

    def __init__(self, refused: Mapping[str, int]) -> None:
        super().__init__()
        self.refused = refused

    def effect(self, name: str, action: Callable[[], None]) -> None:
        if name in self.refused:
            raise OSError(self.refused[name], os.strerror(self.refused[name]))
        super().effect(name, action)
