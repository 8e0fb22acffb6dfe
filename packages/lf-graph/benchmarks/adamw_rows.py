"""What an AdamW row is made of and compared with: shapes, bytes moved, the printed table. Pure bookkeeping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
# How many of which shape: all that requires grad in VLA of shared/baselines/h200_baseline.py.
VLA: tuple[tuple[int, Shape], ...] = (
    (10, (2048,)),
    (8, (2048, 2048)),
    (8, (1024, 2048)),
    (8, (6144, 2048)),
    (4, (2048, 6144)),
    (32, (3072, 1536)),
    (32, (3072,)),
    (97, (1536, 1536)),
    (32, (1536, 2048)),
    (32, (6144, 1536)),
    (32, (6144,)),
    (32, (1536, 6144)),
    (36, (1536,)),
    (1, (1536, 256)),
    (2, (1536, 128)),
    (1, (128, 1536)),
    (1, (128,)),
)
ODD: tuple[tuple[int, Shape], ...] = (
    (1, (1,)),
    (2, (255, 3)),
    (1, (1537, 769)),
    (2, (40_001,)),
    (1, (4096, 33)),
)

# Bytes moved for a matrix element (bf16 gradient, bf16 copy) and for an element of the fp32 rest.
UPDATE = 24  # p, m, v read and written
OURS = {False: (UPDATE + 2 + 2, UPDATE + 4), True: (UPDATE + 2 + 2 + 2, UPDATE + 4 + 4)}
# gradient cast 2 + 4, update with an fp32 gradient, weight cast 4 + 2; clipping reads it twice more and writes it once
STOCK = {False: (6 + UPDATE + 4 + 6, 8 + UPDATE + 4), True: (6 + UPDATE + 4 + 6 + 12, 8 + UPDATE + 4 + 12)}
COMPILED = (UPDATE + 2 + 2, UPDATE + 4)  # what inductor has to move when it fuses both casts


def shapes_of(counts: Sequence[tuple[int, Shape]]) -> list[Shape]:
    """All shapes, matrices and vectors mixed as counted."""
    return [shape for count, shape in counts for _ in range(count)]


def bytes_moved(shapes: Sequence[Shape], per_element: tuple[int, int]) -> int:
    """Bytes of one step, from bytes for an element of a matrix and of the rest."""
    return sum(math.prod(s) * per_element[0 if len(s) > 1 else 1] for s in shapes)


@dataclass(frozen=True)
class Row:
    """One measured line."""

    name: str
    clip: bool
    ours: bool
    ms: float
    spread: float
    bytes: int
    error: str = ""

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.bytes / self.ms / 1e6


def best_stock(rows: Sequence[Row], clip: bool) -> float:
    """ms of the fastest row of torch that does the same work."""
    return min((r.ms for r in rows if not r.ours and not r.error and r.clip == clip), default=math.nan)


def table(rows: Sequence[Row]) -> str:
    """Text lines; the last column is how much faster than torch's best."""
    lines = [f"{'row':44s} {'clip':>4s} {'ms':>8s} {'spread':>7s} {'GB':>6s} {'GB/s':>6s} {'vs best':>8s}"]
    for r in rows:
        clip = "yes" if r.clip else "no"
        if r.error:
            lines.append(f"{r.name:44s} {clip:>4s} {r.error}")
            continue
        ratio = f"{best_stock(rows, r.clip) / r.ms:7.2f}x"
        size = f"{r.bytes / 1e9:6.1f} {r.rate:6.0f}"
        lines.append(f"{r.name:44s} {clip:>4s} {r.ms:8.3f} {r.spread:7.1%} {size} {ratio:>8s}")
    return "\n".join(lines)


def as_json(row: Row) -> dict[str, Any]:
    """A row's fields and its rate; what was not measured is null."""
    fields = dataclasses.asdict(row) | {"rate": row.rate}
    return {k: None if v != v else v for k, v in fields.items()}
