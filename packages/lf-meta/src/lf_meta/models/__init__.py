"""Models, found by name or by ``module:callable``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping

from torch import nn

from lf_meta.errors import ConfigError
from lf_meta.models import gr00t_lm

Builder = Callable[..., nn.Module]
_BUILDERS: dict[str, Builder] = {"gr00t_n16_lm": gr00t_lm.build}

__all__ = ["build_model", "gr00t_lm"]


def _find(name: str) -> Builder:
    if name in _BUILDERS:
        return _BUILDERS[name]
    module, sep, attribute = name.partition(":")
    if not sep:
        raise ConfigError(
            "model.name", f"no model {name!r}; known: {', '.join(_BUILDERS)}, or module:callable"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a model may lie where the command is typed
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError("model.name", f"cannot load {name!r}: {e}") from e
    if not callable(found):
        raise ConfigError("model.name", f"{name!r} is not callable")
    return found  # type: ignore[no-any-return]


def build_model(
    name: str, size: str, vocab_size: int, args: Mapping[str, int | float | bool | str]
) -> nn.Module:
    """Build ``name`` at ``size``.

    Its forward takes (tokens int64 [B, T], lengths int64 [B], loss_mask bool [B, T] or None) and returns
    (loss_sum float [], token_count int64 []); ``infer`` needs a method ``logits(tokens) -> [B, T, vocab]``.

    Raises:
        ConfigError: unknown name or size, or an argument the model does not have.
    """
    try:
        model = _find(name)(size=size, vocab_size=vocab_size, **args)
    except TypeError as e:
        raise ConfigError(
            "model.name", f"{name} cannot be called with size, vocab_size and model.args: {e}"
        ) from e
    if not isinstance(model, nn.Module):
        raise ConfigError("model.name", f"{name} gave a {type(model).__name__}, not a torch module")
    return model
