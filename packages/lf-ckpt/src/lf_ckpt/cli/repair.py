"""`repair`: move damaged steps aside, remove unfinished saves, write FORMAT and HEAD anew."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from ..catalog import Catalog
from ..errors import CkptError
from ..repairing import Action, infer_store, plan_repair, read_head, run_repair, survey
from .common import DAMAGED, GOOD, Commands, add_verb, emit, locked, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "say what is wrong and what would be done; with --yes do it. Nothing that verifies is deleted"
    command = add_verb(commands, "repair", run, text)
    command.add_argument("--yes", action="store_true", help="do it")
    command.set_defaults(needs_store=False)  # it may be FORMAT that is damaged


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """DAMAGED while something damaged is in the store, GOOD once it is not (or was not)."""
    if arguments.yes:
        if not catalog.folders():
            catalog.identify()  # a directory that is no store gets no lock file
        with locked(catalog):
            actions = _plan(catalog)
            run_repair(catalog, actions)
    else:
        actions = _plan(catalog)
    data = {"done": arguments.yes, "actions": [asdict(action) for action in actions]}
    emit(arguments, data, _lines(actions, arguments.yes))
    mended = arguments.yes and all(action.kind != "leave" for action in actions)
    bad = any(action.kind in ("quarantine", "write-format", "leave") for action in actions)
    return DAMAGED if bad and not mended else GOOD


def _plan(catalog: Catalog) -> list[Action]:
    problem = None
    try:
        catalog.identify()
    except CkptError as error:  # missing or damaged
        if not catalog.folders():
            raise
        problem = str(error)
        catalog.store_id = infer_store(catalog)
    return plan_repair(survey(catalog), catalog.unfinished(), read_head(catalog), format_problem=problem)


def _lines(actions: list[Action], done: bool) -> Iterator[str]:
    for action in actions:
        yield f"{action.kind:18} {plain(action.subject):>10}  {plain(action.why)}"
    if not actions:
        yield "nothing to repair"
    elif not done:
        yield "nothing was changed; add --yes to do this"
