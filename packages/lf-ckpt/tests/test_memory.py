"""Fifty saves need the memory of one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import lf_ckpt

MIB = 1 << 20


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_steady_over_fifty_saves(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(MIB) for i in range(4)}
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(2)], full_every=4) as store:
        for step in range(50):
            tensors[f"w{step % 4}"].add_(1)
            store.save(step, tensors, {"step": step}).wait()
            if step == 9:
                early = resident()
        slab = store._saver._slab._slab if store._saver else None
        assert slab is not None
        assert slab.size == 16 * MIB
        assert resident() - early < 8 * MIB  # half a state; one leaked slab or state would be 16
        assert len(store.steps()) <= 3


def test_a_small_slab_bounds_the_memory_of_a_save(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(64 * MIB)}  # 256 MiB
    with lf_ckpt.open(tmp_path, slab_bytes=8 * MIB, compress="raw") as store:
        store.save(0, {"w": tensors["w"][: 4 * MIB]}).wait()
        before = resident()
        store.save(1, tensors).wait()

        assert resident() - before < 64 * MIB
