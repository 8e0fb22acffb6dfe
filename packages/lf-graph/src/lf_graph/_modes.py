"""``train()`` and ``eval()`` are part of what was captured: a graph holds its dropout, or its absence."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lf_graph._errors import GraphError, SignatureError
from lf_graph._replaced import Below, replaced


class TrainingModes:
    """The modes of modules and of everything inside them, at one moment."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self._flags = [m.training for m in self._modules]

    def add(self, roots: Iterable[nn.Module]) -> None:
        """Take in more modules, in the mode in which they are now; inside :meth:`watching`."""
        known = set(self._modules)
        new = [m for m in dict.fromkeys(m for root in roots for m in root.modules()) if m not in known]
        self._modules += new
        self._flags += [m.training for m in new]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Leave out the modules whose mode the captured function sets by itself, inside the ``with`` block.

        GR00T puts its frozen towers into ``eval()`` in every forward: whatever the caller left there does not matter.
        """
        touched = set()

        def noting(below: Below) -> Any:
            def train(module: nn.Module, mode: bool = True) -> nn.Module:
                touched.add(id(module))
                switched: nn.Module = below.held(module, mode)
                return switched

            return train

        try:
            with replaced(nn.Module, "train", noting):  # eval() and the children come through here too
                yield
        finally:
            known = zip(self._modules, self._flags, strict=True)
            kept = [(m, flag) for m, flag in known if id(m) not in touched and m.training == flag]
            self._modules, self._flags = [m for m, _ in kept], [flag for _, flag in kept]

    def require(self, name: str, otherwise: str = "or capture once more in this mode") -> None:
        """Refuse to replay in another mode.

        Args:
            otherwise: what else can be done than to call ``train()`` or ``eval()``.

        Raises:
            SignatureError: ``train()`` or ``eval()`` was called since; names each class of module once.
        """
        now = [m.training for m in self._modules]
        if now != self._flags:
            changed = zip(self._modules, self._flags, now, strict=True)
            found = [f"training of a {type(m).__name__}: {a} -> {b}" for m, a, b in changed if a is not b]
            fix = f"call train() or eval() as before the capture, {otherwise}"
            raise SignatureError(name, list(dict.fromkeys(found)), fix)


def require_no_inference_mode(name: str) -> None:
    """Refuse a capture whose memory would be inference tensors, which nobody can write to later.

    Raises:
        GraphError: inside ``torch.inference_mode()``, or where every gradient is read back to look for NaN.
    """
    require_no_anomaly_mode(name)
    if torch.is_inference_mode_enabled():
        raise GraphError(
            f"{name}: capture outside of torch.inference_mode(); torch.no_grad() captures no backward"
        )


def require_gradients_on(name: str) -> None:
    """Refuse to capture a training step where autograd is off.

    Raises:
        GraphError: inside ``torch.no_grad()`` or ``torch.inference_mode()``, or where every gradient is read back.
    """
    require_no_anomaly_mode(name)
    if not torch.is_grad_enabled():
        raise GraphError(
            f"{name}: the first batch of a signature is captured with its backward, so call it outside of "
            "torch.no_grad() and torch.inference_mode()"
        )


def require_no_anomaly_mode(name: str) -> None:
    """Refuse a capture in which autograd reads every gradient back.

    Raises:
        GraphError: while ``torch.autograd.detect_anomaly()`` looks for NaN.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise GraphError(
            f"{name}: torch.autograd.detect_anomaly() reads every gradient back, which a graph cannot: look for the "
            "NaN in a plain backward of the same loss and batch, or give it check_nan=False"
        )


class _Captures(threading.local):
    """How many captures, and runs for them, are going on in a thread."""

    depth = 0


_captures = _Captures()


@contextmanager
def inside_a_capture() -> Iterator[None]:
    """What is called in the block, by this thread, is to become part of a graph."""
    _captures.depth += 1
    try:
        yield
    finally:
        _captures.depth -= 1


def require_no_capture(name: str) -> None:
    """Refuse to launch graphs inside of :func:`inside_a_capture`.

    Raises:
        GraphError: with the way out.
    """
    if _captures.depth:
        raise GraphError(
            f"{name} was called inside of what is being captured, and graphs do not nest: call the function or module "
            "itself there, which makes it part of the one graph"
        )
