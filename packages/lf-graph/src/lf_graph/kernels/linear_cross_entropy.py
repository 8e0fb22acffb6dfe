"""Cross entropy of a linear layer's outputs that never holds all logits.

Tokens are taken in chunks: a product gives the chunk's logits, one kernel turns them in place into their derivatives,
two products turn these into the gradients of the hidden states and of the weight. So the gradients are ready before
backward, which multiplies them by the upstream scalar. That is three products, as without fusion; keeping the logits of
no chunk and computing them again in backward (arXiv 2411.09009) would take four, a third more of what takes nearly all
of the time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lf_graph._errors import GraphError
from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation, KernelUnavailableError, use_triton
from lf_graph.kernels._head import Head, padded
from lf_graph.kernels._linear_cross_entropy_plain import Terms, plain_rows

Rows = Callable[[Tensor, Tensor, Tensor, Terms, bool], None]
OPERATOR = "linear_cross_entropy"
_SHARE = 10  # a chunk holds at most a tenth of many tokens, and so of their logits
# Rows below which the products of a chunk leave multiprocessors idle.
_LEAST_ROWS = 1024
_TILE = 128  # rows of a tile of a product


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["sum", "mean"] = "sum",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    accumulate_fp32: bool = True,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Cross entropy of ``hidden @ weight.T + bias`` and ``targets``, without holding the logits.

    Beside inputs and gradients it needs the logits of one chunk, in the dtype of the products, and what
    ``accumulate_fp32`` says. Gradients are bitwise repeatable. They are computed in the forward pass (only those that
    are needed) and scaled in place in backward, unless the graph is kept. There are no second derivatives.

    Under autocast the products run in its dtype, and the gradient of a float32 weight is summed in float32 without
    rounding in between; otherwise hidden, weight and bias have one dtype. Until the upstream scalar meets them,
    gradients are those of the summed loss, which may overflow a float16 weight's: hold it in float32, under autocast.

    Args:
        hidden: float [..., dim].
        weight: float [vocab, dim].
        targets: int64 [...], the class of every row of ``hidden``. One that is outside of [0, vocab) and not
            ``ignore_index`` makes the loss and the gradients NaN: nothing on a device may stop to report it.
        bias: float [vocab].
        ignore_index: target of rows without a loss; they are not counted, and their gradient is zero.
        reduction: "sum", or "mean": the sum over max(count, 1), so 0 where nothing is counted.
        z_loss: adds ``z_loss * logsumexp(logits)^2`` to the loss of each counted row (PaLM, arXiv 2204.02311, section
            5, where it is 1e-4).
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        chunk: tokens in a chunk; by default a tenth of them in whole tiles of 128, and at least 1024.
        accumulate_fp32: sum the chunks' gradients of a narrower weight in float32, which takes 4 bytes for each of its
            elements until the forward pass ends. False sums in its own dtype, which rounds once a chunk: in bf16, 11
            chunks made the gradient's error 3.2 times that of the unfused operators (8192 tokens, on a CPU).
        implementation: "plain", "triton", or "auto": Triton on a GPU, but plain for float64.

    Returns:
        (loss [] in float32, float64 for float64 inputs; number of rows with a loss, int64 []).

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
        GraphError: in backward, with ``create_graph=True``.
    """
    require_tensors(OPERATOR, hidden=hidden, weight=weight, targets=targets)
    allow_tensors(OPERATOR, bias=bias)
    dtype = _product_dtype(hidden, weight, bias)
    _check_shapes(hidden, weight, targets, bias)
    _check_options(reduction, z_loss, label_smoothing, chunk)
    loss, count, *_ = torch.ops.lf_graph.linear_cross_entropy(
        hidden.flatten(0, -2), weight, bias, targets.flatten(), ignore_index, z_loss, label_smoothing,
        dtype, chunk or 0, accumulate_fp32, implementation,
        [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)],
    )  # fmt: skip
    return (loss / count.clamp(min=1) if reduction == "mean" else loss), count


