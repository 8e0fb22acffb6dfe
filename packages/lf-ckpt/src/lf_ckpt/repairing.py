"""Mending a store: what can be done without losing a byte that verifies. A plan to look at, and its execution.

Nothing is deleted but unfinished saves and temporary files; damaged steps move to `damaged/` beside `steps/`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from .catalog import Catalog
from .errors import CkptError, CorruptError
from .files import read_all
from .identity import FORMAT_LIMIT, OtherVersionError, dump_format, parse_format
from .jsonio import parse_canonical
from .loading import describe, verify_step
from .manifest import Manifest
from .reader import StepReader, read_manifest

DAMAGED_FOLDER: Final = "damaged"
_SMALL: Final = 4096  # bytes of FORMAT and HEAD at most

Kind: TypeAlias = Literal["write-format", "remove-unfinished", "quarantine", "write-head", "leave"]


@dataclass(frozen=True)
class Action:
    """One thing to do. subject: a folder or file name. `leave`: reported, nothing is done."""

    kind: Kind
    subject: str
    why: str


@dataclass(frozen=True)
class Finding:
    """What reading one committed folder showed. problem: None when every byte verifies.

    unreadable: an I/O error, which says nothing about the bytes. parent: folder of its base, if its manifest is whole.
    """

    folder: str
    problem: str | None
    unreadable: bool = False
    parent: str | None = None
    foreign: bool = False


def survey(catalog: Catalog) -> list[Finding]:
    """Read every byte of every committed step. `catalog.store_id` must be known."""
    return [_examine(catalog, folder) for folder in catalog.folders()]


def plan_repair(
    findings: list[Finding], unfinished: list[str], head: str | None, *, format_problem: str | None = None
) -> list[Action]:
    """What to do, in order. Pure.

    A damaged base of a step that verifies stays where it is: that step reads the good part of it. Deltas move before
    their base, so that dying in between leaves none without one.
    """
    actions = [Action("write-format", "FORMAT", format_problem)] if format_problem else []
    actions += [Action("remove-unfinished", name, "a save that never committed") for name in unfinished]
    good = {f.folder for f in findings if f.problem is None and not f.foreign}
    by_name = {f.folder: f for f in findings}
    needed = {
        above for f in findings if f.problem is None or f.foreign for above in _line(f.folder, by_name)[1:]
    }
    stays = {
        f.folder: why for f in findings if (why := _why_left(f, needed, any(f.unreadable for f in findings)))
    }
    moved = [f for f in findings if f.problem and f.folder not in stays]
    for finding in sorted(moved, key=lambda f: len(_line(f.folder, by_name)), reverse=True):
        actions.append(Action("quarantine", finding.folder, finding.problem or ""))
    actions += [Action("leave", folder, why) for folder, why in stays.items()]
    newest = next((f.folder for f in reversed(findings) if f.folder in good), None)
    if newest is not None and head != newest:
        actions.append(Action("write-head", newest, f"HEAD names {head or 'nothing'}"))
    return actions


def run_repair(catalog: Catalog, actions: list[Action]) -> None:
    """Do it; the caller holds the lock since before the plan was made. Stopping anywhere loses nothing."""
    for action in actions:
        if action.kind == "write-format":
            catalog.commits.publish(catalog.path, "FORMAT", dump_format(catalog.store_id))
        elif action.kind == "remove-unfinished":
            catalog.remove(action.subject)
        elif action.kind == "quarantine":
            _quarantine(catalog, action.subject)
        elif action.kind == "write-head":
            catalog.point_head(action.subject)


def infer_store(catalog: Catalog) -> str:
    """Id of the store by its steps, when FORMAT is lost.

    CkptError when they do not agree, and when FORMAT can be read and names what this version does not know.
    """
    path = os.path.join(catalog.path, "FORMAT")
    try:
        parse_format(read_all(catalog.files, path, FORMAT_LIMIT), path)
    except OtherVersionError as error:
        raise CkptError(f"{path}: written by another version of lf-ckpt; nothing done") from error
    except (OSError, CorruptError):
        pass
    stores = {m.store for folder in catalog.folders() if (m := _manifest(catalog, folder)) is not None}
    if len(stores) != 1:
        raise CkptError(f"{path}: damaged, and the steps name {len(stores)} stores; nothing done")
    return stores.pop()


def read_head(catalog: Catalog) -> str | None:
    """The folder that HEAD names; None when it names none."""
    try:
        data = read_all(catalog.files, os.path.join(catalog.path, "HEAD"), _SMALL) or b""
        document: Any = parse_canonical(data.removesuffix(b"\n"))
        return str(document["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _examine(catalog: Catalog, folder: str) -> Finding:
    manifest = _manifest(catalog, folder)
    parent = manifest.parent.folder if manifest and manifest.parent else None
    foreign = manifest is not None and manifest.store != catalog.store_id
    try:
        with StepReader(catalog.files, catalog.steps, folder) as reader:
            verify_step(reader)
    except CorruptError as error:
        return Finding(folder, describe(error), False, parent, foreign)
    except OSError as error:
        return Finding(folder, describe(error), True, parent, foreign)
    return Finding(folder, None, False, parent, foreign)


def _manifest(catalog: Catalog, folder: str) -> Manifest | None:
    try:
        return read_manifest(catalog.files, catalog.steps, folder)
    except (CorruptError, OSError):
        return None


def _why_left(finding: Finding, needed: Collection[str], some_unreadable: bool) -> str | None:
    """Why a folder with a problem is not moved; None when it has none, or is moved."""
    if finding.foreign:
        return "a step of another store"
    if finding.problem is None:
        return None
    if finding.unreadable:
        return f"cannot be read: {finding.problem}"
    if finding.folder in needed:
        return f"base of a step that verifies; {finding.problem}"
    if some_unreadable:
        return f"while another step cannot be read it may be its base; {finding.problem}"
    return None


def _line(folder: str, by_name: Mapping[str, Finding]) -> list[str]:
    """A folder and what it refers to, as far as it is there."""
    line: list[str] = []
    at: str | None = folder
    while at is not None and at not in line:
        line.append(at)
        at = by_name[at].parent if at in by_name else None
    return line


def _quarantine(catalog: Catalog, folder: str) -> None:
    """Move a step folder to `damaged/`, under a free name."""
    if catalog.files.traits.whole:
        raise CkptError(
            f"{catalog.path}: an object store cannot move folders; copy and remove {folder} by hand"
        )
    target = os.path.join(catalog.path, DAMAGED_FOLDER)
    catalog.make_folder(target)
    taken = set(catalog.files.names(target))
    name = next(n for i in range(len(taken) + 1) if (n := f"{folder}-{i}" if i else folder) not in taken)
    catalog.files.rename(os.path.join(catalog.steps, folder), os.path.join(target, name))
    # The new name first: a power cut may then show the folder twice but never lose it.
    catalog.commits.sync_dir(target)
    catalog.commits.sync_dir(catalog.steps)
