"""Dropout from a counter-based generator: which elements are kept is a function of a seed, an offset and a position.

Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., SC'11, table 2). One call of it gives 128 bits,
16 for each of 8 rows of a column: counter (column, row // 8, offset), key the seed. So the mask does not depend on how
a kernel is launched, and the backward computes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
ROWS = 8  # that share one call: 4 words of two 16-bit numbers
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """Elements whose 16-bit number is below it are dropped; p is rounded to 1 / 65536."""
    return round(p * 65536)


def scale_of(p: float) -> float:
    """What kept elements are multiplied by, so that the mean stays exactly, whatever the rounding of p."""
    return 65536 / (65536 - threshold_of(p)) if threshold_of(p) < 65536 else 0.0


def draw_seed(device: torch.device) -> Tensor:
    """int64 [2], a seed from torch's generator of the device and offset 0; a CUDA graph draws a new one each replay."""
    return torch.cat(
        (torch.randint(2**62, (1,), device=device), torch.zeros(1, dtype=torch.int64, device=device))
    )


def keep_mask(rows: int, columns: int, seed: Tensor, p: float) -> Tensor:
    """bool [rows, columns], the elements that dropout keeps; the plain twin of what the kernels do.

    Args:
        rows, columns: of the matrix.
        seed: int64 [2], seed and offset.
        p: the probability to drop.
    """
    groups = -(-rows // ROWS)
    column = torch.arange(columns, device=seed.device)[None, :]
    group = torch.arange(groups, device=seed.device)[:, None]
    offset = (seed[1] & _WORD, (seed[1] >> 32) & _WORD)
    words = _philox((column, group, *offset), (seed[0] & _WORD, (seed[0] >> 32) & _WORD))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    drawn = torch.stack([h.expand(groups, columns) for h in halves], dim=1).reshape(groups * ROWS, columns)
    return drawn[:rows] >= threshold_of(p)


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words of 32 bits, held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of words; int64 wraps, and its bits are those of the unsigned product."""
    # b as a signed 64-bit number times a below 2^32 overflows the sign only, which the mask takes off again
    product = a * b
    return (product >> 32) & _WORD, product & _WORD
