"""Counters of processor and kernel for the calling thread, by perf_event_open(2); absent ones with the reason."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COUNTERS", "HARDWARE", "Counters"]

# name -> (perf_type_id, config) of linux/perf_event.h
COUNTERS: dict[str, tuple[int, int]] = {
    "cycles": (0, 0),
    "instructions": (0, 1),
    "cache-references": (0, 2),
    "cache-misses": (0, 3),
    "branches": (0, 4),
    "branch-misses": (0, 5),
    "task-clock": (1, 1),
    "page-faults": (1, 2),
    "context-switches": (1, 3),
}
HARDWARE = ("cycles", "instructions", "cache-misses")
# the one number of the old machine; all later ones share the generic table
_CALL = 298 if platform.machine() == "x86_64" else 241
_ATTR = "<IIQQQQQIIQ"  # perf_event_attr of PERF_ATTR_SIZE_VER0, 64 bytes
_TIMES = 1 | 2  # PERF_FORMAT_TOTAL_TIME_ENABLED, _RUNNING: a read gives value, enabled, running
_USER_ONLY = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv: allowed up to perf_event_paranoid 2
_CLOEXEC = 8
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


def _reason(code: int) -> str:
    if code in (errno.EACCES, errno.EPERM):
        level = _PARANOID.read_text().strip() if _PARANOID.exists() else "unknown"
        return f"forbidden (perf_event_paranoid is {level}; 2 or less, or CAP_PERFMON, is needed)"
    if code in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return "this processor or virtual machine has no such counter"
    if code == errno.ENOSYS:
        return "the kernel has no perf_event_open, or a sandbox forbids it"
    return f"perf_event_open: {os.strerror(code)}"


class Counters:
    """Open counters of the calling thread, user mode only; a context manager that closes them.

    ``names`` and ``files`` are those that could be opened, ``missing`` maps the others to the reason.

    Raises:
        ValueError: a name that :data:`COUNTERS` lacks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in COUNTERS:
                raise ValueError(f"counter {name!r}: choose of {', '.join(COUNTERS)}")
        self.names: list[str] = []
        self.files: list[int] = []
        self.missing: dict[str, str] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        for name in dict.fromkeys(names):
            kind, config = COUNTERS[name]
            user_only = _USER_ONLY if kind == 0 else 0  # a page fault or a switch is counted in the kernel
            for flags in (user_only, _USER_ONLY):
                packed = struct.pack(_ATTR, kind, 64, config, 0, 0, _TIMES, flags, 0, 0, 0)
                attr = ctypes.create_string_buffer(packed, len(packed))
                found = libc.syscall(_CALL, attr, 0, -1, -1, _CLOEXEC)
                code = ctypes.get_errno()
                if found >= 0 or code not in (errno.EACCES, errno.EPERM):
                    break
            if found < 0:
                self.missing[name] = _reason(code)
            else:
                self.names.append(name)
                self.files.append(found)

    def silent(self, name: str, total: int) -> str | None:
        """Why a counter that could be read says nothing: a virtual machine may grant one that never moves."""
        if COUNTERS[name][0] == 0 and total == 0:
            return "it was granted and stayed at 0, so nothing counts behind it"
        return None

    def close(self) -> None:
        """Close all."""
        while self.files:
            os.close(self.files.pop())

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
