"""What a run of preprocess has done so far, durable: a killed run goes on where its last part ends."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from lf_format._errors import FormatError, WorkerError
from lf_format._layout import xxh3

FOLDER = ".preprocess"
PARTS = "parts"  # file of the folder: the list
VERSION = 1
PART_BYTES = 32 << 20
PART_SECONDS = 10.0
Key = Mapping[str, Any]


class Store(Protocol):
    """What Journal needs of a spool: items on disk, added at the end, durable part by part."""

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""

    def __len__(self) -> int: ...

    def sync(self) -> None:
        """Makes what was added durable."""

    def digest(self) -> str:
        """Hash of everything added since this was asked last, once it is durable."""

    def take_up(self, items: int, digest: str, /) -> bool:
        """Counts in the next items on disk, up to `items` in all; False, and none, when their hash is another."""

    def cut(self) -> None:
        """Drops what lies on disk beyond the items that are counted in."""

    def close(self) -> None:
        """Closes its files."""


S = TypeVar("S", bound=Store)


class Journal(Generic[S]):
    """Owns OUTPUT/.preprocess: the spool and the list of its complete parts. A context manager.

    Leaving it removes the folder, except after an interruption (a signal, a dead worker, a full disk) when the run
    has a key. Only one run at a time can have it.

    Args:
        output_dir: exists.
        key: JSON values that decide what the inputs become; None = the run cannot be continued. A folder of
            another key is emptied, and `notes` says so.
        open_spool: makes the spool, from the folder it has for its files.
        unit: what inputs are called in `notes`.

    Attributes:
        spool: what the inputs so far became.
        consumed: inputs that it and `empty` account for.
        empty: (name, reason) of inputs that were left out.
        notes: what became of an earlier run.

    Raises:
        FormatError: another run writes into this output.
    """

    def __init__(
        self, output_dir: Path, key: Key | None, open_spool: Callable[[Path], S], unit: str = "documents"
    ) -> None:
        self._folder, self._key, self._unit = output_dir / FOLDER, key, unit
        self._folder.mkdir(exist_ok=True)
        self._file = (self._folder / PARTS).open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FormatError("another run writes into this output", path=output_dir) from None
        self.consumed, self.empty = 0, list[tuple[str, str]]()
        self.notes: list[str] = []
        self._committed, self._noted, self._time = 0, 0, time.monotonic()
        self.spool = open_spool(self._folder)
        _remove_temporaries(output_dir)
        self._recover()

    @property
    def resumable(self) -> bool:
        """Whether a later run can go on where this one is interrupted."""
        return self._key is not None

    def count(self) -> None:
        """One more input whose items are in the spool."""
        self.consumed += 1
        self._commit_when_due()

    def leave_out(self, name: str, reason: str) -> None:
        """One more input that is not stored."""
        self.empty.append((name, reason))
        self.consumed += 1
        self._commit_when_due()

    def _commit_when_due(self) -> None:
        full = self.spool.nbytes - self._committed >= PART_BYTES
        if self.resumable and (full or time.monotonic() - self._time >= PART_SECONDS):
            self.commit()

    def commit(self) -> None:
        """Ends a part: what was added so far is durable."""
        self.spool.sync()
        self._write(
            {
                "consumed": self.consumed,
                "documents": len(self.spool),
                "hash": self.spool.digest(),
                "empty": self.empty[self._noted :],
            }
        )
        self._committed, self._noted, self._time = self.spool.nbytes, len(self.empty), time.monotonic()

    def _write(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, separators=(",", ":")).encode()
        self._file.write(b"%016x %s\n" % (xxh3(line), line))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _recover(self) -> None:
        """Takes up every part that is whole; the first that is not, and all behind it, are forgotten."""
        self._file.seek(0)
        lines = self._file.readlines()
        head = _parsed(lines[0]) if lines else None
        wanted = {"version": VERSION, "key": self._key}
        if self._key is None or head != wanted:
            if head is not None and self._key is not None:
                self.notes.append(f"an interrupted run was started anew: {_difference(head, wanted)} changed")
            self._file.truncate(0)
            self._write(wanted)
            self.spool.cut()
            return
        end = len(lines[0])
        for line in lines[1:]:
            part = _parsed(line)
            if part is None or not self.spool.take_up(part["documents"], part["hash"]):
                break
            self.consumed = part["consumed"]
            self.empty += [(name, reason) for name, reason in part["empty"]]
            end += len(line)
        self._file.truncate(end)
        self.spool.cut()
        self._committed, self._noted = self.spool.nbytes, len(self.empty)
        if self.consumed:
            self.notes.append(f"continued an interrupted run behind its first {self.consumed} {self._unit}")

    def __enter__(self) -> Journal[S]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = isinstance(value, FormatError) and not isinstance(value, WorkerError)
        self.spool.close()
        if kind is None or refused or not self.resumable:
            shutil.rmtree(self._folder)
        self._file.close()


def _parsed(line: bytes) -> Any:
    """Value of a line of the journal; None when it is not whole."""
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or digest != b"%016x" % xxh3(text):
        return None
    return json.loads(text)


def _difference(head: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    old, new = head.get("key") or {}, wanted["key"]
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(names) or "the version"


def _remove_temporaries(output_dir: Path) -> None:
    """Files of killed runs; this run has the lock, so nobody writes them any more."""
    for split in ("train", "eval"):
        for suffix in ("loongbin", "lfg"):
            for path in output_dir.glob(f".{split}.{suffix}.*.tmp"):
                path.unlink(missing_ok=True)
