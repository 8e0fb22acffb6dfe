"""A permutation of range(n) that needs no memory: any position can be asked for at any time.

Method: a Feistel network permutes the integers of the smallest even or odd number of bits that holds n;
positions that land outside range(n) are walked on until they land inside (cycle walking, Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). The round function is the finalizer of splitmix64
(Steele, Lea, Flood, OOPSLA 2014). It is a shuffle, not a cipher.
"""

import functools

import numpy as np
import numpy.typing as npt

from ._compiled import ffi, lib

Ids = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

_ROUNDS = 8  # fewer leave a visible bias for n < 10
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
MAX_N = 1 << 62


def permute(positions: Ids, n: int, *, seed: int, epoch: int, stream: int) -> Ids:
    """Images of `positions` under the permutation of range(n) that (seed, epoch, stream) names.

    Args:
        positions: int64[k], each in range(n).
        n: size of the domain, 1 .. 2**62.
        seed, epoch, stream: any integers; their low 64 bits count.

    Returns int64[k]. Time O(k), memory O(k), whatever n is.
    """
    bits = max((n - 1).bit_length(), 2)
    keys = _kept_keys(seed, epoch, stream)
    if lib is None:
        return _permuted(positions, n, bits, keys)
    out = np.array(positions, np.int64)
    lib.lf_permute(ffi.from_buffer("int64_t[]", out), out.size, n, bits, keys)
    return out


def _permuted(positions: Ids, n: int, bits: int, keys: list[int]) -> Ids:
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:  # the domain is below 2n, so at most half is outside: two walks on average
        walked = _feistel(values[outside], bits, keys)
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64)


@functools.lru_cache(maxsize=256)
def _kept_keys(seed: int, epoch: int, stream: int) -> list[int]:
    return round_keys(seed, epoch, stream)


def round_keys(seed: int, epoch: int, stream: int) -> list[int]:
    """One 64-bit key a round."""
    state = 0
    for word in (seed, epoch, stream):
        state = _mix((state + word + _GOLDEN) & _MASK)
    return [_mix((state + _GOLDEN * (i + 1)) & _MASK) for i in range(_ROUNDS)]


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _feistel(values: _U64, bits: int, keys: list[int]) -> _U64:
    """One pass; the halves differ by a bit when `bits` is odd, so the two kinds of round alternate."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = values & np.uint64((1 << low_bits) - 1)
    high = values >> np.uint64(low_bits)
    for i in range(0, _ROUNDS, 2):
        high ^= _round(low, keys[i], high_bits)
        low ^= _round(high, keys[i + 1], low_bits)
    return (high << np.uint64(low_bits)) | low


def _round(half: _U64, key: int, out_bits: int) -> _U64:
    x = half + np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    # the high bits of a product are the well mixed ones
    return x >> np.uint64(64 - out_bits)
