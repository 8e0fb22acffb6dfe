"""`LOONGFORGE_CPU_AFFINITY`: which CPUs the ranks of a host run on.

0-31,32-63       a list; with two ranks on the host, the first part is rank 0's and the second rank 1's
0-7;8-15         one list for each rank, whatever the lists look like
node:0,node:1    the CPUs of NUMA nodes, in place of their numbers
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lf_hal.errors import AffinityError

__all__ = ["VARIABLE", "Affinity", "apply", "nodes", "parse", "plan"]

VARIABLE = "LOONGFORGE_CPU_AFFINITY"
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Affinity:
    """The CPUs of one rank, and how they were read from the text."""

    cpus: frozenset[int]
    reason: str


def parse(text: str, by_node: Mapping[int, frozenset[int]]) -> tuple[tuple[frozenset[int], ...], ...]:
    """Groups (parted by ";") of parts (parted by ","), each a set of CPUs. AffinityError: unreadable, reversed,
    a CPU named twice in a group, or a node that is not in `by_node`."""
    groups = []
    for group in text.split(";"):
        parts: list[frozenset[int]] = []
        for part in group.split(","):
            cpus = _part(text, part.strip(), by_node)
            twice = cpus & frozenset().union(*parts)
            if twice:
                raise AffinityError(text, part, f"names CPU {min(twice)} again; name each once")
            parts.append(cpus)
        groups.append(tuple(parts))
    return tuple(groups)


def _part(text: str, part: str, by_node: Mapping[int, frozenset[int]]) -> frozenset[int]:
    is_node = part.startswith("node:")
    found = _RANGE.fullmatch(part.removeprefix("node:"))
    if not found:
        raise AffinityError(text, part, 'is none of "3", "0-7", "node:0" and "node:0-1"')
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise AffinityError(text, part, f"runs backwards; write {last}-{first}")
    if not is_node:
        return frozenset(range(first, last + 1))
    missing = [n for n in range(first, last + 1) if n not in by_node]
    if missing:
        there = ", ".join(map(str, sorted(by_node))) or "none"
        raise AffinityError(text, part, f"names NUMA node {missing[0]}; this host has {there}")
    return frozenset[int]().union(*(by_node[n] for n in range(first, last + 1)))


def plan(
    text: str, rank: int, ranks: int, allowed: frozenset[int], by_node: Mapping[int, frozenset[int]]
) -> Affinity:
    """The CPUs of local rank `rank` of `ranks`. AffinityError: unreadable, another number of lists than of ranks, or a
    CPU that is not `allowed` (offline, or outside this process's cgroup or mask)."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} ranks")
    groups = parse(text, by_node)
    if len(groups) > 1:
        if len(groups) != ranks:
            raise AffinityError(text, text, f"has {len(groups)} lists for {ranks} ranks on this host")
        cpus, reason = frozenset[int]().union(*groups[rank]), f"list {rank} of {ranks}"
    elif ranks > 1 and len(groups[0]) == ranks:
        cpus, reason = groups[0][rank], f"part {rank} of {ranks}, as there are as many ranks as parts"
    else:
        cpus, reason = frozenset[int]().union(*groups[0]), f"the whole list, shared by {ranks} ranks"
    beyond = sorted(cpus - allowed)
    if beyond:
        may = _text(allowed)
        raise AffinityError(
            text, str(beyond[0]), f"is offline or not allowed to this process, which may use {may}"
        )
    return Affinity(cpus, reason)


def apply(text: str | None = None, rank: int | None = None, ranks: int | None = None) -> Affinity | None:
    """Binds every thread of this process; None where nothing is asked for. AffinityError as :func:`plan`, and where
    the kernel set something else.

    text: the variable LOONGFORGE_CPU_AFFINITY when left out; rank and ranks: LOCAL_RANK and LOCAL_WORLD_SIZE, as
    torchrun sets them, or one rank. Threads that are started later inherit it.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    if not text.strip():
        return None
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    found = plan(text, rank, ranks, frozenset(os.sched_getaffinity(0)), nodes())
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), found.cpus)
        except ProcessLookupError:
            continue  # ended meanwhile
    have = frozenset(os.sched_getaffinity(0))
    if have != found.cpus:
        raise AffinityError(
            text, text, f"was set, and the kernel has {_text(have)}; look at the cpuset cgroup"
        )
    return found


def nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """CPUs by NUMA node, from /sys; nodes without CPUs are left out."""
    found = {}
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        try:
            text = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        if text:
            found[int(path.name[4:])] = frozenset[int]().union(
                *(part for group in parse(text, {}) for part in group)
            )
    return found


def _text(cpus: frozenset[int]) -> str:
    """A CPU list as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
