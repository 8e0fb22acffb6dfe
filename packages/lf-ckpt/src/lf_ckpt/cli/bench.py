"""`bench`: how fast saves and loads are in a directory, with a made-up state."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from ..catalog import Catalog
from ..errors import CkptError
from ..free_memory import available_memory
from ..opening import open as open_store
from ..store import Store
from .common import GOOD, Commands, add_verb, emit, human

_TENSOR_BYTES: Final = 64 << 20
_COPIES: Final = 3  # the state, the slab, what a load makes


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "stall, durable and load times in this directory, with a made-up float32 state"
    command = add_verb(commands, "bench", run, text)
    command.add_argument("--gib", type=float, default=0.5, help="size of the state (default %(default)s)")
    command.add_argument("--saves", type=int, default=3, help="saves after the first (default %(default)s)")
    command.add_argument("--compress", default="auto", choices=("auto", "raw", "zstd"))
    command.set_defaults(needs_store=False)


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Save, save again, load; everything written is removed."""
    if catalog.files.traits.whole:
        raise CkptError("bench: give a directory, not a URL")
    if not math.isfinite(arguments.gib):
        raise CkptError(f"bench: --gib {arguments.gib} is no size")
    nbytes = int(arguments.gib * (1 << 30))
    _check(nbytes, arguments.saves)
    if not os.path.isdir(catalog.path):
        raise CkptError(f"{catalog.path}: no such directory; bench measures the disk of one that is there")
    folder = tempfile.mkdtemp(prefix=".lf-ckpt-bench-", dir=catalog.path)
    try:
        with open_store(os.path.join(folder, "store"), compress=arguments.compress) as store:
            data = _measure(store, make_state(nbytes), arguments.saves)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    emit(arguments, data, _lines(data))
    return GOOD


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    """Normal float32 numbers in tensors of 64 MiB, about `nbytes` in all."""
    sizes = [_TENSOR_BYTES] * (nbytes // _TENSOR_BYTES) + [nbytes % _TENSOR_BYTES]
    generator = torch.Generator().manual_seed(0)
    return {
        f"t{i}": torch.randn(size // 4, generator=generator, device="cpu")
        for i, size in enumerate(sizes)
        if size >= 4
    }


def _check(nbytes: int, saves: int) -> None:
    if nbytes < 4 or saves < 1:
        raise CkptError("bench: give a positive --gib and at least one of --saves")
    free = available_memory()
    if free is not None and _COPIES * nbytes > free:
        raise CkptError(
            f"bench: needs {human(_COPIES * nbytes)} of memory, {human(free)} are free; lower --gib"
        )


def _measure(store: Store, state: dict[str, torch.Tensor], saves: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for step in range(saves + 1):
        for tensor in state.values():
            tensor.mul_(1.0001)  # as training does, every element changes
        report = store.save(step, state).wait()
        rows.append(
            {
                "stall": report.seconds_staged,
                "durable": report.seconds_durable,
                "kind": report.kind,
                "bytes": report.bytes_written,
            }
        )
    began = time.perf_counter()
    loaded = store.load()
    seconds = time.perf_counter() - began
    return {
        "bytes": report.bytes_raw,
        "first": rows[0],
        "stall": statistics.median(row["stall"] for row in rows[1:]),
        "durable": statistics.median(row["durable"] for row in rows[1:]),
        "written": rows[-1]["bytes"],
        "load_cached": seconds,
        "verified": loaded.report.verified,
        "slab": report.slab,
        "io": report.io,
    }


def _lines(data: dict[str, Any]) -> Iterator[str]:
    size = data["bytes"]

    def rate(seconds: float) -> str:
        return f"{seconds:8.3f} s  {size / 1e9 / max(seconds, 1e-9):6.2f} GB/s"

    yield f"state {human(size)} of float32, on disk {human(data['written'])} ({data['written'] / size:.3f})"
    yield f"first save   stall {rate(data['first']['stall'])}   durable {rate(data['first']['durable'])}"
    yield f"later saves  stall {rate(data['stall'])}   durable {rate(data['durable'])}  (medians)"
    yield f"load, warm page cache, every hash checked  {rate(data['load_cached'])}"
    yield f"slab: {data['slab']}; io: {data['io']}"
