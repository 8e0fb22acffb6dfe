"""Operators that launch the grouped kernels, and their configurations."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._grouped_gemm_triton import grouped_product, grouped_weight_gradient, token_sums
from lf_graph.kernels._inputs import as_rows
from lf_graph.kernels._interpreter import INTERPRETED, operator, triton
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register

_SHARED_BYTES = 227 * 1024  # that one program of an H100 or H200 may have
_ACCUMULATORS = 128  # fp32 registers of a thread; it has 255, and addresses need some
_TILES = {  # M, N, K: as wide as operands in shared memory and accumulators in registers allow
    2: ((64, 64, 64), (64, 128, 64), (64, 128, 128), (64, 256, 64), (128, 64, 64), (128, 128, 64), (128, 128, 128),
        (128, 256, 64), (256, 128, 64)),
    4: ((32, 64, 32), (64, 64, 32), (128, 64, 32), (64, 128, 32), (128, 128, 32)),
}  # fmt: skip


def _gemm(m: int, n: int, k: int, warps: int, stages: int, programs: int = 1) -> Config:
    """``PROGRAMS`` is for the launcher: how many share a multiprocessor, each taking many tiles; 0: one a tile."""
    constants = (("BLOCK_M", m), ("BLOCK_N", n), ("BLOCK_K", k), ("GROUP", 8), ("PROGRAMS", programs))
    return Config(constants, warps, stages)


def _roomy() -> bool:
    """Whether the card has shared memory for tiles of 128 x 256: H100 and later, not A100."""
    if not torch.cuda.is_available():
        return False
    properties = torch.cuda.get_device_properties()
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= _SHARED_BYTES


def _default(key: Key) -> Config:
    dtype, height = str(key[0]), int(key[1])
    if INTERPRETED.value:
        return _gemm(32, 32, 32, 4, 1)
    if dtype == "float32":
        return _gemm(64, 64, 32, 4, 2, 2)
    if height <= 64:
        return _gemm(64, 128, 64, 4, 4, 2) if _roomy() else _gemm(64, 128, 64, 4, 3)
    return _gemm(128, 256, 64, 8, 3) if _roomy() else _gemm(128, 128, 64, 8, 3)


def _default_swiglu(key: Key) -> Config:
    dtype, height = str(key[0]), int(key[1])
    if INTERPRETED.value or dtype == "float32":
        return _gemm(32, 32, 32, 4, 1)
    if height <= 64:
        return _gemm(64, 64, 64, 4, 4, 2) if _roomy() else _gemm(64, 64, 64, 4, 3)
    return _gemm(128, 128, 64, 8, 3) if _roomy() else _gemm(128, 64, 64, 8, 3)


def _tiles(key: Key, weights: int) -> list[Config]:
    """Configurations that fit an H200, with so many tiles of the weight at once: low ones for few rows only."""
    size, few = 4 if key[0] == "float32" else 2, int(key[1]) <= 64
    found = []
    for m, n, k in _TILES[size]:
        operands, wide = (m + weights * n) * k * size, m * n * weights
        for warps, stages in ((4, 3), (4, 4), (8, 3), (8, 4)):
            fits = operands * stages <= _SHARED_BYTES and 32 <= wide // (32 * warps) <= _ACCUMULATORS
            if fits and (m <= 64) == few:
                found += [_gemm(m, n, k, warps, stages, p) for p in (0, _resident(wide))]
    return found


def _resident(wide: int) -> int:
    """Programs that share a multiprocessor: accumulators of 128 x 256 in fp32 fill half of its registers."""
    return max(1, 128 * 256 // wide)


def _candidates(key: Key) -> list[Config]:
    return _tiles(key, 1)


def _candidates_swiglu(key: Key) -> list[Config]:
    return _tiles(key, 2)


def _candidates_weight(key: Key) -> list[Config]:
    """High tiles, as both sides of the product are wide; one program a tile."""
    return [c for c in _tiles((key[0], 1024), 1) if not c["PROGRAMS"]]


def height_of(rows: int, experts: int) -> int:
    """Rows of an expert under an even load, up to the next power of two within 16 to 1024.

    By comparisons: under dynamic shapes a compiled graph then serves all numbers of rows of a bucket.
    """
    return next((h for h in (16, 32, 64, 128, 256, 512) if rows <= experts * h), 1024)


def _random(key: Key, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weights, offsets and a gradient for 16 experts with a skewed load."""
    dtype, height, depth, columns = getattr(torch, str(key[0])), int(key[1]), int(key[2]), int(key[3])
    experts = 16
    counts = torch.arange(experts, device=device) * height * 2 // experts
    offsets = counts.cumsum(0).to(torch.int32)
    x = torch.randn(height * experts, depth, device=device).to(dtype)
    w = (torch.randn(experts, depth, columns, device=device) / depth**0.5).to(dtype)
    return x, w, offsets, torch.randn(height * experts, columns, device=device).to(dtype)


