"""`ls`: the committed steps, and those that cannot be opened."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..catalog import Catalog
from ..errors import CorruptError
from ..loading import describe
from ..reader import StepReader
from .common import GOOD, Commands, add_verb, emit, human, plain, when


def add(commands: Commands) -> None:
    """Add the verb."""
    add_verb(commands, "ls", run, "list the committed steps")


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """A row per step, oldest first."""
    pinned = set(catalog.held())
    rows = [_row(catalog, folder, folder in pinned) for folder in catalog.folders()]
    emit(arguments, rows, _lines(rows))
    return GOOD


def _row(catalog: Catalog, folder: str, held: bool) -> dict[str, Any]:
    try:
        with StepReader(catalog.files, catalog.steps, folder) as reader:
            m = reader.manifest
            return {
                "step": m.step,
                "folder": folder,
                "kind": reader.kind,
                "base": m.parent.folder if m.parent else None,
                "raw_bytes": m.raw_bytes,
                "file_bytes": sum(file.size for file in m.files),
                "created": m.created,
                "metrics": m.metrics,
                "seconds": m.seconds,
                "held": held,
                "root": m.root,
                "problem": None,
            }
    except (CorruptError, OSError) as error:
        return {"step": int(folder.partition(".")[0]), "folder": folder, "problem": describe(error)}


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'step':>10} {'kind':6} {'base':>10} {'raw':>10} {'on disk':>10}  saved (UTC)"
    for row in rows:
        if row["problem"]:
            yield f"{row['folder']:>10} DAMAGED {plain(row['problem'])}"
            continue
        sizes = f"{human(row['raw_bytes']):>10} {human(row['file_bytes']):>10}"
        notes = [f"{plain(name)}={value:g}" for name, value in row["metrics"].items()]
        notes += ["held"] if row["held"] else []
        line = f"{row['folder']:>10} {row['kind']:6} {row['base'] or '-':>10} {sizes}  {when(row['created'])}"
        yield "  ".join([line, *notes])
