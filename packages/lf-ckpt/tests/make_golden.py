#!/usr/bin/env python3
"""Writes tests/golden once per format version: make_golden.py FOLDER. The files are then kept, never written again."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from ckpt_states import bits, copy_of

import lf_ckpt

Tensors = dict[str, torch.Tensor]


def states() -> tuple[Tensors, Tensors]:
    """A base and a delta whose streams take every codec."""
    chance = torch.Generator().manual_seed(0)
    first = {
        "unchanged": torch.randn(3000, generator=chance),
        "moved": torch.randn(3000, generator=chance),
        "few": torch.randn(8000, generator=chance).bfloat16(),
        "rows": torch.randn(8, 1024, generator=chance),
        "flags": torch.randint(0, 2**62, (2000,), generator=chance),
        "noise": torch.randint(0, 255, (5001,), generator=chance, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
    }
    second = copy_of(first)
    second["moved"] += 1e-4 * torch.randn(3000, generator=chance)
    second["few"].view(torch.int16)[::77] += 1
    fresh = torch.randint(0, 255, (4096,), generator=chance, dtype=torch.uint8)
    second["rows"].view(torch.uint8)[3] = fresh
    second["flags"] ^= 1 << 40
    return first | {"tied": first["moved"]}, second | {"tied": second["moved"]}


def digests(tensors: Tensors) -> dict[str, str]:
    """SHA-256 of the raw bytes of every tensor."""
    return {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in tensors.items()}


def main(folder: Path) -> None:
    """Two stores, `raw` and `auto`, of steps 1 and 2, and what is in them."""
    first, second = states()
    items = {"epoch": 3, "rate": 0.1, "blob": b"bytes " * 100}
    for compress in ("raw", "auto"):
        with lf_ckpt.open(folder / compress, compress=compress) as store:  # type: ignore[arg-type]
            store.save(1, first, items).wait()
            assert store.save(2, second, items).wait().kind == "delta"
    expected = {"1": digests(first), "2": digests(second)}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
