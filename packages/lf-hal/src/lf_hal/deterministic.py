"""Which transforms are random: each is run, and what it draws from or gives is looked at.

A transform that draws from a global generator has another result whenever somebody else drew before it, even when it is
seeded; one with a generator, a clock or a counter of its own gives another result for the same input the second time.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lf_hal.errors import NondeterministicError

__all__ = ["Finding", "check_deterministic", "random_transforms"]

Transform = Callable[[Any], Any]
_SEED = 20240229


@dataclass(frozen=True)
class Finding:
    """A transform that is not a function of its input: its name, and what makes it random."""

    name: str
    reason: str


def check_deterministic(
    transforms: Transform | Sequence[Transform] | Mapping[str, Transform], sample: Any
) -> None:
    """NondeterministicError, naming each transform that is random on `sample`, with what it draws from.

    The transforms are run one after the other, each on a copy of what the one before it gave. A composition (an object
    with a list `transforms`) is looked into, a torch module is not. Global generators are left as they were.
    """
    found = random_transforms(transforms, sample)
    if found:
        raise NondeterministicError([f"{f.name} {f.reason}" for f in found])


def random_transforms(
    transforms: Transform | Sequence[Transform] | Mapping[str, Transform], sample: Any
) -> list[Finding]:
    """What :func:`check_deterministic` would raise for."""
    found: list[Finding] = []
    with _generators_kept():
        for name, transform in _named(transforms):
            reason, sample = _try(transform, sample)
            if reason:
                found.append(Finding(name, reason))
    return found


def _named(given: Any, prefix: str = "") -> Iterator[tuple[str, Transform]]:
    inner = getattr(given, "transforms", None)
    if isinstance(given, Mapping):
        for name, transform in given.items():
            yield from _named(transform, f"{prefix}{name}")
    elif isinstance(given, Sequence):
        for number, transform in enumerate(given):
            yield from _named(transform, f"{prefix}{number}: ")
    elif isinstance(inner, Sequence) and type(given).__name__ == "Compose":
        yield from _named(list(inner), prefix)
    else:
        own = getattr(given, "__qualname__", type(given).__name__)
        yield (prefix + own if not prefix or prefix.endswith(": ") else f"{prefix} ({own})"), given


def _try(transform: Transform, sample: Any) -> tuple[str, Any]:
    """(why it is random, or nothing; what it gave)."""
    _seed()
    before = _states()
    first = transform(copy.deepcopy(sample))
    drew = [name for name, state in _states().items() if state != before.get(name)]
    _seed()
    second = transform(copy.deepcopy(sample))
    if drew:
        return f"draws from the global generator of {', '.join(drew)}", first
    if _fingerprint(first) != _fingerprint(second):
        return (
            "gives another result the second time (a generator of its own without a seed, a clock, a counter)",
            first,
        )
    return "", first


def _fingerprint(value: Any) -> Any:
    """Something that is equal exactly where two results are."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        flat = tensor.reshape(-1)
        return (
            str(tensor.dtype),
            tuple(tensor.shape),
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
        )
    if isinstance(value, np.ndarray):
        return (
            str(value.dtype),
            value.shape,
            value.tobytes() if value.dtype != object else pickle.dumps(value),
        )
    if isinstance(value, Mapping):
        return {key: _fingerprint(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fingerprint(item) for item in value]
    if isinstance(value, float | complex):
        return repr(value)  # NaN is equal to itself here
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs the object's own code, which may raise anything
        return repr(value)


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)  # the legacy generator is the one that libraries share
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(_SEED)


def _states() -> dict[str, bytes]:
    found = {
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


@contextmanager
def _generators_kept() -> Iterator[None]:
    torch = sys.modules.get("torch")
    python, legacy = random.getstate(), np.random.get_state()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        if torch is not None and of_torch is not None:
            torch.set_rng_state(of_torch)
