"""Our attention as one of transformers' attention implementations, through its public registries.

transformers asks for a mask once a forward, and for attention in every layer. The mask of ours is not a mask but
int32 offsets [2, 2 * batch + 1] on the device, of queries and of keys: each row of a batch is one sequence of padding
and one of tokens, whichever side the padding is on. Nothing is read by the host, and nothing has the size of a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._errors import GraphError
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels.attention import attention

_NAMES: dict[Implementation, str] = {
    "auto": "lf_graph", "triton": "lf_graph_triton", "plain": "lf_graph_plain",
}  # fmt: skip


class UnsupportedAttentionError(GraphError):
    """A model asked our attention for what it does not compute; the message says what, and what to do instead."""


@dataclass(frozen=True)
class _NoOffsets:
    """In the place of a mask that offsets cannot say; refused only by a layer that would need it."""

    reason: str


def register_attention(implementation: Implementation = "auto") -> str:
    """Makes our attention known to transformers, for ``attn_implementation="lf_graph"``.

    It takes no mask, left or right padding (a 2-D ``attention_mask``), sequences packed into one row (``cu_seq_lens_q``
    and ``cu_seq_lens_k``, as transformers' ``DataCollatorWithFlattening`` gives them), grouped heads, heads up to 256,
    a dynamic cache, and windows that are not shorter than the keys. It refuses dropout, shorter windows, soft caps,
    sinks, position biases, masks of other forms, attention weights as a result, and caches of a fixed size. Rows of
    padding get values of no meaning, so the first token behind left padding needs the label -100. A padding mask with
    gaps fails an assertion on the device. A model that is compiled or captured needs an ``attention_mask``, if only of
    ones (:func:`loss_of` passes one).

    Args:
        implementation: of :func:`attention`, "auto" being the fastest that was measured; each has a name of its own.

    Returns:
        The name: "lf_graph" for "auto". Registering again changes nothing. It is part of a pickled model, which needs
        the registration where it is loaded.

    Raises:
        GraphError: transformers is not installed, or has no such registries.
        ValueError: an unknown implementation.
    """
    if implementation not in _NAMES:
        raise ValueError(f"register_attention: implementation={implementation!r}: one of auto, triton, plain")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as e:
        raise GraphError(
            "transformers with AttentionInterface and AttentionMaskInterface is needed: pip install -U transformers"
        ) from e
    if (
        "q_length" not in inspect.signature(sdpa_mask).parameters
    ):  # 5.2 says it by cache_position, 5.4 by lengths
        raise GraphError(
            "transformers does not tell masks the number of queries: pip install -U transformers"
        )
    name = _NAMES[implementation]
    AttentionInterface.register(name, _FORWARDS[implementation])
    AttentionMaskInterface.register(name, offsets_for_mask)
    return name


def models_in(model: nn.Module) -> dict[str, Any]:
    """The outermost models of transformers in ``model``, by path.

    Raises:
        GraphError: transformers is not installed.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as e:
        raise GraphError("attention=True is for models of transformers: pip install transformers") from e
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[path] = module
    return found


def exchange(model: Any, implementation: Implementation) -> Callable[[], None] | None:
    """Sets our attention; returns the way back, or None where the model does not let it be set."""
    name = register_attention(implementation)
    before = {path: (m, m.config._attn_implementation) for path, m in _configured(model).items()}
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        return None

    def back() -> None:
        for inner, was in before.values():  # from the outside in: each sets all that it holds
            inner.set_attn_implementation(was)

    return back


def is_ours(model: Any) -> bool:
    """Whether a model of transformers runs our attention."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) in _NAMES.values()


def _configured(model: Any) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules() if hasattr(m, "set_attn_implementation")}


# -- the mask: once a forward ---------------------------------------------------------------------------------


def offsets_for_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Tensor | _NoOffsets | None:
    """What transformers calls to make a mask: offsets, None where there is no padding to tell of.

    Args:
        attention_mask: bool [batch, kv_length], or None. Other arguments are those of transformers' ``sdpa_mask``.
    """
    causal = allow_is_causal_skip
    # transformers allows to skip a mask that is causal or full, but for padding and a window, and no other.
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        return _NoOffsets(
            "a mask that is not causal or full: for packed sequences pass cu_seq_lens_q and cu_seq_lens_k; when it is "
            "compiled or captured pass attention_mask (of ones): without, transformers takes any batch for a packed one"
        )
    if local_size is not None and local_size < kv_length:
        return _NoOffsets(f"a window of {local_size} keys out of {kv_length}")
    if causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        return _NoOffsets("a cache of a fixed size, whose last rows are not the newest: use a dynamic cache")
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, kv_length):
        return _NoOffsets(f"attention_mask is {list(attention_mask.shape)}, not {[batch_size, kv_length]}")
    return padding_offsets(attention_mask, q_length, causal)


def padding_offsets(mask: Tensor, q_length: int, causal: bool) -> Tensor:
    """Offsets of padding and tokens of every row, in turn.

    Args:
        mask: bool [batch, keys]; True for tokens, which must be one run in each row (checked on the device).
        q_length: queries in a row. Causal ones belong to the last keys, and padding among them to padding; others
            belong to all tokens.

    Returns:
        int32 [2, 2 * batch + 1]: ``cu_seqlens`` of queries and of keys, whose odd sequences are those of tokens.
    """
    keys = mask.shape[1]
    start = mask.int().argmax(1)
    stop = start + mask.sum(1)
    position = torch.arange(keys, device=mask.device)
    torch._assert_async(
        (mask == ((position >= start[:, None]) & (position < stop[:, None]))).all(),
        "attention_mask of lf_graph attention: tokens of a row must be side by side",
    )
    of_keys = _in_turn(start, stop, keys)
    if not causal:
        return torch.stack(
            (_in_turn(torch.zeros_like(start), torch.full_like(stop, q_length), q_length), of_keys)
        )
    earlier = keys - q_length
    queries = [(t - earlier).clamp(0, q_length) for t in (start, stop)]
    return torch.stack((_in_turn(queries[0], queries[1], q_length), of_keys))


def _in_turn(start: Tensor, stop: Tensor, rows: int) -> Tensor:
    """0, then first and last of every row's run as rows of the flat batch: int32 [2 * batch + 1]."""
    first = torch.arange(len(start), device=start.device) * rows
    ends = torch.stack((first + start, first + stop), 1).flatten()
    return torch.cat((ends.new_zeros(1), ends)).to(torch.int32)


# -- attention: once a layer ----------------------------------------------------------------------------------


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _NoOffsets | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    implementation: Implementation,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a layer.

    Args:
        module: the layer; its ``is_causal`` holds where the argument is None.
        query: [batch, heads, q_length, head_dim].
        key, value: [batch, kv_heads, kv_length, head_dim].
        attention_mask: from :func:`offsets_for_mask`.
        options: of other implementations; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are read.

    Returns:
        [batch, q_length, heads, head_dim], and no weights.

    Raises:
        UnsupportedAttentionError: see :func:`register_attention`.
    """
    _require_supported(dropout, key.shape[2], options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    offsets = _offsets(attention_mask, options)
    if offsets is None:
        return attention(q, k, v, causal=causal, scale=scaling, implementation=implementation), None
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = attention(
        rows[0], rows[1], rows[2], *offsets, causal=causal, scale=scaling, implementation=implementation
    )
    return out.view(q.shape), None


# partial objects of this module, not lambdas: transformers may pickle what is registered.
_FORWARDS = {name: partial(attention_forward, implementation=name) for name in _NAMES}


def _require_supported(dropout: float, keys: int, options: dict[str, Any]) -> None:
    if dropout:
        raise _refused(f"dropout {dropout}: set attention_dropout to 0 in the config")
    window = options.get("sliding_window")
    if window is not None and window < keys:
        raise _refused(f"a window of {window} keys out of {keys}")
    for name, what in (("softcap", "a soft cap"), ("s_aux", "sinks"), ("position_bias", "a position bias")):
        if options.get(name) is not None:
            raise _refused(f"{what} ({name})")
    if options.get("output_attentions"):
        raise _refused("attention weights as a result (output_attentions)")


def _offsets(mask: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """cu_seqlens of queries and keys; None for full rows."""
    packed = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if packed[0] is not None and packed[1] is not None:
        return packed[0].to(torch.int32), packed[1].to(torch.int32)
    if mask is None:
        return None
    if isinstance(mask, _NoOffsets):
        raise _refused(mask.reason)
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.dim() != 2 or len(mask) != 2:
        shape = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise _refused(f"a mask of its own ({shape}): pass a 2-D attention_mask of padding to the model")
    return mask[0], mask[1]


def _refused(what: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f"lf_graph attention does not compute {what}; or take attn_implementation='sdpa' for this model"
    )
