"""What every verb shares: exit codes, the store and its steps by argument, and text that is safe to print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

from ..catalog import Catalog
from ..errors import CkptError, CorruptError
from ..jsonio import encode_item
from ..loading import describe
from ..lock import StoreLock
from ..places import locate
from ..storage import Storage

GOOD, DAMAGED, USAGE, PIPE = 0, 1, 2, 141  # 141: what a shell reports for a process that SIGPIPE ended


class Commands(Protocol):
    """Where a verb adds its parser (argparse names no public class for it)."""

    def add_parser(self, name: str, *, help: str, description: str) -> argparse.ArgumentParser: ...


def add_verb(
    commands: Commands, name: str, run: Any, text: str, *, json_flag: bool = True
) -> argparse.ArgumentParser:
    """A parser with PATH and --json; `run(catalog, arguments)` returns the exit code."""
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("path", metavar="PATH", help="directory of the store")
    if json_flag:
        command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command


def add_step(command: argparse.ArgumentParser, name: str = "step", *, nargs: str | None = "?") -> None:
    """A positional STEP."""
    text = "a step, or an attempt of it such as 100.1"
    command.add_argument(name, metavar=name.upper(), nargs=nargs, help=text)


def catalog_at(path: str, files: Storage | None) -> Catalog:
    """The catalog of the store at a path or URL; files: instead of its own storage, for tests."""
    return Catalog(*locate(path, files=files))


@contextlib.contextmanager
def locked(catalog: Catalog) -> Iterator[None]:
    """Be the one writer of the store; LockedError when there is another."""
    lock = StoreLock(catalog.files, os.path.join(catalog.path, "LOCK"))
    try:
        yield
    finally:
        lock.release()


def chosen(catalog: Catalog, step: str | None) -> list[str]:
    """Folders that an argument names, oldest attempt first; CkptError when there are none."""
    folders = catalog.folders()
    found = [f for f in folders if step is None or f == step or f.partition(".")[0] == step]
    if not found:
        raise CkptError(
            f"{catalog.path}: no committed step {step or ''}; there are: {', '.join(folders) or 'none'}"
        )
    return found


def emit(arguments: argparse.Namespace, data: Any, lines: Iterable[str]) -> None:
    """Print `data` as JSON when --json is given (bytes and NaN as in a manifest), else the lines."""
    if arguments.json:
        print(json.dumps(encode_item(data, "output")))
        return
    for line in lines:
        print(line)


def problem(error: Exception) -> dict[str, Any]:
    """An error as data: what is wrong and where the first bad block is."""
    if not isinstance(error, CorruptError):
        return {"reason": describe(error)}
    names = ("path", "reason", "tensor", "extent", "offset", "expected", "found")
    return {name: value for name in names if (value := getattr(error, name)) is not None}


def plain(text: str) -> str:
    """Text of a store as one may print it: control characters (a terminal obeys them) and lone surrogates escaped."""
    return text if text.isprintable() else text.encode("unicode_escape", "surrogatepass").decode("ascii")


def human(count: int) -> str:
    """Bytes with a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def when(seconds: int) -> str:
    """A time of a manifest in UTC; a hostile one may lie beyond any calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"
