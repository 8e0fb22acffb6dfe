"""What length buckets did and hold."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketStats:
    """One bucket's counts; bytes are of device memory and 0 on the recorder.

    Attributes:
        edge: positions it pads to.
        open: whether its graph is held now.
        hits: calls that found the graph there.
        captures: graphs made, each for a call that did not, or by ``prepare``.
        evictions: graphs closed to make room.
        real: positions of all calls before padding (rows x length).
        computed: positions after padding (rows x edge).
        bytes: graph memory that its last capture added to the shared pool.
        predicted_bytes: what its last warm-up said it would need, before anything shared.
    """

    edge: int
    open: bool = False
    hits: int = 0
    captures: int = 0
    evictions: int = 0
    real: int = 0
    computed: int = 0
    bytes: int = 0
    predicted_bytes: int = 0

    @property
    def padding(self) -> float:
        """Padded positions per real one; 0 before the first call."""
        return (self.computed - self.real) / self.real if self.real else 0.0


@dataclass(frozen=True)
class BucketsStats:
    """All buckets, in rising order, and what ran without a graph because that was asked for.

    Attributes:
        name, backend: of the object.
        buckets: one entry for each edge.
        eager: calls that ran unpadded and without a graph.
        longest_eager: longest length among them.
        bytes: graph memory of the pool.
    """

    name: str
    backend: str
    buckets: tuple[BucketStats, ...]
    eager: int = 0
    longest_eager: int = 0
    bytes: int = 0

    @property
    def hits(self) -> int:
        """Calls that found their graph."""
        return sum(b.hits for b in self.buckets)

    @property
    def captures(self) -> int:
        """Graphs made."""
        return sum(b.captures for b in self.buckets)

    @property
    def evictions(self) -> int:
        """Graphs closed to make room."""
        return sum(b.evictions for b in self.buckets)

    @property
    def padding(self) -> float:
        """Padded positions per real one, over all calls that were padded."""
        real, computed = sum(b.real for b in self.buckets), sum(b.computed for b in self.buckets)
        return (computed - real) / real if real else 0.0

    def to_json(self) -> str:
        """One JSON object with a format version."""
        return json.dumps({"version": 1, "padding": self.padding, **dataclasses.asdict(self)})

    def __str__(self) -> str:
        head = (
            f"{self.name} on {self.backend or 'no device yet'}: {self.hits} hits, {self.captures} captures, "
        )
        head += f"{self.evictions} evictions, padding {self.padding:.1%}, {_mib(self.bytes)}"
        lines = [
            head,
            f"{'edge':>8} {'hits':>8} {'captures':>9} {'evictions':>10} {'padding':>8} {'memory':>12}",
        ]
        lines += [
            f"{b.edge:>8} {b.hits:>8} {b.captures:>9} {b.evictions:>10} {b.padding:>8.1%} {_mib(b.bytes):>12}"
            for b in self.buckets
        ]
        if self.eager:
            lines.append(f"{self.eager} calls ran eagerly, the longest with {self.longest_eager} positions")
        return "\n".join(lines)


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f} MiB"
