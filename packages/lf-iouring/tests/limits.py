"""Imported by the children of tests: takes rights and resources away from the process that calls."""

import ctypes
import os
import resource
import struct
import subprocess

# Nobody in particular. A user of its own for each process: locked memory is counted by user, and another test's
# would be counted too. Below 65,536, which is all that containers map.
NOBODY = 60_000 + os.getpid() % 5_000

_libc = ctypes.CDLL(None, use_errno=True)


def deny(number, errno):
    """Make a system call fail with `errno` from now on, by a seccomp filter."""
    # ld [nr]; jeq #number, ret ERRNO|errno; ret ALLOW
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *i) for i in code))
    header = struct.pack("@HP", len(code), ctypes.addressof(program))
    assert _libc.prctl(38, 1, 0, 0, 0) == 0
    assert _libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0, ctypes.get_errno()


def become(uid=NOBODY):
    """Another user, for good. Root is exempt from RLIMIT_MEMLOCK."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def limit(name, value):
    """setrlimit, soft and hard."""
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def mount(*arguments):
    """mount(8) in a mount namespace of this process's own; False where that is not allowed."""
    if _libc.unshare(0x00020000) or _libc.mount(b"none", b"/", None, 0x44000, None):
        return False
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode == 0


def descriptors():
    """Number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))
