"""Background threads step back: a higher nice value and the last place in the I/O queue, for the calling thread only.

Linux keeps both per thread. An unprivileged thread cannot take them back, so only threads of lf-ckpt's own do this.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

NICE = 10
_WHO_THREAD = 1  # IOPRIO_WHO_PROCESS, which means one thread
_BEST_EFFORT_LAST = 2 << 13 | 7  # IOPRIO_CLASS_BE, level 7; the idle class may wait for ever on a busy disk
# include/uapi/asm-generic/unistd.h has 30; x86 has its own table.
_IOPRIO_SET = {"x86_64": 251, "i686": 289, "aarch64": 30, "riscv64": 30, "loongarch64": 30}


def lower_priority() -> str:
    """Lower the calling thread; returns what came of it, refusals included."""
    return f"{_lower_cpu()}, {_lower_io()}"


def _lower_cpu() -> str:
    try:
        nice = max(os.getpriority(os.PRIO_PROCESS, thread := threading.get_native_id()), NICE)
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        return f"CPU priority unchanged ({error.strerror})"
    return f"nice {nice}"


def _lower_io() -> str:
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return f"I/O priority unchanged (system call unknown on {platform.machine()})"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(number, _WHO_THREAD, threading.get_native_id(), _BEST_EFFORT_LAST):
        return f"I/O priority unchanged ({os.strerror(ctypes.get_errno())})"
    return "I/O best effort 7"
