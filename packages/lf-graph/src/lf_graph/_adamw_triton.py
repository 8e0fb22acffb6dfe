"""The AdamW update as Triton kernels: bf16 or fp32 gradients by address in, master, moments and bf16 shadow
out.

Memory traffic is all that counts: g 2 + p, m, v read 12 + written 12 + shadow 2 = 28 bytes a parameter. So
every access of a full block is 16 bytes wide (``tl.multiple_of`` on pointers that come from the address
table, unmasked blocks, a masked one only at the end of a tensor), and marked as streaming, for nothing is
read twice.

A kernel is launched once per gradient dtype. Its programs stride over the chunk table, so their number is
free: fewer leave multiprocessors to others. The norm is summed per chunk and then over chunks: the same bits
for any number of programs.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lf_graph._adamw_torch import COEFFICIENTS
from lf_graph._flat import CHUNK_COLUMNS, FlatParameters, cut_chunks
from lf_graph.kernels._interpreter import bfloat16

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need triton: pip install lf-graph[triton]") from error

if TYPE_CHECKING:
    from lf_graph._adamw import Launch

# 8 x 128 threads x 8 elements x 14 B in flight a multiprocessor: DRAM latency x bandwidth of an H200 takes
# about 30 KB.
PROGRAMS_PER_MULTIPROCESSOR = 8
_COLUMNS = tl.constexpr(CHUNK_COLUMNS)
_COEFFICIENTS = tl.constexpr(len(COEFFICIENTS))


@triton.jit
def _gradient_of(row, addresses, GRADIENT: tl.constexpr):  # noqa: N803
    """Pointer to where this chunk starts in its gradient."""
    base = tl.load(addresses + tl.load(row)).to(tl.pointer_type(GRADIENT))
    return base + tl.load(row + 1)


@triton.jit
def _square(gradient, lanes, mask, scale):
    """Squares of scaled gradients, 0 where masked."""
    pointers = tl.multiple_of(gradient + lanes, 16)
    if mask is None:
        g = tl.load(pointers)
    else:
        g = tl.load(pointers, mask=mask, other=0.0)
    g = g.to(tl.float32) * scale
    return g * g


@triton.jit(do_not_specialize=["count"])
def square_sums(chunks, count, addresses, scale, partials, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """partials[chunk] = sum of (scale * g)^2, fp32; chunks int64 [count, 5]."""
    factor = tl.load(scale)
    lanes = tl.arange(0, BLOCK)
    for chunk in range(tl.program_id(0), count, tl.num_programs(0)):
        row = chunks + chunk * _COLUMNS
        gradient = _gradient_of(row, addresses, GRADIENT)
        length = tl.load(row + 4).to(tl.int32)
        whole = length - length % BLOCK
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, whole, BLOCK):
            total += _square(gradient + start, lanes, None, factor)
        if whole < length:
            total += _square(gradient + whole, lanes, lanes < length - whole, factor)
        tl.store(partials + chunk, tl.sum(total))


@triton.jit
def _coefficients_of(row):
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3),
        tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7),
    )  # fmt: skip


@triton.jit
def _advance(
    gradient, master, exp_avg, exp_avg_sq, shadow, lanes, mask, shadow_mask, multiplier,
    decay, l2, rate1, beta2, rate2, step_size, inverse, eps, GRADIENT: tl.constexpr, VECTOR: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One block: loads, updates, stores. The order of operations is that of ``_adamw_torch.advance``."""
    # Not more than 16 bytes: gradients are aligned to that, and newer devices would believe 32.
    gradients = tl.multiple_of(gradient + lanes, 16 if GRADIENT.primitive_bitwidth == 32 else VECTOR * 2)
    g = tl.load(gradients, mask=mask, eviction_policy="evict_first")
    p = tl.load(tl.multiple_of(master + lanes, 16), mask=mask, eviction_policy="evict_first")
    m = tl.load(tl.multiple_of(exp_avg + lanes, 16), mask=mask, eviction_policy="evict_first")
    v = tl.load(tl.multiple_of(exp_avg_sq + lanes, 16), mask=mask, eviction_policy="evict_first")
    g = g.to(tl.float32) * multiplier + l2 * p
    m = m + rate1 * (g - m)
    v = v * beta2 + rate2 * g * g
    p = p * decay - step_size * (m / (tl.sqrt(v) * inverse + eps))
    tl.store(tl.multiple_of(master + lanes, 16), p, mask=mask, cache_modifier=".cs")
    tl.store(tl.multiple_of(exp_avg + lanes, 16), m, mask=mask, cache_modifier=".cs")
    tl.store(tl.multiple_of(exp_avg_sq + lanes, 16), v, mask=mask, cache_modifier=".cs")
    shadows = tl.multiple_of(shadow + lanes, VECTOR * 2)
    tl.store(shadows, bfloat16(p), mask=shadow_mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["first", "count"])
