"""Models, found by name or by ``module:callable``."""

from __future__ import annotations

import importlib
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
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError("model.name", f"cannot load {name!r}: {e}") from e
    if not callable(found):
        raise ConfigError("model.name", f"{name!r} is not callable")
    return found  # type: ignore[no-any-return]


def build_model(
    name: str, size: str, vocab_size: int, args: Mapping[str, int | float | bool | str]
) -> nn.Module:
    """Build ``name`` at ``size``; its forward takes (tokens int64 [B, T], lengths int64 [B]) and
    returns (loss_sum float [], token_count int64 []).

    Raises:
        ConfigError: unknown name or size, or an argument the model does not have.
    """
    return _find(name)(size=size, vocab_size=vocab_size, **args)
