"""One writer per store: a kernel lock for exclusion, an owner record for everything the kernel lock cannot know.

The kernel drops the lock with its process, so a killed writer never blocks the next one. The lock belongs to the open
file (OFD), not to the process: closing some other descriptor of the same file does not lose it, and two stores of one
process exclude each other. Where the kernel or the storage has no locks the record alone decides, which is advisory:
it is created only if absent, and an owner that has not ended for certain is never pushed aside.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterator

from .errors import CkptError, LockedError
from .files import gone, read_all
from .owner import RECORD_LIMIT, Owner, dump_owner, objection, parse_owner, start_of, this_process
from .places import locate
from .storage import Mode, Storage

_log = logging.getLogger("lf_ckpt")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SETTLE = 0.2  # seconds after a takeover by record, in which another taker shows
LOCK = "LOCK"


class StoreLock:
    """The held lock. `release` is idempotent; a forked child forgets its copy without releasing.

    kind: "OFD", "flock", or "owner record (advisory): " and the reason.
    """

    def __init__(self, files: Storage, path: str) -> None:
        """Take the lock or raise LockedError naming the owner and the way out."""
        self._files, self._path = files, path
        self._me = this_process(uuid.uuid4().hex)
        self._fd: int | None = None
        self._claimed = False
        try:
            held = files.lock(path)
        except OSError as error:
            self.kind = f"owner record (advisory): {_no_lock(files, path, error)}"
            self._claim()
        else:
            if held is None:
                raise LockedError(path, *_holder(files, path))
            self._fd, self.kind = held
            self._sign()
        _held.add(self)

    def release(self) -> None:
        """Erase the record and unlock."""
        if self._fd is not None:
            try:
                self._files.put(self._fd, b"")
            finally:
                self._drop()
        if self._claimed:
            self._claimed = False
            if self._is_mine():
                self._files.unlink(self._path)
            else:
                _log.error(
                    "%s: no longer the record of this process; somebody has broken the lock", self._path
                )

    def _sign(self) -> None:
        """The kernel lock is ours: judge the record that was left, then write our own."""
        try:
            self._judge(_read(self._files, self._path), kernel=True)
            assert self._fd is not None
            self._files.put(self._fd, dump_owner(self._me))
        except BaseException:
            self._drop()
            raise

    def _claim(self) -> None:
        """Exclusion by the record alone."""
        took_over = False
        for _ in _attempts(self._path):
            if self._files.claim(self._path, dump_owner(self._me)):
                break
            try:
                self._judge(_read(self._files, self._path), kernel=False)
                self._files.unlink(self._path)
                took_over = True
            except OSError as error:
                if not gone(error):  # released in between
                    raise
        if took_over:
            time.sleep(_SETTLE)
        if not self._is_mine():
            raise LockedError(self._path, "unknown process", "it was opened at the same time; try again")
        self._claimed = True

    def _is_mine(self) -> bool:
        try:
            return read_all(self._files, self._path, RECORD_LIMIT) == dump_owner(self._me)
        except OSError as error:
            if gone(error):
                return False
            raise

    def _judge(self, data: bytes | None, *, kernel: bool) -> None:
        """LockedError unless the record is empty or its owner has ended for certain."""
        try:
            previous = parse_owner(data)
        except ValueError as error:
            raise LockedError(self._path, f"unknown ({error})", _way_out(self._path)) from error
        if previous is None:
            return
        if previous.nonce in {lock._me.nonce for lock in _held if lock._claimed}:
            raise LockedError(self._path, str(previous), "this process has it open already; close that store")
        shared = self._files.traits.shared
        reason = objection(previous, self._me, start_of, kernel=kernel, shared=shared)
        if reason is not None:
            raise LockedError(self._path, str(previous), f"{reason}; {_way_out(self._path)}")
        _log.warning("%s: taking over from %s, which ended without closing the store", self._path, previous)

    def _drop(self) -> None:
        if self._fd is not None:
            self._files.unlock(self._fd)
            self._fd = None


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive; closing its copy does not unlock the parent."""
    for lock in list(_held):
        lock._claimed = False
        if lock._fd is not None:
            os.close(lock._fd)
            lock._fd = None


os.register_at_fork(after_in_child=_forget_in_child)


def break_lock(
    path: str | os.PathLike[str], *, mode: Mode = "auto", files: Storage | None = None
) -> str | None:
    """Erase the owner record of a store whose writer is known to be gone; returns what it said, None when it was empty.

    For an owner that `open` cannot judge: on another host or in another container, or an unreadable record. Raises
    LockedError while a process of this kernel holds the lock: that one can be ended instead.
    """
    storage, where = locate(path, mode, files)
    lock = os.path.join(where, LOCK)
    if not storage.exists(lock):
        return None
    try:
        held = storage.lock(lock)
    except OSError as error:
        _no_lock(storage, lock, error)
        data = _read(storage, lock)
        storage.unlink(lock)
        return _printable(data)
    if held is None:
        raise LockedError(lock, *_holder(storage, lock))
    try:
        data = _read(storage, lock)
        storage.put(held[0], b"")
    finally:
        storage.unlock(held[0])
    return _printable(data)


def _read(files: Storage, path: str) -> bytes | None:
    return read_all(files, path, RECORD_LIMIT)


def _printable(data: bytes | None) -> str | None:
    try:
        owner = parse_owner(data)
    except ValueError:
        return repr(data)
    return None if owner is None else str(owner)


def _holder(files: Storage, path: str) -> tuple[str, str]:
    """Owner and advice for a lock that the kernel says is held."""
    advice = "close it, or open with read_only=True"
    try:
        owner = parse_owner(_read(files, path))
    except (ValueError, OSError):
        owner = None
    if owner is None:
        return "unknown process", advice
    if _has_ended(owner):
        advice = "it has ended, but a process that it forked still holds the lock; end that one"
    return str(owner), advice


def _has_ended(owner: Owner) -> bool:
    me = this_process()
    here = (owner.boot_id, owner.pid_namespace) == (me.boot_id, me.pid_namespace)
    return here and start_of(owner.pid) not in (owner.start_time, -1)


def _way_out(path: str) -> str:
    return f"if it is gone for certain: lf_ckpt.break_lock({os.path.dirname(path)!r}); or open with read_only=True"


def _no_lock(files: Storage, path: str, error: OSError) -> str:
    """Why there is no kernel lock; other errors pass, and so does any with mode="local"."""
    if error.errno not in _NO_LOCKS:
        raise error
    if files.traits.asked == "local":
        raise CkptError(
            f'{path}: locks are refused here ({error.strerror}); open with mode="shared"'
        ) from error
    return error.strerror or "no locks"


def _attempts(path: str) -> Iterator[int]:
    yield from range(8)
    raise LockedError(path, "unknown process", "it is opened and closed all the time; try again")
