"""Which blocks of a gradient hold its energy: aligned blocks of 256 elements, chosen alike on every rank.

Pure: from energies that all ranks have alike come the same blocks everywhere. Shares of energy are compared as whole
numbers, so neither the order of a sum nor the kind of processor can make two ranks disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # elements; the energies of float32 blocks are 1/256 of the gradient's bytes
_SCALE = float(1 << 30)  # shares of the largest energy; sums of 2^33 of them fit int64


@dataclass(frozen=True)
class Cut:
    """Of one gradient: `blocks` whole blocks, of which at most `kept` are sent; 0 blocks: it is always sent whole."""

    blocks: int
    kept: int

    @classmethod
    def of(cls, count: int, ratio: float) -> Cut:
        """Of `count` elements, of which one in `ratio` blocks may be sent; what fills no block is always sent."""
        blocks = count // BLOCK
        kept = int(blocks // ratio)
        return cls(blocks, kept) if 0 < kept < blocks else cls(0, 0)

    @property
    def whole(self) -> bool:
        """Too small to choose from, or nothing is to be left out."""
        return self.blocks == 0


@dataclass(frozen=True)
class Choice:
    """ids: int64 [<= kept], ascending, of the blocks that hold most energy; None: everything is sent.
    concentration: the share of the energy in those blocks, 0 .. 1; NaN where the energy is not finite."""

    ids: Tensor | None
    concentration: float

    @property
    def finite(self) -> bool:
        """Whether no rank has NaN, infinity or more than float32 can hold."""
        return self.concentration == self.concentration


def energies(flat: Tensor, blocks: int) -> Tensor:
    """float32 [blocks], sums of squares of each block of a flat tensor of any floating dtype."""
    rows = flat[: blocks * BLOCK].view(blocks, BLOCK)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=at_least_float32(flat))
    return norms.float().square_()


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is added up."""
    return torch.promote_types(torch.float32, tensor.dtype)


def choose(energy: Sequence[Tensor], kept: Sequence[int], threshold: float) -> list[Choice]:
    """For each gradient, from the energies of its blocks (float32 [n], >= 0, summed over ranks).

    The blocks with most energy, of equal ones the first; none without energy. When they hold less than `threshold` of
    the energy, or when an energy is not finite, everything is sent. Waits for the device once.
    """
    if not energy:
        return []
    orders, facts = zip(*(_ranked(one, most) for one, most in zip(energy, kept, strict=True)), strict=True)
    choices = []
    for order, (finite, total, chosen, live) in zip(orders, torch.stack(facts).tolist(), strict=True):
        if not finite:
            choices.append(Choice(None, float("nan")))
            continue
        concentration = chosen / total if total else 1.0
        ids = order[: min(len(order), live)].sort().values
        choices.append(Choice(ids if concentration >= threshold else None, concentration))
    return choices


def _ranked(energy: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """(the first `kept` blocks; int64 facts: finite, all energy and that of those, as shares, and blocks above 0)."""
    largest = energy.max()
    finite = torch.isfinite(largest)
    order = torch.sort(energy, descending=True, stable=True).indices[:kept]
    shares = energy.double().div_(largest.double()).nan_to_num_(0.0, 0.0, 0.0).mul_(_SCALE).floor_().long()
    facts = (finite, shares.sum(), shares[order].sum(), (energy > 0).sum())
    return order, torch.stack([fact.long() for fact in facts])
