"""`gc`: apply retention rules to a store that nobody writes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..catalog import Catalog
from ..cleaning import Verdict, plan_collection, run_collection
from ..keepspec import parse_keep
from .common import GOOD, Commands, add_verb, emit, locked, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    command = add_verb(commands, "gc", run, "remove unfinished saves and the steps that no rule keeps")
    rules = "last:3,every:1000,every_seconds:3600,best:loss:2:min,phases:0/5:1000/20; none keeps every step"
    command.add_argument("--keep", default="", metavar="RULES", help=rules)
    command.add_argument(
        "--dry-run", action="store_true", help="only say what would be removed; takes no lock"
    )
    command.add_argument(
        "--no-verify", action="store_true", help="do not read the newest step before others are removed"
    )


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Plan, print, remove. The newest step that verifies always stays."""
    rules = parse_keep(arguments.keep) if arguments.keep else ()
    verify = not arguments.no_verify
    if arguments.dry_run:
        _print(arguments, catalog.unfinished(), plan_collection(catalog, rules, verify=verify), removed=[])
        return GOOD
    with locked(catalog):
        swept = catalog.sweep()
        plan = plan_collection(catalog, rules, verify=verify)
        _print(arguments, swept, plan, run_collection(catalog, plan))
    return GOOD


def _print(
    arguments: argparse.Namespace, unfinished: list[str], plan: Sequence[Verdict], removed: list[str]
) -> None:
    data = {
        "dry_run": arguments.dry_run,
        "unfinished": unfinished,
        "steps": [asdict(verdict) for verdict in plan],
        "removed": removed,
    }
    emit(arguments, data, _lines(unfinished, plan, arguments.dry_run))


def _lines(unfinished: list[str], plan: Sequence[Verdict], dry_run: bool) -> Iterator[str]:
    for name in unfinished:
        yield f"{name:>10} remove  an unfinished save" + (", if none is under way" if dry_run else "")
    for verdict in plan:
        yield f"{verdict.folder:>10} {verdict.action:7} {plain(verdict.why)}"
    gone = sum(verdict.action == "remove" for verdict in plan)
    yield f"{gone} of {len(plan)} steps {'would be ' if dry_run else ''}removed"