def _tolerance(key: Key) -> float:
    return 1e-2 if key[0] != "float32" else 2e-3  # tf32 where the caller allows it


def _product_problem(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels.grouped_gemm import product_plain

    x, w, offsets, _ = _random(key, device)
    reference = product_plain(x.double(), w.double(), offsets, None)
    return Problem(lambda c: (_run_product(x, w, offsets, None, c),), (reference,), (_tolerance(key),))


def _swiglu_problem(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels.grouped_gemm import product_plain
    from lf_graph.kernels.swiglu import swiglu_plain

    x, w, offsets, _ = _random(key, device)
    weight = torch.rand(x.shape[0], device=device)
    gate_up = product_plain(x.double(), w.double(), offsets, None)
    gate, up = gate_up.chunk(2, dim=-1)
    reference = (gate_up, swiglu_plain(gate, up, weight.double()))
    return Problem(lambda c: _run_swiglu(x, w, weight, offsets, None, c), reference, (_tolerance(key),) * 2)


def _weight_problem(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels.grouped_gemm import weight_gradient_plain

    x, _, offsets, grad = _random(key, device)
    reference = weight_gradient_plain(x.double(), grad.double(), offsets, None, None, False)
    return Problem(
        lambda c: (_run_weight(x, grad, offsets, None, None, False, c),), (reference,), (_tolerance(key),)
    )


PRODUCT = register(Tunable("grouped_product", (grouped_product,), _default, _candidates, _product_problem))
SWIGLU = register(
    Tunable("grouped_swiglu", (grouped_product,), _default_swiglu, _candidates_swiglu, _swiglu_problem)
)
WEIGHT = register(
    Tunable(
        "grouped_weight_gradient", (grouped_weight_gradient,), _default, _candidates_weight, _weight_problem
    )
)


def _grid(tiles: int, config: Config, device: torch.device) -> tuple[int]:
    """Programs for at most so many tiles; three in the interpreter, so that each takes several there as well."""
    if not config["PROGRAMS"]:
        return (tiles,)
    if device.type != "cuda":
        return (min(tiles, 3),)
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return (min(tiles, count * config["PROGRAMS"]),)


def _for_kernel(config: Config) -> dict[str, int]:
    return {name: value for name, value in config.keywords().items() if name != "PROGRAMS"}


def _precision() -> str:
    """Of float32 operands, as torch's own products: ``allow_tf32`` raises after the newer setting was used."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # also tells what set_float32_matmul_precision and allow_tf32 set
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def _launch_product(
    x: Tensor, w: Tensor, out: Tensor, hidden: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor | None,
    swiglu: bool, config: Config,
) -> None:  # fmt: skip
    """x [*, K] with neighbours side by side, w [E, K, N] with any strides, outputs contiguous."""
    experts, depth, columns = (int(n) for n in w.shape)
    rows, columns = out.shape[0], columns // (2 if swiglu else 1)
    if not out.numel():
        return
    tiles = (triton.cdiv(rows, config["BLOCK_M"]) + experts) * triton.cdiv(columns, config["BLOCK_N"])
    whole = depth % config["BLOCK_K"] == 0 and columns % config["BLOCK_N"] == 0
    # lists that the kernel reads as neighbours, such as a column of a router's output
    weight, offsets = weight.contiguous(), offsets.contiguous()
    tokens = None if tokens is None else tokens.contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        wrap_triton(grouped_product)[_grid(tiles, config, x.device)](
            x, w, out, hidden, weight, offsets, offsets if tokens is None else tokens, rows, experts, depth,
            columns, x.stride(0), *w.stride(), INDEXED=tokens is not None, SWIGLU=swiglu, WHOLE=whole,
            PRECISION=_precision(), GROUPS=triton.next_power_of_2(experts + 1), **_for_kernel(config),
        )  # fmt: skip


def _run_product(x: Tensor, w: Tensor, offsets: Tensor, tokens: Tensor | None, config: Config) -> Tensor:
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    out = x.new_empty(rows, w.shape[2])
    _launch_product(as_rows(x), w, out, offsets, offsets, offsets, tokens, False, config)
    return out


def _run_swiglu(
    x: Tensor, w: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor | None, config: Config
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    gate_up, hidden = x.new_empty(rows, w.shape[2]), x.new_empty(rows, w.shape[2] // 2)
    _launch_product(as_rows(x), w, gate_up, hidden, weight, offsets, tokens, True, config)
    return gate_up, hidden


def _run_weight(
    x: Tensor, grad: Tensor, offsets: Tensor, x_tokens: Tensor | None, grad_tokens: Tensor | None,
    transposed: bool, config: Config,
) -> Tensor:  # fmt: skip
    rows = (x if x_tokens is None else x_tokens).shape[0]
    experts, depth, columns = int(offsets.shape[0]), int(x.shape[1]), int(grad.shape[1])
    stored = x.new_empty((experts, columns, depth) if transposed else (experts, depth, columns))
    out = stored.transpose(1, 2) if transposed else stored
    if not out.numel():
        return stored
    x, grad, offsets = as_rows(x), as_rows(grad), offsets.contiguous()
    x_tokens, grad_tokens = (None if t is None else t.contiguous() for t in (x_tokens, grad_tokens))
    tiles = triton.cdiv(depth, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
    with torch.cuda.device_of(x):
        wrap_triton(grouped_weight_gradient)[(experts * tiles,)](
            x, grad, stored, offsets, offsets if x_tokens is None else x_tokens,
            offsets if grad_tokens is None else grad_tokens, rows, depth, columns, x.stride(0), grad.stride(0),
            *out.stride(), X_INDEXED=x_tokens is not None, GRAD_INDEXED=grad_tokens is not None,
            PRECISION=_precision(), **_for_kernel(config),
        )  # fmt: skip
    return stored


def _key(x: Tensor, rows: int, experts: int, depth: int, columns: int) -> Key:
    """Dtype, rows of an expert, and the weight's sizes."""
    return str(x.dtype).removeprefix("torch."), height_of(rows, int(experts)), int(depth), int(columns)


@operator("lf_graph::grouped_product")
def product(x: Tensor, w: Tensor, offsets: Tensor, tokens: Tensor | None) -> Tensor:
    """See :class:`lf_graph.kernels.grouped_gemm.Parts`."""
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    return _run_product(x, w, offsets, tokens, config_of(PRODUCT, _key(x, rows, *w.shape)))


@operator("lf_graph::grouped_swiglu")
def product_swiglu(
    x: Tensor, w: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``gate_up`` [R, 2 F] and ``silu(gate) * up * weight`` [R, F] in one pass over memory."""
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    return _run_swiglu(x, w, weight, offsets, tokens, config_of(SWIGLU, _key(x, rows, *w.shape)))


@operator("lf_graph::grouped_weight_gradient")
def weight_gradient_as_stored(
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    x_tokens: Tensor | None,
    grad_tokens: Tensor | None,
    transposed: bool,
) -> Tensor:
    """[E, K, N], or [E, N, K] if transposed."""
    rows = (x if x_tokens is None else x_tokens).shape[0]
    key = _key(x, rows, offsets.shape[0], x.shape[1], grad.shape[1])
    return _run_weight(x, grad, offsets, x_tokens, grad_tokens, transposed, config_of(WEIGHT, key))


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    x_tokens: Tensor | None,
    grad_tokens: Tensor | None,
    transposed: bool,
) -> Tensor:
    """See :class:`lf_graph.kernels.grouped_gemm.Parts`."""
    stored: Tensor = weight_gradient_as_stored(x, grad, offsets, x_tokens, grad_tokens, transposed)
    return stored.transpose(1, 2) if transposed else stored


@operator("lf_graph::token_sums")
def sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """See :class:`lf_graph.kernels.grouped_gemm.Parts`."""
    tokens, top_k = rows.shape
    out = y.new_empty(tokens, y.shape[1])
    if not out.numel():
        return out
    y, block = as_rows(y), min(1024, triton.next_power_of_2(int(out.shape[1])))  # 8 bf16 a thread of 4 warps
    with torch.cuda.device_of(y):
        wrap_triton(token_sums)[(tokens, triton.cdiv(out.shape[1], block))](
            y, out, rows.contiguous(), out.shape[1], y.stride(0), TOP_K=top_k, BLOCK=block, num_warps=4
        )
    return out


@product.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor, tokens: Tensor | None) -> Tensor:
    return x.new_empty((x if tokens is None else tokens).shape[0], w.shape[2])


@product_swiglu.register_fake
def _(x: Tensor, w: Tensor, weight: Tensor, offsets: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = (x if tokens is None else tokens).shape[0]
    return x.new_empty(rows, w.shape[2]), x.new_empty(rows, w.shape[2] // 2)


@weight_gradient_as_stored.register_fake
def _(
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    x_tokens: Tensor | None,
    grad_tokens: Tensor | None,
    transposed: bool,
) -> Tensor:
    sizes = (grad.shape[1], x.shape[1]) if transposed else (x.shape[1], grad.shape[1])
    return x.new_empty(offsets.shape[0], *sizes)


@sum_rows.register_fake
def _(y: Tensor, rows: Tensor) -> Tensor:
    return y.new_empty(rows.shape[0], y.shape[1])
