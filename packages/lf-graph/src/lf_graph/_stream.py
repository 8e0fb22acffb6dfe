"""The operators of a run as plain data, and the first place where two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PLAIN = (
    int,
    float,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class Step:
    """One operator.

    Attributes:
        op: its name.
        tensors: dtype and shape of each tensor argument.
        values: every other argument, as text, so that nan equals nan.
        where: ``file:line``.
        module: dotted name.
    """

    op: str
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    where: str = ""
    module: str = ""


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs: operator, ``old`` and ``new`` as text, and what it is about."""

    what: str  # "operator", "shape", "value" or "end"
    op: str
    old: str
    new: str
    where: str
    module: str


def step(op: str, args: Sequence[Any], kwargs: Any, where: str = "", module: str = "") -> Step:
    """Describe one operator."""
    leaves = tree_leaves((args, kwargs))
    tensors = tuple(_shape(x) for x in leaves if isinstance(x, Tensor))
    values = tuple(str(x) for x in leaves if isinstance(x, _PLAIN))
    return Step(op, tensors, values, where, module)


def _shape(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def first_difference(old: Sequence[Step], new: Sequence[Step]) -> Difference | None:
    """Where the second run stops doing what the first did; None when it never does."""
    for a, b in zip_longest(old, new):
        if a is None or b is None or a.op != b.op:
            return _other_operator(a, b)
        if a.tensors != b.tensors:
            return _of(a, b, "shape", a.tensors, b.tensors)
        if a.values != b.values:
            return _of(a, b, "value", a.values, b.values)
    return None


def _other_operator(a: Step | None, b: Step | None) -> Difference:
    place = b or a
    assert place is not None
    what = "operator" if a and b else "end"
    return Difference(
        what, place.op, a.op if a else "nothing", b.op if b else "nothing", place.where, place.module
    )


def _of(a: Step, b: Step, what: str, old: tuple[str, ...], new: tuple[str, ...]) -> Difference:
    pairs = [(x, y) for x, y in zip_longest(old, new, fillvalue="nothing") if x != y]
    olds, news = (", ".join(side) for side in zip(*pairs, strict=True))
    return Difference(what, b.op, olds, news, b.where, b.module)
