"""How much memory can be had."""

from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be had without swapping, by the kernel's own estimate and the cgroup's limit."""
    limits = [_meminfo("MemAvailable"), _cgroup_room()]
    return min((value for value in limits if value is not None), default=None)


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":")), None)


def _cgroup_room() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(cache.get("inactive_file", 0))
