"""The one error family of this package."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


class FormatError(ValueError):
    """Bytes, a document or a request that this package refuses.

    Attributes (all optional, None where they do not apply):
        what: one sentence naming the fault.
        path: file concerned.
        offset: byte offset in that file.
        expected, found: the two values that differ.
        record: record id in the file.
        document: name or number of the document being written.
        position: token (or character) position inside that document.
    """

    def __init__(
        self,
        what: str,
        *,
        path: object = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        record: int | None = None,
        document: object = None,
        position: int | None = None,
    ) -> None:
        self.what = what
        self.path = None if path is None else str(path)
        self.offset = offset
        self.expected = expected
        self.found = found
        self.record = record
        self.document = document
        self.position = position
        super().__init__(self._message())

    def _message(self) -> str:
        where = [] if self.path is None else [self.path]
        for label in ("document", "position", "record"):
            value = getattr(self, label)
            if value is not None:
                where.append(f"{label} {value}")
        if self.offset is not None:
            where.append(f"at byte {self.offset}")
        text = f"{', '.join(where)}: {self.what}" if where else self.what
        if self.expected is not None or self.found is not None:
            text += f" (expected {self.expected}, found {self.found})"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not pickle by themselves; workers send these to their parent.
        details = {k: v for k, v in vars(self).items() if k != "what"}
        return functools.partial(type(self), **details), (self.what,)


@dataclass(frozen=True)
class Place:
    """A file and an offset in it: where a parser stands, for its errors."""

    path: str
    offset: int = 0

    def require(self, ok: object, what: str, at: int, expected: object, found: object) -> None:
        """FormatError about `what`, `at` bytes further on, unless `ok`."""
        if not ok:
            raise FormatError(what, path=self.path, offset=self.offset + at, expected=expected, found=found)


class InputError(FormatError):
    """A document handed to the writer or to preprocess that cannot be stored as it is."""


class WorkerError(FormatError):
    """A tokenizing process died or could not be started."""
