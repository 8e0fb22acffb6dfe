"""RMSNorm of every head of q and k, then their rotary positions: Qwen3's and Gemma 3's attention, in one pass.

As :func:`rms_norm` followed by :func:`rope`, without the pass over q and k between them, and with one rounding instead
of two. Sources: arXiv 2505.09388 (Qwen3), arXiv 2104.09864 (RoPE).
"""

from __future__ import annotations

from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_floats, require_shape, require_tensors, wide
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton
from lf_graph.kernels._rope_inputs import heads_next_to_width, require_heads, rotated, rows_of_tokens
from lf_graph.kernels.norm import rms_norm

_NAME = "qk_norm_rope"


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    *,
    heads_dim: int = -2,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin, positions)`` in one pass, and so its backward.

    Args:
        q: [B, T, heads, D], or packed [T, heads, D]; slices of a fused qkv are read in place.
        k: likewise, with its own number of heads.
        q_weight: [D], for all heads; may be wider than q (fp32 to bf16).
        k_weight: [D], in the dtype of ``q_weight``.
        cos, sin, positions, heads_dim: as those of :func:`rope`.
        eps: added to the mean square.
        implementation: Triton kernels on a GPU by default; ``plain`` is torch.

    Returns:
        q and k in their own dtypes and shapes; in memory heads are next to D.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a table shorter than T without positions.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    require_tensors(_NAME, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    allow_tensors(_NAME, positions=positions)
    q, k = heads_next_to_width(_NAME, q, k, heads_dim)
    require_heads(_NAME, q, k, cos, sin, positions)
    require_floats(_NAME, q=q, q_weight=q_weight, k_weight=k_weight)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        require_shape(_NAME, name, weight, (q.shape[-1],), "the width of a head")
    if q_weight.dtype != k_weight.dtype:
        raise ValueError(
            f"{_NAME}: q_weight is {q_weight.dtype}, k_weight {k_weight.dtype}: give both one dtype"
        )
    tables = cos, sin, positions
    if q.dim() == 3:
        q, k = (t[0] for t in _run(q[None], k[None], q_weight, k_weight, *tables, eps, implementation))
    else:
        q, k = _run(q, k, q_weight, k_weight, *tables, eps, implementation)
    return heads_next_to_width(_NAME, q, k, heads_dim)


def _run(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    implementation: Implementation,
) -> tuple[Tensor, Tensor]:
    if not runs_on_triton(_NAME, implementation, q):
        angles = rows_of_tokens(cos, positions, q), rows_of_tokens(sin, positions, q)
        return _plain(q, q_weight, eps, *angles), _plain(k, k_weight, eps, *angles)
    from lf_graph.kernels._qk_norm_rope_triton import qk_norm_rope_op

    turned: tuple[Tensor, Tensor] = qk_norm_rope_op(q, k, q_weight, k_weight, cos, sin, positions, eps)
    return turned


def _plain(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by torch's operators; rounded once, as by the kernel."""
    normed = rms_norm(x, weight, eps, dtype=wide(x.dtype), implementation="plain")
    return rotated(normed, cos, sin).to(x.dtype)