def _product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Dtype of the products: autocast's where it is on (which leaves float64 alone), else the one of the inputs."""
    device = hidden.device.type
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if not all(d.is_floating_point for d in dtypes):
        raise ValueError(
            f"{OPERATOR}: hidden, weight and bias are floating point; here {sorted(map(str, dtypes))}"
        )
    if device != "meta" and torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    if len(dtypes) > 1:
        raise ValueError(
            f"{OPERATOR}: hidden, weight and bias have dtypes {sorted(map(str, dtypes))}: cast them to one, "
            "or call under torch.autocast"
        )
    return hidden.dtype


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"{OPERATOR}: weight is [vocab, dim] and not empty; here {list(weight.shape)}")
    if hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{OPERATOR}: hidden is [..., dim] with the weight's dim {weight.shape[1]}; here {list(hidden.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{OPERATOR}: targets are {list(hidden.shape[:-1])}, one for each row of hidden; here {list(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"{OPERATOR}: targets are int64, here {targets.dtype}: pass targets.long()")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{OPERATOR}: bias is [{weight.shape[0]}]; here {list(bias.shape)}")
    if any(t.device != hidden.device for t in (weight, targets, bias) if t is not None):
        raise ValueError(f"{OPERATOR}: hidden is on {hidden.device}; move weight, targets and bias there")


def _check_options(reduction: str, z_loss: float, label_smoothing: float, chunk: int | None) -> None:
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"{OPERATOR}: reduction={reduction!r}: sum or mean (a loss per token has no gradient that is known in the "
            "forward pass)"
        )
    if not z_loss >= 0:
        raise ValueError(f"{OPERATOR}: z_loss={z_loss} is negative")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{OPERATOR}: label_smoothing={label_smoothing} is not within [0, 1]")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{OPERATOR}: chunk={chunk}: at least one token, or None")


