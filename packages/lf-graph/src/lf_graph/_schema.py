"""What an operator's schema says: its name, what it writes, whether it only makes a view."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


@lru_cache(maxsize=4096)
def op_name(func: Any) -> str:
    """``aten._to_copy`` for the overload ``aten._to_copy.default``."""
    return (
        str(func.name()).replace("::", ".").split(".")[0]
        + "."
        + str(func.name()).split("::")[1].split(".")[0]
    )


@lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple(
        (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )


@lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Whether every result shares memory with an argument and nothing is written."""
    returns = func._schema.returns
    shares = bool(returns) and all(r.alias_info is not None for r in returns)
    return shares and not _written(func)


def writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that the schema says are written."""
    for position, name in _written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))
