"""One writer per store: a kernel lock for exclusion, an owner record for everything the kernel lock cannot know.

The kernel drops the lock with its process, so a killed writer never blocks the next one. Some network file systems
grant such locks without asking other hosts; there the record decides, and an owner on another host is never
pushed aside.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import weakref
from dataclasses import asdict, dataclass

from .errors import LockedError
from .files import read_all
from .storage import Storage

_log = logging.getLogger("lf_ckpt")
_RECORD_LIMIT = 4096


@dataclass(frozen=True)
class Owner:
    """A process, told apart from later ones with the same number by boot id and start time (clock ticks)."""

    host: str
    boot_id: str
    pid: int
    start_time: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} (boot {self.boot_id[:8]}, start {self.start_time})"


def this_process() -> Owner:
    """Owner record of the caller."""
    return Owner(socket.gethostname(), _boot_id(), os.getpid(), _start_time(os.getpid()) or 0)


class StoreLock:
    """The held lock. `release` is idempotent; a forked child closes its copy without releasing."""

    kind = "flock"

    def __init__(self, files: Storage, path: str) -> None:
        """Take the lock or raise LockedError naming the owner."""
        self._files, self._path = files, path
        fd = files.lock(path)
        if fd is None:
            owner = _read_owner(files, path)
            raise LockedError(path, str(owner or "unknown process"), "close it, or open with read_only=True")
        self._fd: int | None = fd
        try:
            self._judge(_read_owner(files, path))
            files.put(fd, (json.dumps(asdict(this_process())) + "\n").encode())
        except BaseException:
            self._drop()
            raise
        _held.add(self)

    def release(self) -> None:
        """Erase the record and unlock."""
        if self._fd is not None:
            try:
                self._files.put(self._fd, b"")
            finally:
                self._drop()

    def _drop(self) -> None:
        if self._fd is not None:
            self._files.close(self._fd)
            self._fd = None

    def _judge(self, previous: Owner | None) -> None:
        """The kernel lock is ours; decide whether a record that was left behind may be replaced."""
        if previous is None:
            return
        me = this_process()
        same_host = previous.boot_id == me.boot_id or previous.host == me.host
        if not same_host:
            advice = f"if that process is gone, remove {self._path}"
            raise LockedError(self._path, str(previous), advice)
        if (
            previous.boot_id == me.boot_id
            and previous.pid != me.pid
            and _start_time(previous.pid) == previous.start_time
        ):
            raise LockedError(
                self._path, str(previous), "it is alive and this file system does not lock; end it first"
            )
        _log.warning("%s: taking over from %s, which ended without closing the store", self._path, previous)


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive; closing its copy does not unlock the parent."""
    for lock in list(_held):
        if lock._fd is not None:
            os.close(lock._fd)
            lock._fd = None


os.register_at_fork(after_in_child=_forget_in_child)


def _read_owner(files: Storage, path: str) -> Owner | None:
    """The record, or None when it is empty or not readable as one."""
    data = read_all(files, path, _RECORD_LIMIT)
    try:
        fields = json.loads(data or b"null")
        return Owner(
            str(fields["host"]), str(fields["boot_id"]), int(fields["pid"]), int(fields["start_time"])
        )
    except (ValueError, KeyError, TypeError):
        return None


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when there is none (a zombie counts as none)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
