"""Who holds a store: the owner record, and the judgement whether the one left behind may be replaced."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

RECORD_LIMIT: Final = 4096  # bytes
UNKNOWN: Final = -1  # start time of a process that is there but does not show it


@dataclass(frozen=True)
class Owner:
    """A process, told apart from later ones with the same number by boot, pid namespace (inode) and start (ticks).

    nonce: one opened store of that process.
    """

    host: str
    boot_id: str
    pid: int
    pid_namespace: int
    start_time: int
    nonce: str = ""

    def __str__(self) -> str:
        return (
            f"pid {self.pid} on {self.host} (boot {self.boot_id[:8]}, pid namespace {self.pid_namespace}, "
            f"start {self.start_time})"
        )


def this_process(nonce: str = "") -> Owner:
    """Owner record of the caller."""
    return Owner(
        socket.gethostname(), _boot_id(), os.getpid(), _pid_namespace(), _start("self") or UNKNOWN, nonce
    )


def dump_owner(owner: Owner) -> bytes:
    """The record as one JSON line."""
    return (json.dumps(asdict(owner)) + "\n").encode()


def parse_owner(data: bytes | None) -> Owner | None:
    """The record in `data` (None: beyond the limit); None when it is empty, ValueError when it is anything else."""
    if data is not None and not data.strip():
        return None
    try:
        fields = json.loads(data or b"")
        texts = [fields[name] for name in ("host", "boot_id", "nonce")]
        numbers = [fields[name] for name in ("pid", "pid_namespace", "start_time")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an owner record: {error}") from error
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise ValueError("not an owner record: wrong types")
    pid, namespace, start = numbers
    return Owner(texts[0], texts[1], pid, namespace, start, texts[2])


def objection(
    previous: Owner, me: Owner, start_of: Callable[[int], int | None], *, kernel: bool, shared: bool
) -> str | None:
    """Why `previous` may not be replaced; None when it has ended for certain. Pure.

    start_of: start time of a pid of this namespace, None when there is no such process, UNKNOWN when it does not show.
    kernel: the caller holds the kernel's lock. shared: other hosts see the store.
    """
    if not previous.boot_id or not me.boot_id:
        return "whether it still runs cannot be told without a boot id"
    if previous.boot_id != me.boot_id:
        if previous.host != me.host:
            return "it runs on another host"
        if shared or not kernel:
            return "another host of the same name may run it"
        return None  # this host was started again
    if previous.pid_namespace != me.pid_namespace:
        # Its pid means nothing here, but on a local file system the kernel would still hold the lock of a living one:
        # a container that was killed and started again gets its store back.
        return None if kernel and not shared else "it may run in another pid namespace (container)"
    if previous.pid == me.pid and previous.start_time == me.start_time:
        return None  # a store of ours that was dropped without closing
    start = start_of(previous.pid)
    if start is None:
        return None
    if UNKNOWN in (start, previous.start_time):
        return "whether it still runs cannot be told"
    return "it is alive" if start == previous.start_time else None


def start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when there is none (a zombie counts as none), or UNKNOWN."""
    if _proc_is_of_other_namespace():
        return UNKNOWN
    start = _start(str(pid))
    if start is not None:
        return start or None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return UNKNOWN  # hidden by hidepid


def _start(pid: str) -> int | None:
    """Field 22 of /proc/PID/stat, 0 for a zombie, None where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] == b"Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _proc_is_of_other_namespace() -> bool:
    """Whether /proc numbers processes in another way than getpid (unshare without mounting a new /proc)."""
    try:
        return os.readlink("/proc/self") != str(os.getpid())
    except OSError:
        return True


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
