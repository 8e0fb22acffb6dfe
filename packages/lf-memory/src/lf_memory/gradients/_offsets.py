"""Bytes that are live at one time, and where buffers with known lifetimes lie in one storage. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 128  # bytes: a cache line of a GPU and two of a CPU; more than any vector load needs


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` that live from moment `born` up to, but not including, `died`."""

    nbytes: int
    born: int
    died: int


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up."""
    return -(-nbytes // alignment) * alignment


def peak_bytes(spans: Iterable[Span]) -> int:
    """The most bytes live at one moment: no placement takes less."""
    change: dict[int, int] = {}
    for span in spans:
        change[span.born] = change.get(span.born, 0) + span.nbytes
        change[span.died] = change.get(span.died, 0) - span.nbytes
    now = most = 0
    for moment in sorted(change):
        now += change[moment]
        most = max(most, now)
    return most


def place(spans: Sequence[Span], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """(offset of each span, bytes of the storage); spans that live at one time do not overlap.

    Largest first into the lowest hole, as TFLite and XLA do (Pisarchyk and Lee, "Efficient Memory Management for
    Deep Neural Net Inference", 2020), and once more in order of birth; the tighter one wins.
    """
    by_size = sorted(range(len(spans)), key=lambda at: (-spans[at].nbytes, spans[at].born))
    by_birth = sorted(range(len(spans)), key=lambda at: (spans[at].born, -spans[at].nbytes))
    return min(
        (_place_in(order, spans, alignment) for order in (by_size, by_birth)), key=lambda found: found[1]
    )


def _place_in(order: Sequence[int], spans: Sequence[Span], alignment: int) -> tuple[list[int], int]:
    offsets, top = [0] * len(spans), 0
    placed: list[tuple[int, int, Span]] = []  # (start, end, span)
    for at in order:
        span = spans[at]
        size = aligned(span.nbytes, alignment)
        busy = sorted(
            (lo, hi) for lo, hi, other in placed if other.born < span.died and span.born < other.died
        )
        offsets[at] = start = _lowest_hole(busy, size)
        placed.append((start, start + size, span))
        top = max(top, start + size)
    return offsets, top


def _lowest_hole(busy: Iterable[tuple[int, int]], size: int) -> int:
    at = 0
    for low, high in busy:
        if at + size <= low:
            break
        at = max(at, high)
    return at
