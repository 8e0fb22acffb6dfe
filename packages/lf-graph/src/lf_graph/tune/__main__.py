"""``python -m lf_graph.tune``: tune what the tables of this card know, list it, or export it for the package."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lf_graph._errors import GraphError
from lf_graph.kernels._tunable import TUNABLES
from lf_graph.tune._card import slug
from lf_graph.tune._run import entry_line, known_keys, load_kernels, run
from lf_graph.tune._state import State, state, use
from lf_graph.tune._store import write_atomically
from lf_graph.tune._table import Table, dump


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(
        "python -m lf_graph.tune",
        description="Search the keys that the tables of this card know (a training run or benchmarks/tune_kernels.py "
        "adds new ones) and keep the fastest configurations that are right and repeatable.",
    )
    p.add_argument("--match", default="", help="only tunables whose name contains this")
    p.add_argument("--rebuild", action="store_true", help="search again what is known")
    p.add_argument("--budget-s", type=float, default=math.inf, help="start nothing after so many seconds")
    p.add_argument("--workers", type=int, default=0, help="processes that compile and check beforehand")
    p.add_argument("--dir", type=Path, help="folder of the tables")
    p.add_argument(
        "--import", dest="imports", action="append", default=[], help="a module with more tunables"
    )
    p.add_argument("--list", action="store_true", help="list tunables and their known keys; measure nothing")
    p.add_argument(
        "--show", action="store_true", help="print the entries of the tuned table; measure nothing"
    )
    p.add_argument(
        "--export", type=Path, help="write the tuned table here as one to ship: a folder of tables"
    )
    return p.parse_args(argv)


def listing(now: State) -> str:
    """The table's file, tunables, and for how many keys each is tuned and shipped."""
    lines = [f"{now.store.path}{'' if now.store.path.exists() else ': no table yet'}"]
    keys = known_keys(now)
    for name in sorted(TUNABLES):
        tuned = sum(n == name for n, _ in now.tuned.entries)
        shipped = sum(n == name for n, _ in now.shipped.entries) if now.shipped else 0
        lines.append(f"{name}: {len(keys.get(name, []))} known keys, {tuned} tuned, {shipped} shipped")
    return "\n".join(lines if TUNABLES else [*lines, "no tunables are registered"])


def showing(now: State, match: str) -> str:
    """Entries of the tuned table, with every rejected candidate and its reason."""
    lines = [str(now.store.path)]
    for (name, _), entry in sorted(now.tuned.entries.items(), key=lambda item: repr(item[0])):
        if match in name:
            lines.append(entry_line(entry))
            lines += [f"    {t.config}: {t.rejected}" for t in entry.rejected]
    return "\n".join(lines)


def to_ship(tuned: Table, older: Table | None) -> Table:
    """A table for the package: choices without their trials; what was not tuned now stays as it was shipped."""
    entries = dict(older.entries) if older else {}
    for place, entry in tuned.entries.items():
        if entry.config is not None and entry.complete:
            entries[place] = replace(entry, trials=())
    return Table(tuned.card, entries)


def export(now: State, folder: Path) -> Path:
    """Writes the table to ship; returns its file."""
    path = folder / f"{slug(now.card.name)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump(to_ship(now.tuned, now.shipped)))
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a search failed, a default was rejected, a module or folder is none, or there is no GPU."""
    args = arguments(argv)
    if args.dir and args.dir.exists() and not args.dir.is_dir():
        print(
            f"lf_graph.tune: --dir {args.dir} is no folder: name one that tables may lie in", file=sys.stderr
        )
        return 1
    try:
        load_kernels(args.imports)
    except ModuleNotFoundError as e:
        print(f"lf_graph.tune: --import takes the dotted name of a module: {e}", file=sys.stderr)
        return 1
    now = use(args.dir) if args.dir else state()
    if args.list or args.show:
        print(listing(now) if args.list else showing(now, args.match))
        return 0
    status = 0
    if args.export is None or args.rebuild:
        try:
            report = run(
                args.match,
                rebuild=args.rebuild,
                budget_s=args.budget_s,
                workers=args.workers,
                imports=args.imports,
                progress=lambda line: print(line, flush=True),
            )
        except GraphError as e:
            print(f"lf_graph.tune: {e}", file=sys.stderr)
            return 1
        print(str(report).splitlines()[-1])
        status = 1 if report.failed or report.broken else 0
    if args.export:
        print(export(now, args.export))
    return status


if __name__ == "__main__":
    sys.exit(main())