def update(
    chunks, first, count, addresses, coefficients, multiplier, finite, master, exp_avg, exp_avg_sq, shadow,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Advances ``count`` chunks from ``first`` on unless ``finite`` is 0; int64 [chunks, 5], fp32 [tensors, 8]."""
    if tl.load(finite) > 0:
        factor = tl.load(multiplier)
        lanes = tl.arange(0, BLOCK)
        for chunk in range(first + tl.program_id(0), first + count, tl.num_programs(0)):
            row = chunks + chunk * _COLUMNS
            gradient = _gradient_of(row, addresses, GRADIENT)
            # 64-bit: a flat buffer may pass 2^31 elements.
            offset = tl.load(row + 2)
            shadow_offset = tl.load(row + 3)
            length = tl.load(row + 4).to(tl.int32)
            decay, l2, rate1, beta2, rate2, step_size, inverse, eps = _coefficients_of(
                coefficients + tl.load(row) * _COEFFICIENTS
            )
            p, m, v, s = master + offset, exp_avg + offset, exp_avg_sq + offset, shadow + shadow_offset
            shadowed = (shadow_offset + lanes * 0) >= 0  # a block, which the interpreter wants a mask to be
            whole = length - length % BLOCK
            for start in range(0, whole, BLOCK):
                _advance(
                    gradient + start, p + start, m + start, v + start, s + start, lanes, None, shadowed,
                    factor, decay, l2, rate1, beta2, rate2, step_size, inverse, eps, GRADIENT, VECTOR,
                )  # fmt: skip
            if whole < length:
                mask = lanes < length - whole
                shadowed = mask & shadowed
                _advance(
                    gradient + whole, p + whole, m + whole, v + whole, s + whole, lanes, mask, shadowed,
                    factor, decay, l2, rate1, beta2, rate2, step_size, inverse, eps, GRADIENT, VECTOR,
                )  # fmt: skip


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``end`` of the chunk table of one gradient dtype."""

    table: int
    first: int
    end: int


def parts_of(tables: Sequence[npt.NDArray[np.int64]]) -> dict[int, Part]:
    """The rows of each parameter; a parameter without elements has none, and is left out."""
    found: dict[int, Part] = {}
    for number, table in enumerate(tables):
        owners, starts, counts = np.unique(table[:, 0], return_index=True, return_counts=True)
        found |= {
            int(i): Part(number, int(s), int(s + n)) for i, s, n in zip(owners, starts, counts, strict=True)
        }
    return found


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same rows in as few parts as can be."""
    joined: list[Part] = []
    for part in sorted(parts, key=lambda p: (p.table, p.first)):
        if joined and (joined[-1].table, joined[-1].end) == (part.table, part.first):
            joined[-1] = replace(joined[-1], end=part.end)
        else:
            joined.append(part)
    return joined


class TritonKernels:
    """Norm and update over the chunks of a flat layout, one launch of each per gradient dtype."""

    name = "triton"

    def __init__(self, flat: FlatParameters, launch: Launch) -> None:
        self._flat, self._launch = flat, launch
        self._tables: list[tuple[torch.dtype, Tensor, Tensor]] = []
        self._parts: dict[int, Part] = {}
        self._partials = torch.zeros(0, dtype=torch.float32, device=flat.master.device)
        self._programs = launch.programs or _default_programs(flat.master.device)

    def prepare(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Cuts the chunks of every gradient dtype, and compiles and loads the kernels: a launch on no chunk."""
        device = self._flat.master.device
        cut = {
            d: self._cut([i for i, own in enumerate(dtypes) if own == d])
            for d in sorted(set(dtypes), key=str)
        }
        self._parts = parts_of(list(cut.values()))
        rows = {d: torch.from_numpy(table).to(device) for d, table in cut.items()}
        self._partials = torch.zeros(sum(map(len, rows.values())), dtype=torch.float32, device=device)
        partials = self._partials.split([len(r) for r in rows.values()])
        self._tables = [(d, r, part) for (d, r), part in zip(rows.items(), partials, strict=True)]
        self._load()

    def _cut(self, chosen: list[int]) -> npt.NDArray[np.int64]:
        return cut_chunks(self._flat.layout, chosen, self._launch.chunk)

    def _load(self) -> None:
        device = self._flat.master.device
        number, addresses = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        for table in self._tables:
            self._launch_square_sums(table, 0, addresses, number)
            self._launch_update(table, (0, 0), addresses, number, number, number)

    def use(self, tensors: tuple[Tensor, ...]) -> None:
        """Nothing to do: the kernels read addresses."""

    def square_sum(self, addresses: Tensor, scale: Tensor) -> Tensor:
        """Sum of squares of all gradients times ``scale``, fp32 []."""
        for table in self._tables:
            self._launch_square_sums(table, len(table[1]), addresses, scale)
        return self._partials.sum()

    def update(self, addresses: Tensor, coefficients: Tensor, multiplier: Tensor, finite: Tensor) -> None:
        """Advances every parameter; changes no bit where ``finite`` is 0."""
        for table in self._tables:
            self._launch_update(table, (0, len(table[1])), addresses, coefficients, multiplier, finite)

    def update_some(
        self, gradients: Mapping[int, Tensor], addresses: Tensor, coefficients: Tensor, multiplier: Tensor,
        finite: Tensor,
    ) -> None:  # fmt: skip
        """Advances the parameters of ``gradients``, neighbours by one launch; the kernels read the addresses."""
        for part in merged(self._parts[i] for i in gradients if i in self._parts):
            chunks = (part.first, part.end - part.first)
            self._launch_update(self._tables[part.table], chunks, addresses, coefficients, multiplier, finite)

    def _launch_square_sums(
        self, table: tuple[torch.dtype, Tensor, Tensor], count: int, addresses: Tensor, scale: Tensor
    ) -> None:
        dtype, rows, partials = table
        block = norm_block(self._launch.warps, self._launch.chunk)
        with torch.cuda.device_of(rows):  # Triton launches on the current device
            square_sums[(_grid(rows, self._launch.programs or len(rows)),)](
                rows, count, addresses, scale, partials,
                GRADIENT=_TYPES[dtype], BLOCK=block, num_warps=self._launch.warps,
            )  # fmt: skip

    def _launch_update(
        self,
        table: tuple[torch.dtype, Tensor, Tensor],
        chunks: tuple[int, int],
        addresses: Tensor,
        coefficients: Tensor,
        multiplier: Tensor,
        finite: Tensor,
    ) -> None:
        """``chunks``: first, count."""
        dtype, rows, _ = table
        flat, launch = self._flat, self._launch
        with torch.cuda.device_of(rows):
            update[(max(1, min(self._programs, chunks[1])),)](
                rows, *chunks, addresses, coefficients, multiplier, finite,
                flat.master, flat.exp_avg, flat.exp_avg_sq, flat.shadow,
                GRADIENT=_TYPES[dtype], BLOCK=launch.block, VECTOR=launch.vector, num_warps=launch.warps,
            )  # fmt: skip


def _grid(rows: Tensor, programs: int) -> int:
    return max(1, min(programs, len(rows)))


def norm_block(warps: int, chunk: int) -> int:
    """Elements of a block of the norm: 32 a thread, as it reads one stream only; a power of two within a chunk."""
    return min(1024 * warps, chunk & -chunk)


def _default_programs(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * PROGRAMS_PER_MULTIPROCESSOR
