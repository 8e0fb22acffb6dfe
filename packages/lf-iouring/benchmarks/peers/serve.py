"""One process of a benchmark: prepares its store, then times the passes that the driver asks for.

The driver (rounds.py) writes one JSON object a line to standard input and reads one a line from standard output.
A pass takes batches of one case for some seconds. Start-up is left out: the clock runs from the batch after the
`skip` first ones, which are compared with what was stored, and stops while a new epoch begins.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any

IN_PROCESS, WORKERS, LARGE, COLD = "in-process", "worker processes", "large batches, cut", "cold"


@dataclass(frozen=True)
class Case:
    """One row: `batches(epoch)` yields the batches of one epoch in that epoch's random order.

    `skip` is at least what the loader has queued when its first batch comes. `tried` marks a configuration that
    lost to another one of the same library; it runs only when asked for.
    """

    name: str
    batches: Callable[[int], Iterable[Any]]
    skip: int = 1
    group: str = IN_PROCESS
    tried: bool = False


def serve(
    prepare: Callable[[], list[Case]], check: Callable[[Any], None], items: int, packages: Iterable[str]
) -> None:
    """Answer the driver until it closes standard input. `items` are the tokens or frames of a batch."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    versions = {name: version(name) for name in packages}
    cases = prepare()
    hello = [{"name": c.name, "group": c.group, "tried": c.tried} for c in cases]
    replies.write(json.dumps({"cases": hello, "versions": versions}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = timed_pass(cases[request["case"]], request["epoch"], request["seconds"], check, items)
        except Exception as error:  # whatever a library raises is the row's result
            *_, last = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {last}"[:300]}
        replies.write(json.dumps(answer) + "\n")
    replies.flush()
    os._exit(0)  # a library whose threads or workers hang at exit must not hold up the run


def timed_pass(
    case: Case, epoch: int, seconds: float, check: Callable[[Any], None], items: int
) -> dict[str, float]:
    """Items, wall and CPU seconds (workers included) of one pass of about `seconds`."""
    batches, wall, cpu = 0, 0.0, 0.0
    for number in count(epoch * 1000):
        iterator = iter(case.batches(number))
        for batch in islice(iterator, case.skip):
            check(batch)
        others = descendants_cpu()
        used, began = time.process_time(), time.perf_counter()
        got = drain(iterator, began + seconds - wall)
        wall += time.perf_counter() - began
        cpu += time.process_time() - used
        cpu += descendants_cpu() - others
        if not got:
            raise RuntimeError(f"no batch after the first {case.skip} of an epoch")
        batches += got
        if wall >= seconds:
            break
    return {"items": batches * items, "wall": wall, "cpu": cpu}


def drain(iterator: Iterator[Any], deadline: float) -> int:
    """Batches taken until the deadline or the end of the epoch."""
    batches = 0
    for _ in iterator:
        batches += 1
        if time.perf_counter() >= deadline:
            break
    return batches


def descendants_cpu() -> float:
    """CPU seconds of the descendants of this process, living and ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        pid = int(entry.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    for pid in sorted(parents):  # a child's number follows its parent's
        if parents[pid] in family:
            family.add(pid)
    living = sum(ticks[pid] for pid in family - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + living
