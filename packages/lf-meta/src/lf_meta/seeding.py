"""Random numbers as a pure function of (seed, step, rank): there is no generator state to lose."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def fold(*parts: int) -> int:
    """Mix integers into one 63-bit seed; distinct tuples give independent streams."""
    data = b"".join(p.to_bytes(8, "little", signed=True) for p in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int) -> None:
    """Seed torch (all devices), numpy and random from the folded parts."""
    seed = fold(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
