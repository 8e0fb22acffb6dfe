"""Cross entropy of rows of logits as one Triton kernel, whose gradient takes the place of the logits.

A row is read twice and written once: the first read keeps a running maximum and sum of exponentials (arXiv 1805.02867),
the second finds most of the row in the L2 cache. One program owns a row, so every sum has a fixed order.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._interpreter import cast
from lf_graph.kernels._linear_cross_entropy_plain import Terms, plain_rows
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need triton: pip install lf-graph[triton]") from error


@triton.jit
def _block(row, columns, vocab, stride):
    """Logits of some columns in fp32, -inf past the vocabulary.

    The mask is the row's stride, a multiple of 16, so that accesses stay 16 bytes wide for any vocabulary.
    """
    x = tl.load(row + columns, mask=columns < stride, other=float("-inf")).to(tl.float32)
    return tl.where(columns < vocab, x, float("-inf"))


@triton.jit
def _put(row, columns, stride, value):
    tl.store(row + columns, cast(value, row.dtype.element_ty), mask=columns < stride)


@triton.jit
def _log_sum_exp(row, vocab, stride, BLOCK: tl.constexpr):  # noqa: N803
    """(log of the sum of exponentials, sum) of a row."""
    lanes = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    plain = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        x = _block(row, columns, vocab, stride)
        highest = tl.maximum(top, tl.max(x, 0))
        origin = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is no number
        total = total * tl.exp(top - origin) + tl.sum(tl.exp(x - origin), 0)
        plain += tl.sum(tl.where(columns < vocab, x, 0.0), 0)
        top = highest
    return top + tl.log(total), plain


@triton.jit
def _write_gradient(row, target, lse, nan, vocab, stride, z_loss, smoothing, BLOCK: tl.constexpr):  # noqa: N803
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        x = _block(row, columns, vocab, stride)
        gradient = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / vocab
        gradient -= tl.where(columns == target, 1.0 - smoothing, 0.0)
        _put(row, columns, stride, gradient + nan)


@triton.jit
def _write_zeros(row, vocab, stride, BLOCK: tl.constexpr):  # noqa: N803
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        _put(row, start + lanes, stride, tl.zeros([BLOCK], tl.float32))


@triton.jit(do_not_specialize=["ignore_index", "z_loss", "smoothing"])
def cross_entropy_rows(
    logits, stride, targets, losses, vocab, ignore_index, z_loss, smoothing,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """losses[row] = cross entropy of one row; with GRADIENT its derivative is written over the logits.

    A target outside of the vocabulary that is not ``ignore_index`` makes loss and gradient of its row NaN.
    """
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * stride
    target = tl.load(targets + number)
    if target == ignore_index:
        tl.store(losses + number, 0.0)
        if GRADIENT:
            _write_zeros(row, vocab, stride, BLOCK)
    else:
        known = (target >= 0) & (target < vocab)
        nan = tl.where(known, 0.0, float("nan"))
        # Read before the reductions, whose barriers order it before the writes of the gradient.
        chosen = tl.load(row + tl.where(known, target, 0)).to(tl.float32)
        lse, plain = _log_sum_exp(row, vocab, stride, BLOCK)
        loss = lse - (1.0 - smoothing) * chosen + z_loss * lse * lse
        if smoothing > 0.0:  # 0 * -inf is no number
            loss -= smoothing / vocab * plain
        tl.store(losses + number, loss + nan)
        if GRADIENT:
            _write_gradient(row, target, lse, nan, vocab, stride, z_loss, smoothing, BLOCK)


def triton_rows(logits: Tensor, targets: Tensor, losses: Tensor, terms: Terms, gradient: bool) -> None:
    """As ``plain_rows``; the memory of ``logits`` up to its row stride is written too."""
    _launch(config_of(TUNABLE, _key(logits, gradient)), logits, targets, losses, terms, gradient)


def _launch(
    config: Config, logits: Tensor, targets: Tensor, losses: Tensor, terms: Terms, gradient: bool
) -> None:
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        cross_entropy_rows[(len(logits),)](
            logits, logits.stride(0), targets, losses, logits.shape[1],
            terms.ignore_index, terms.z_loss, terms.label_smoothing,
            GRADIENT=gradient, **config.keywords(),
        )  # fmt: skip


def _key(logits: Tensor, gradient: bool) -> Key:
    """Dtype, vocabulary as a power of two, and whether the gradient is written."""
    return str(logits.dtype).removeprefix("torch."), triton.next_power_of_2(logits.shape[1]), gradient


def _config(block: int, warps: int) -> Config:
    return Config((("BLOCK", block),), num_warps=warps)


def _default(key: Key) -> Config:
    block = min(8192, int(key[1]))
    return _config(block, 16 if block > 4096 else 4)


def _candidates(key: Key) -> list[Config]:
    blocks = [b for b in (1024, 2048, 4096, 8192, 16384, 32768) if b <= max(1024, int(key[1]))]
    # 4 to 64 elements a thread: fewer leave lanes idle, more spill registers.
    return [_config(b, w) for b in blocks for w in (4, 8, 16, 32) if 4 <= b // (32 * w) <= 64]


def _problem(key: Key, device: torch.device) -> Problem:
    """Rows of random logits a little short of the bucket's vocabulary, a few of them ignored."""
    dtype, width, gradient = getattr(torch, str(key[0])), int(key[1]), bool(key[2])
    rows, vocab = 1536 if device.type == "cuda" else 8, max(1, width - 15)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, width, generator=generator, device=device).mul_(3).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator, device=device)
    targets[::7] = -100
    terms = Terms(-100, 1e-4, 0.0)

    def run(config: Config) -> tuple[Tensor, ...]:
        written, losses = logits.clone()[:, :vocab], torch.empty(rows, device=device)
        _launch(config, written, targets, losses, terms, gradient)
        return losses, written

    exact, losses = logits[:, :vocab].double(), torch.empty(rows, device=device, dtype=torch.float64)
    plain_rows(exact, targets, losses, terms, gradient)
    return Problem(run, (losses, exact), (1e-5, max(1e-5, torch.finfo(dtype).eps)))


TUNABLE = register(Tunable("cross_entropy_rows", (cross_entropy_rows,), _default, _candidates, _problem))