def chunk_rows(tokens: int) -> int:
    """Tokens in a chunk by default."""
    return max(_LEAST_ROWS, tokens // _SHARE // _TILE * _TILE)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Gradients:
    """Sums over the chunks; memory of no element for what needs none."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool], sums: torch.dtype
    ) -> None:
        self.wanted, self._dtype = wanted, weight.dtype
        self.hidden = hidden.new_empty((len(hidden) if wanted[0] else 0, hidden.shape[1]))
        shape = weight.shape if wanted[1] else (0,)
        # Zeros where no chunk will overwrite them.
        make = weight.new_empty if len(hidden) else weight.new_zeros
        self.weight = make(shape, dtype=sums)
        self.bias = weight.new_zeros(len(weight) if wanted[2] else 0, dtype=_sum_dtype(weight.dtype))

    def add(self, start: int, derivatives: Tensor, x: Tensor, head: Head) -> None:
        """Adds the chunk from token ``start`` on: derivatives [rows, vocab] of the logits of x [rows, dim]."""
        hidden, weight, bias = self.wanted
        if hidden:
            head.hidden(derivatives, self.hidden[start : start + len(x)])
        if weight:
            head.weight(derivatives, x, self.weight, add=start > 0)
        if bias:
            self.bias += derivatives.sum(0, dtype=self.bias.dtype)

    def rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of hidden, weight and bias, in their dtypes."""
        self.weight, self.bias = self.weight.to(self._dtype), self.bias.to(self._dtype)
        return self.hidden, self.weight, self.bias


class _Chunks:
    """Logits of one chunk of at most ``size`` tokens after another, in the same memory."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, size: int
    ) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.size = max(1, min(size, len(hidden)))
        self.head = Head(weight.to(dtype), None if bias is None else bias.to(dtype))
        self._buffer = hidden.new_empty((self.size, padded(len(weight))), dtype=dtype)
        # oneDNN reads bf16 in pairs: of an odd vocabulary one column too many, times zero, which NaN survives.
        self._buffer[:, len(weight) :].zero_()

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first token, its chunk of hidden [rows, dim], logits [rows, vocab])."""
        for start in range(0, len(self.hidden), self.size):
            x = self.hidden[start : start + self.size].to(self.dtype)
            yield start, x, self.head.logits(x, self._buffer[: len(x)])


def losses_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, z_loss: float,
    label_smoothing: float, dtype: torch.dtype, chunk: int, accumulate_fp32: bool, implementation: Implementation,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, count, gradients of hidden, weight and bias: of no element where not wanted)."""
    narrow = not accumulate_fp32 and weight.dtype == dtype
    gradients = _Gradients(hidden, weight, wanted, dtype if narrow else _sum_dtype(weight.dtype))
    with torch.autocast(hidden.device.type, enabled=False):
        chunks = _Chunks(hidden, weight, bias, dtype, chunk or chunk_rows(len(hidden)))
        terms = Terms(ignore_index, z_loss, label_smoothing)
        loss = _sum_losses(chunks, targets, terms, gradients, _rows_of(implementation, dtype, hidden.device))
        del chunks  # before the gradients' sums are rounded, for which there is room where the logits were
        return loss, (targets != ignore_index).sum(), *gradients.rounded()


def _sum_losses(chunks: _Chunks, targets: Tensor, terms: Terms, gradients: _Gradients, rows: Rows) -> Tensor:
    """Sum of the losses of all tokens []; fills the gradients."""
    targets = targets.contiguous()  # as the kernel reads them
    losses = chunks.hidden.new_empty(len(targets), dtype=_sum_dtype(chunks.dtype))
    for start, x, logits in chunks:
        part = slice(start, start + len(x))
        rows(logits, targets[part], losses[part], terms, any(gradients.wanted))
        gradients.add(start, logits, x, chunks.head)
    return losses.sum()


def _rows_of(implementation: Implementation, dtype: torch.dtype, device: torch.device) -> Rows:
    """What turns logits into losses and derivatives."""
    if dtype == torch.float64 and implementation == "auto":
        implementation = "plain"  # a float64 result is for checking others; the kernel sums in float32
    if not use_triton(OPERATOR, implementation, device):
        return plain_rows
    if dtype == torch.float64:
        raise KernelUnavailableError(
            f"{OPERATOR}: the Triton kernel sums in float32: pass implementation='plain'"
        )
    from lf_graph.kernels._linear_cross_entropy_triton import triton_rows

    return triton_rows


# One operator that compilers do not look into: they would copy the buffers that it writes in place.
_operator = torch.library.custom_op(
    "lf_graph::linear_cross_entropy",
    losses_and_gradients,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, float z_loss, "
    "float label_smoothing, ScalarType dtype, int chunk, bool accumulate_fp32, str implementation, "
    "bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, z_loss: float,
    label_smoothing: float, dtype: torch.dtype, chunk: int, accumulate_fp32: bool, implementation: Implementation,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        hidden.new_empty((), dtype=_sum_dtype(dtype)),
        targets.new_empty(()),
        hidden.new_empty((len(hidden) if wanted[0] else 0, hidden.shape[1])),
        weight.new_empty(weight.shape if wanted[1] else 0),
        weight.new_empty(len(weight) if wanted[2] else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *gradients = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*gradients)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise GraphError(
            f"{OPERATOR} has no second derivatives, and create_graph=True asks for them: "
            "use torch.nn.functional.cross_entropy there"
        )
    gradients: list[Tensor | None] = [None, None, None]
    if upstream is not None:
        for i, (gradient, needed) in enumerate(zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)):
            gradients[i] = _scaled(gradient, upstream) if needed else None
    return (*gradients, *[None] * 9)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor [], in the same memory if this is its last use."""
    # At least one dimension, else torch rounds the factor to the gradient's dtype before it multiplies.
    factor = factor.reshape([1] * gradient.ndim)
    # Compilers, whose tensors are of other types while they trace, reuse memory on their own.
    if type(gradient) is not Tensor or torch._C._autograd._get_current_graph_task_keep_graph():
        return torch.mul(gradient, factor).to(gradient.dtype)
    return torch.mul(gradient, factor, out=gradient)


_operator.register_autograd(_backward, setup_context=_save)
