"""Replace attributes of torch for a while, in several threads at once.

Two captures in two threads end in any order. A block that put back what it had found would then leave the other one's
replacement there for good; here each replacement is taken out of the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Below:
    """What a replacement stands for: the original, or the replacement of a block that began earlier."""

    held: Any


_lock = threading.Lock()
_stacks: dict[tuple[int, str], list[Below]] = {}


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Below], Any]) -> Iterator[None]:
    """Let ``make(below)`` stand in the place of an attribute in the block; it calls ``below.held`` at each call."""
    below = Below(None)
    with _lock:
        stack = _stacks.setdefault((id(owner), name), [])
        below.held = vars(owner)[name]
        setattr(owner, name, make(below))
        stack.append(below)
    try:
        yield
    finally:
        with _lock:
            place = stack.index(below)
            if place + 1 < len(stack):
                stack[place + 1].held = below.held
            else:
                setattr(owner, name, below.held)
            del stack[place]
