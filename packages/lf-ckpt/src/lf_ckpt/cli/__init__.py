"""`lf-ckpt`: look at a store, check it, compare steps, clean it, mend it. One module per verb.

Exit codes: 0 good, 1 damaged, 2 usage (also: cannot be read, locked by another writer). Only `gc`, `repair` and
`import` write into a store, under its lock.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import CkptError, CorruptError
from ..storage import Storage
from . import bench, diff, export, gc, import_, ls, plot, repair, show, verify
from .common import DAMAGED, PIPE, USAGE, catalog_at, plain

VERBS = (ls, show, diff, verify, export, import_, gc, repair, bench, plot)


def main(argv: Sequence[str] | None = None, files: Storage | None = None) -> int:
    """Entry point; returns the exit code. files: the file layer, for tests."""
    _never_fail_to_print()
    arguments = parser().parse_args(argv)
    try:
        catalog = catalog_at(arguments.path, files)
        if arguments.needs_store:
            catalog.identify()
        code: int = arguments.run(catalog, arguments)
        sys.stdout.flush()
        return code
    except CorruptError as error:
        print(f"DAMAGED {plain(str(error))}")
        return DAMAGED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE
    except (CkptError, OSError) as error:
        print(f"lf-ckpt: {plain(str(error))}", file=sys.stderr)
        return USAGE


def parser() -> argparse.ArgumentParser:
    """The command line of every verb."""
    top = argparse.ArgumentParser(
        prog="lf-ckpt",
        description="Inspect, verify, compare, clean and mend checkpoint stores.",
        epilog="Exit codes: 0 good, 1 damaged, 2 usage.",
    )
    top.add_argument("--version", action="version", version=f"lf-ckpt {__version__}")
    top.set_defaults(needs_store=True)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for verb in VERBS:
        verb.add(commands)
    return top


def _never_fail_to_print() -> None:
    """A terminal without UTF-8 gets escapes for what it cannot show."""
    with contextlib.suppress(AttributeError):  # a stream that replaces stdout need not have it
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _drop_stdout() -> None:
    """What is still buffered goes nowhere, or the interpreter would complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
