"""A recorder that counts bytes as a device would, so that budgets can be tested without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lf_graph._backend import T
from lf_graph._recorder import RecordBackend, RecordedGraph


@dataclass
class MeteredGraph(RecordedGraph):
    """Gives back what it kept when it is closed."""

    owner: MeteredBackend
    kept: int

    def close(self) -> None:
        super().close()
        self.owner.in_use -= self.kept
        self.kept = 0


class MeteredBackend(RecordBackend):
    """What the code under test says it ``needs`` is taken from shared free memory first, then from the device.

    Attributes:
        needs: peak bytes of the next warm-up and capture; functions under test set it while they run.
        keeps: bytes of each capture that stay in use.
    """

    def __init__(self, keeps: int = 0) -> None:
        super().__init__()
        self.needs, self.keeps = 0, keeps
        self.reserved = self.in_use = self.captures = 0

    def watch_peak(self) -> Callable[[], int]:
        return lambda: self.needs

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[RecordedGraph, T]:
        graph, result = super().capture(fn, pool)
        self.reserved += max(0, self.needs - (self.reserved - self.in_use))
        self.in_use += self.keeps
        self.captures += 1
        return MeteredGraph(graph.calls, self, self.keeps), result

    def reserved_bytes(self) -> int:
        return self.reserved

    def allocated_bytes(self) -> int:
        return self.in_use
