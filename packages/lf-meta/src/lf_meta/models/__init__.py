"""Models, found by name or by ``module:callable``.

A model takes batches of one of two kinds, and says which by its attribute ``batch_kind``:

    "tokens"    forward(tokens int64 [B, T], lengths int64 [B], loss_mask bool [B, T] or None); ``infer`` also needs
                a method logits(tokens) -> [B, T, vocab]. What a model without the attribute takes. gr00t_n16_lm and
                gr00t_n16_moe also take packed rows, see lf_meta.models.packed.
    "mapping"   forward(batch), a mapping of tensors by name; the model's module lists its keys.

Either way forward returns (loss_sum float [], count int64 []), so that micro-batches and ranks add up and the one
division by the count of the global batch gives the mean.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from lf_meta.errors import ConfigError

Builder = Callable[..., nn.Module]
BatchKind = Literal["tokens", "mapping"]
# Imported when it is built: what one model needs (gr00t_moe: lf_graph) must not slow the start of jobs on another.
_BUILDERS = {
    "gr00t_n16_lm": "lf_meta.models.gr00t_lm:build",
    "gr00t_n16_moe": "lf_meta.models.gr00t_moe:build",
    "gr00t_n16_vla": "lf_meta.models.gr00t_vla:build",
}
_KINDS: dict[str, BatchKind] = {"gr00t_n16_vla": "mapping"}  # of what is registered; the others take tokens
_WAYS_OUT: dict[BatchKind, str] = {
    "tokens": "loongforge trains on token rows; build it in Python with batch_kind='mapping' and feed it mappings",
    "mapping": "build it with batch_kind='tokens' and call it with (tokens, lengths, loss_mask)",
}

__all__ = ["BatchKind", "build_model"]


def _find(name: str) -> Builder:
    module, sep, attribute = _BUILDERS.get(name, name).partition(":")
    if not sep:
        raise ConfigError(
            "model.name", f"no model {name!r}; known: {', '.join(_BUILDERS)}, or module:callable"
        )
    if name not in _BUILDERS and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a model may lie where the command is typed
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError("model.name", f"cannot load {name!r}: {e}") from e
    if not callable(found):
        raise ConfigError("model.name", f"{name!r} is not callable")
    return found  # type: ignore[no-any-return]


def build_model(
    name: str,
    size: str,
    vocab_size: int | None,
    args: Mapping[str, int | float | bool | str],
    batch_kind: BatchKind = "tokens",
) -> nn.Module:
    """Build ``name`` at ``size``, for a caller that feeds it batches of ``batch_kind`` (see the module's docstring).

    Args:
        vocab_size: ids of the data; None is the size's own, for models that have one (gr00t_n16_vla).

    Raises:
        ConfigError: unknown name or size, an argument the model does not have, or a model for other batches.
    """
    if name in _BUILDERS:
        _require_kind(name, _KINDS.get(name, "tokens"), batch_kind)
    try:
        model = _find(name)(size=size, vocab_size=vocab_size, **args)
    except TypeError as e:
        raise ConfigError(
            "model.name", f"{name} cannot be called with size, vocab_size and model.args: {e}"
        ) from e
    if not isinstance(model, nn.Module):
        raise ConfigError("model.name", f"{name} gave a {type(model).__name__}, not a torch module")
    _require_kind(name, getattr(model, "batch_kind", "tokens"), batch_kind)
    return model


def _require_kind(name: str, takes: str, given: BatchKind) -> None:
    if takes != given:
        raise ConfigError(
            "model.name", f"{name} takes {takes} batches, and these are {given} batches: {_WAYS_OUT[given]}"
        )
