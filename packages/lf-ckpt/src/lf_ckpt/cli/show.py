"""`show`: tensors and items of a step."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..catalog import Catalog
from ..format import CODEC_NAMES
from ..manifest import BlobEntry, TensorEntry
from ..reader import StepReader
from .common import GOOD, Commands, add_step, add_verb, chosen, emit, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    add_step(add_verb(commands, "show", run, "tensors and items of a step (the newest by default)"))


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """One step in full."""
    folder = chosen(catalog, arguments.step)[-1]
    with StepReader(catalog.files, catalog.steps, folder) as reader:
        m = reader.manifest
        data = {
            "step": m.step,
            "folder": folder,
            "kind": reader.kind,
            "base": m.parent.folder if m.parent else None,
            "root": m.root,
            "created": m.created,
            "metrics": m.metrics,
            "seconds": m.seconds,
            "versions": m.versions,
            "streams": [_stream(reader, entry) for entry in m.entries],
            "aliases": m.aliases,
            "items": m.items,
        }
    emit(arguments, data, _lines(data))
    return GOOD


def _stream(reader: StepReader, entry: TensorEntry | BlobEntry) -> dict[str, Any]:
    extents = [extent for placed, _ in entry.runs() for _, _, extent in reader.extents_of(placed)]
    tensor = entry if isinstance(entry, TensorEntry) else None
    return {
        "name": entry.name,
        "dtype": tensor.dtype if tensor else "bytes",
        "shape": list(tensor.shape) if tensor else [entry.nbytes],
        "shards": len(entry.runs()),
        "raw_bytes": entry.nbytes,
        "stored_bytes": sum(extent.stored_bytes for extent in extents),
        "codecs": dict(Counter(CODEC_NAMES[extent.codec] for extent in extents)),
    }


def _lines(data: dict[str, Any]) -> Iterator[str]:
    base = f" on {data['base']}" if data["base"] else ""
    yield f"step {data['step']} ({data['kind']}{base}) root {data['root']}"
    for row in data["streams"]:
        codecs = " ".join(f"{name} x{count}" for name, count in row["codecs"].items()) or "empty"
        shards = f" in {row['shards']} shards" if row["shards"] > 1 else ""
        sizes = f"{row['raw_bytes']} -> {row['stored_bytes']} B"
        yield f"  {plain(row['name'])}  {row['dtype']}{row['shape']}{shards}  {sizes}  {codecs}"
    for alias, name in data["aliases"].items():
        yield f"  {plain(alias)}  = {plain(name)}"
    for name, value in data["metrics"].items():
        yield f"  metric {plain(name)}  {value:g}"
    for name, value in data["items"].items():
        text = repr(value)
        yield f"  item {plain(name)}  {text if len(text) <= 100 else text[:97] + '...'}"
