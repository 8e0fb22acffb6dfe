"""Tables in files: one per card, driver and Triton, replaced atomically, shared by the processes of a machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lf_graph.tune._card import Card, slug
from lf_graph.tune._table import Entry, Table, TableError, dump, parse

SHIPPED = Path(__file__).parents[1] / "kernels" / "tables"


class TuneCacheWarning(UserWarning):
    """A table could not be read or written; the message says what was done instead."""


def default_folder() -> Path:
    """``LF_GRAPH_TUNE_DIR``, or ``lf-graph/tune`` in the user's cache folder."""
    if chosen := os.environ.get("LF_GRAPH_TUNE_DIR"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lf-graph" / "tune"


class Store:
    """The table of one card in a folder.

    Attributes:
        path: its file, which need not exist.
        problems: what went wrong with files so far.
    """

    def __init__(self, folder: Path, card: Card) -> None:
        self.path, self.card = folder / card.file_name, card
        self.problems: list[str] = []
        self._tuning = False

    def read(self) -> Table:
        """The table; an empty one, with a warning, if the file is damaged."""
        try:
            table = parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Table(self.card)
        except (OSError, UnicodeDecodeError, TableError) as e:
            self._report(f"{self.path} is not used, and is replaced by the next tuning: {e}")
            return Table(self.card)
        if table.card != self.card:
            self._report(f"{self.path} is not used: it was measured on {table.card}, and this is {self.card}")
            return Table(self.card)
        return table

    def put(self, entry: Entry) -> None:
        """Adds an entry to what other processes wrote meanwhile."""
        with self._locked(".write"):
            try:
                write_atomically(self.path, dump(self.read().with_entry(entry)))
            except OSError as e:
                self._report(f"{self.path} cannot be written, so its choices end with the process: {e}")

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Held by the one process of a machine that tunes; others wait, and then find its entries.

        A search that starts inside another of this process (an implementation that is tried launches a kernel for
        the first time) does not wait for itself.
        """
        if self._tuning:
            yield
            return
        with self._locked(".tuning"):
            self._tuning = True
            try:
                yield
            finally:
                self._tuning = False

    @contextmanager
    def _locked(self, suffix: str) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(f"{self.path}{suffix}", "a")  # noqa: SIM115, closed below; unlocked when it is
        except OSError:
            yield  # a folder that cannot be written is reported where it is written
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
            warnings.warn(problem, TuneCacheWarning, stacklevel=4)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader sees the old or the new one, also after a crash."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def shipped(card: Card, folder: Path = SHIPPED) -> tuple[Table | None, str]:
    """The table that came with the package for a card of this name, and what is wrong with it.

    It may have been measured with another driver or Triton: its choices are right there too, only perhaps not fastest.
    """
    path = folder / f"{slug(card.name)}.json"
    try:
        return parse(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError, TableError) as e:
        return None, f"{path} is not used: {e}"
