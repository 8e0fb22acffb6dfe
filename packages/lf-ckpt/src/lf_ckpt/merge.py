"""Which rank writes what, and the tensors of the whole from the parts of the ranks. Pure over plain data.

Ranks that hold the same part of a tensor (replicas, HSDP) do not write it twice: the parts that only one rank has are
given, the others go, largest first, to the rank with the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .boxes import Box, cover_problem, whole
from .dtypes import ITEM_SIZE
from .errors import CkptError
from .jsonio import Json
from .manifest import BlobEntry, Placed, Shard, TensorEntry
from .plan import Plan


class Part(NamedTuple):
    """What a rank has of a tensor: its kind, which must agree between ranks, and a box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        """Raw bytes of the box."""
        return self.box.volume * ITEM_SIZE[self.dtype]

    @property
    def matters(self) -> bool:
        """Whether it holds anything: an empty shard of a tensor that is not empty does not."""
        return self.box.volume > 0 or whole(self.shape).volume == 0


@dataclass(frozen=True)
class Layout:
    """What a rank could write: its tensors in order, those tied to an earlier one (name -> name), its bytes items."""

    parts: tuple[Part, ...]
    tied: tuple[Part, ...]
    aliases: dict[str, str]
    blobs: tuple[tuple[str, int], ...]

    def as_json(self) -> Json:
        """Plain data."""
        return [[_plain(p) for p in self.parts], [_plain(p) for p in self.tied], self.aliases, self.blobs]

    @classmethod
    def from_json(cls, value: Any) -> Layout:
        """Inverse of `as_json`."""
        parts, tied, aliases, blobs = value
        return cls(
            tuple(_part(p) for p in parts),
            tuple(_part(p) for p in tied),
            aliases,
            tuple((n, s) for n, s in blobs),
        )


@dataclass
class _Whole:
    """A tensor as far as it is known: the ranks that hold each box."""

    dtype: str
    shape: tuple[int, ...]
    first: int  # rank that named it first, for errors
    holders: dict[Box, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Merged:
    """The agreed step.

    tensors: (name, dtype, shape, ((rank, box), ...)) in manifest order. writes: for each rank, numbers into
    `parts + tied` of its layout, in the order of the manifest, which is that of its data file.
    """

    tensors: tuple[tuple[str, str, tuple[int, ...], tuple[tuple[int, Box], ...]], ...]
    aliases: dict[str, str]
    blobs: tuple[tuple[int, str, int], ...]
    writes: tuple[tuple[int, ...], ...]


def layout_of(plan: Plan) -> Layout:
    """What one rank has, without its bytes."""
    tensors = [s for s in plan.streams if not s.is_item]
    return Layout(
        tuple(Part(s.name, s.dtype, s.full, s.box) for s in tensors),
        tuple(Part(s.name, s.dtype, s.full, s.box) for s in plan.tied),
        plan.aliases,
        tuple((s.name, s.nbytes) for s in plan.streams if s.is_item),
    )


def merge(layouts: Sequence[Layout]) -> Merged:
    """Agree on one step; CkptError when ranks contradict each other or leave part of a tensor to nobody."""
    aliases = _common_aliases(layouts)
    wholes: dict[str, _Whole] = {}
    for rank, layout in enumerate(layouts):
        for part in (*layout.parts, *layout.tied):
            if part.name not in aliases:
                _add(wholes, rank, part)
    writer = _assign(wholes, len(layouts))
    tensors = []
    for name, found in wholes.items():
        boxes = sorted(found.holders)
        problem = cover_problem(found.shape, boxes)
        if problem:
            raise CkptError(f"{name}: the parts that the ranks hold are no whole tensor: {problem}")
        tensors.append((name, found.dtype, found.shape, tuple((writer[name, box], box) for box in boxes)))
    blobs = tuple((rank, name, size) for rank, layout in enumerate(layouts) for name, size in layout.blobs)
    writes = tuple(_numbers(layout, rank, tensors) for rank, layout in enumerate(layouts))
    return Merged(tuple(tensors), aliases, blobs, writes)


def entries(
    merged: Merged, counts: Sequence[Sequence[int]]
) -> tuple[tuple[TensorEntry, ...], tuple[BlobEntry, ...]]:
    """Manifest entries from the number of extents of each stream in each rank's file."""
    runs = [_runs(rank, numbers) for rank, numbers in enumerate(counts)]
    tensors = tuple(
        TensorEntry(name, dtype, shape, tuple(Shard(box, next(runs[rank])) for rank, box in parts))
        for name, dtype, shape, parts in merged.tensors
    )
    return tensors, tuple(BlobEntry(name, size, next(runs[rank])) for rank, name, size in merged.blobs)


def _runs(file: int, counts: Iterable[int]) -> Any:
    first = 0
    for count in counts:
        yield Placed(file, first, count)
        first += count


def _common_aliases(layouts: Sequence[Layout]) -> dict[str, str]:
    """Ties that hold on every rank that has the name (a rank with an empty shard of it cannot tell)."""
    claims: dict[str, str] = {}
    refused: set[str] = set()
    for layout in layouts:
        for name, target in layout.aliases.items():
            if claims.setdefault(name, target) != target:
                refused.add(name)
    for layout in layouts:
        refused |= {p.name for p in layout.parts if p.name in claims and p.matters}
    named = {p.name for layout in layouts for p in layout.parts}
    kept = {name: target for name, target in claims.items() if name not in refused and target in named}
    return {name: target for name, target in kept.items() if target not in kept}


def _add(wholes: dict[str, _Whole], rank: int, part: Part) -> None:
    found = wholes.setdefault(part.name, _Whole(part.dtype, part.shape, rank))
    if (found.dtype, found.shape) != (part.dtype, part.shape):
        raise CkptError(
            f"{part.name}: rank {found.first} has {found.dtype}{list(found.shape)}, rank {rank} has "
            f"{part.dtype}{list(part.shape)}; give parts of one tensor as DTensors, or list the name in `per_rank`"
        )
    if part.matters:
        found.holders.setdefault(part.box, []).append(rank)


def _assign(wholes: dict[str, _Whole], ranks: int) -> dict[tuple[str, Box], int]:
    """The rank that writes each part."""
    load = [0] * ranks
    writer: dict[tuple[str, Box], int] = {}
    shared: list[tuple[int, str, Box, list[int]]] = []
    for name, found in wholes.items():
        for box, holders in found.holders.items():
            nbytes = Part(name, found.dtype, found.shape, box).nbytes
            if len(holders) == 1:
                writer[name, box] = holders[0]
                load[holders[0]] += nbytes
            else:
                shared.append((nbytes, name, box, holders))
    for nbytes, name, box, holders in sorted(shared, key=lambda s: (-s[0], s[1], s[2])):
        rank = min(holders, key=lambda r: (load[r], r))
        writer[name, box] = rank
        load[rank] += nbytes
    return writer


def _numbers(layout: Layout, rank: int, tensors: Iterable[Any]) -> tuple[int, ...]:
    """Numbers of the parts that a rank writes, in manifest order."""
    number = {(part.name, part.box): i for i, part in enumerate((*layout.parts, *layout.tied))}
    return tuple(number[name, box] for name, _, _, parts in tensors for r, box in parts if r == rank)


def _plain(part: Part) -> Json:
    return [part.name, part.dtype, part.shape, *part.box]


def _part(value: Any) -> Part:
    name, dtype, shape, offsets, size = value
    return Part(name, dtype, tuple(shape), Box(tuple(offsets), tuple(size)))
