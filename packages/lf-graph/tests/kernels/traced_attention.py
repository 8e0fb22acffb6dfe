"""Attention as :mod:`traced` traces operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operators() -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """Each with the shapes of its inputs; the fastest way is asked for, as on a card that was measured."""
    from lf_graph import kernels as k
    from lf_graph.kernels import _attention_choice

    _attention_choice.is_measured = lambda q: True  # in a process of its own
    cu = torch.tensor([0, 20, 37], dtype=torch.int32)
    packed = [(40, 4, 72), (40, 2, 72), (40, 2, 72)]
    return {
        "packed": (lambda *x: k.varlen_attention(*x, cu, causal=True), packed),
        "chosen": (lambda *x: k.attention(*x, cu), packed),
        "fused": (lambda x: k.attention_lengths(*x.unbind(2)), [(2, 20, 3, 4, 64)]),
    }
