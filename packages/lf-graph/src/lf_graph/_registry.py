"""Everything captured in this process that is still alive: one list of statistics, one way to close it all.

Graphs that hold NCCL operations must be gone before their process group is destroyed, or the exit hangs
(pytorch#158029). So :func:`close` is public, and it also runs at exit: before every exit handler that was there
when the last graph was made, which is where a program registers ``destroy_process_group``.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from typing import Any, NoReturn, Protocol

from lf_graph._errors import GraphError


class Living(Protocol):
    """Something that holds graphs."""

    def stats(self) -> Any:
        """Counts and bytes so far."""
        ...

    def close(self) -> None:
        """Free the graphs; may be called twice."""
        ...


class NotCopied:
    """Graphs belong to one process and to the memory that they were captured on."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``."""
        raise GraphError(
            f"a {type(self).__name__} cannot be copied or pickled: its graphs read the memory of their capture; copy "
            "the model without it, and capture again there"
        )


_LIVING: weakref.WeakKeyDictionary[Living, int] = weakref.WeakKeyDictionary()  # in order of registration
_NUMBERS = itertools.count()
os.register_at_fork(after_in_child=_LIVING.clear)  # a child cannot free graphs of its parent's device context


def register(thing: Living) -> None:
    """Count ``thing`` among the living until it is forgotten or collected; it becomes the newest."""
    _LIVING[thing] = next(_NUMBERS)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)  # handlers run newest first


def forget(thing: Living) -> None:
    """``thing`` was closed, or belongs to another that reports for it."""
    _LIVING.pop(thing, None)


def _oldest_first() -> list[Living]:
    return [thing for thing, _ in sorted(_LIVING.items(), key=lambda item: item[1])]


def stats() -> list[Any]:
    """Statistics of every captured object alive, oldest first: what each one's ``stats()`` returns.

    Returns:
        :class:`GraphStats` or :class:`BucketsStats`, which print well and have ``to_json()``.
    """
    return [thing.stats() for thing in _oldest_first()]


def close() -> None:
    """Close every captured object alive, newest first; call it before ``destroy_process_group``.

    All are closed even if one fails.

    Raises:
        ExceptionGroup: the errors of those that could not be closed.
    """
    errors = []
    for thing in reversed(_oldest_first()):
        forget(thing)
        try:
            thing.close()
        except Exception as e:
            errors.append(e)
    if errors:
        raise ExceptionGroup("some graphs could not be closed", errors)


def _close_at_exit() -> None:
    try:
        close()
    except ExceptionGroup as e:  # an exit cannot be refused any more, but it is not silent
        print(f"lf_graph: {e.message}: {list(e.exceptions)}", file=sys.stderr)
