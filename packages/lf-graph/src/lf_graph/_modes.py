"""``train()`` and ``eval()`` are part of what was captured: a graph holds its dropout, or its absence."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lf_graph._errors import SignatureError


class TrainingModes:
    """The modes of modules and of everything inside them, at one moment."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self._flags = [m.training for m in self._modules]

    def require(self, name: str) -> None:
        """Refuse to replay in another mode.

        Raises:
            SignatureError: ``train()`` or ``eval()`` was called since; names each class of module once.
        """
        now = [m.training for m in self._modules]
        if now != self._flags:
            changed = zip(self._modules, self._flags, now, strict=True)
            found = [f"training of a {type(m).__name__}: {a} -> {b}" for m, a, b in changed if a is not b]
            raise SignatureError(name, list(dict.fromkeys(found)))
