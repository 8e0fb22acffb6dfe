"""How much memory this process may still take: the host's, or what is left of its container's limit.

A container's limit does not show in /proc/meminfo. It is that of the process's control group or of any group above it:
memory.max of cgroup v2, memory.limit_in_bytes of v1 (Linux, Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst). Page cache of the group counts as used there though the kernel gives it up, so its inactive part
is added again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple


class _Names(NamedTuple):
    """Files of a memory control group."""

    limit: str
    used: str
    inactive: str  # key in memory.stat


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_memory(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes, the least of host and groups; None where nothing says.

    proc, cgroup: where these file systems are mounted.
    """
    known = [free for free in (_of_host(proc), *_of_groups(proc, cgroup)) if free is not None]
    return min(known, default=None)


def _of_host(proc: str) -> int | None:
    for line in _lines(os.path.join(proc, "meminfo")):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            number = _number(rest.split()[0]) if rest.split() else None
            return None if number is None else number * 1024
    return None


def _of_groups(proc: str, cgroup: str) -> Iterator[int | None]:
    """What is left in the process's group and in each above it, for both versions."""
    for line in _lines(os.path.join(proc, "self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number, controllers) == ("0", ""):
            roots, names = [cgroup, os.path.join(cgroup, "unified")], _V2
        elif "memory" in controllers.split(","):
            roots, names = [os.path.join(cgroup, "memory")], _V1
        else:
            continue
        for root in roots:
            yield from (_left(folder, names) for folder in _line_up(root, path))


def _line_up(root: str, path: str) -> Iterator[str]:
    """The group's folder and those above it; without a cgroup namespace the path inside a container need not exist."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for count in range(len(parts), -1, -1):
        yield os.path.join(root, *parts[:count])


def _left(folder: str, names: _Names) -> int | None:
    """Limit minus use plus inactive page cache, at least 0; None without a limit."""
    limit = _number(_first(folder, names.limit))
    used = _number(_first(folder, names.used))
    if limit is None or used is None:  # "max", or no such group
        return None
    stat = dict(line.split(" ", 1) for line in _lines(os.path.join(folder, "memory.stat")) if " " in line)
    return max(limit - used + (_number(stat.get(names.inactive, "")) or 0), 0)


def _first(folder: str, name: str) -> str:
    return next(iter(_lines(os.path.join(folder, name))), "")


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
