"""`lf-ckpt ls | show | verify`: look at a store without touching it. Exit codes: 0 good, 1 damaged, 2 usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from .catalog import Catalog
from .errors import CkptError, CorruptError
from .files import FileLayer
from .format import CODEC_NAMES
from .loading import describe, verify_step
from .manifest import BlobEntry, TensorEntry
from .reader import StepReader

GOOD, DAMAGED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = _parser().parse_args(argv)
    catalog = Catalog(FileLayer(), os.path.realpath(arguments.path))
    try:
        catalog.identify()
        code: int = arguments.run(catalog, arguments)
        return code
    except CorruptError as error:
        print(f"DAMAGED {error}")
        return DAMAGED
    except BrokenPipeError:
        sys.stderr.close()
        return GOOD
    except (CkptError, OSError) as error:
        print(f"lf-ckpt: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lf-ckpt", description="Look at a checkpoint store and verify it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("ls", _ls, "list the committed steps"),
        ("show", _show, "tensors and items of a step (the newest by default)"),
        ("verify", _verify, "check steps (all by default); --deep reads, decodes and hashes every byte"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", metavar="PATH", help="directory of the store")
        if name != "ls":
            command.add_argument(
                "step", metavar="STEP", nargs="?", help="a step, or an attempt of it such as 100.1"
            )
        if name == "verify":
            command.add_argument("--deep", action="store_true", help="read every byte")
        else:
            command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
    return parser


def _ls(catalog: Catalog, arguments: argparse.Namespace) -> int:
    rows = [_row(catalog, folder) for folder in catalog.folders()]
    if arguments.json:
        print(json.dumps(rows))
        return GOOD
    print(f"{'step':>10} {'kind':6} {'base':>10} {'raw':>10} {'on disk':>10}  saved (UTC)")
    for row in rows:
        if row["problem"]:
            print(f"{row['folder']:>10} DAMAGED {row['problem']}")
            continue
        when = datetime.fromtimestamp(row["created"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        sizes = f"{_human(row['raw_bytes']):>10} {_human(row['file_bytes']):>10}"
        print(f"{row['folder']:>10} {row['kind']:6} {row['base'] or '-':>10} {sizes}  {when}")
    return GOOD


def _row(catalog: Catalog, folder: str) -> dict[str, Any]:
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
                "root": m.root,
                "problem": None,
            }
    except (CorruptError, OSError) as error:
        return {"step": int(folder.partition(".")[0]), "folder": folder, "problem": describe(error)}


def _show(catalog: Catalog, arguments: argparse.Namespace) -> int:
    folder = _chosen(catalog, arguments.step)[-1]
    with StepReader(catalog.files, catalog.steps, folder) as reader:
        m = reader.manifest
        rows = [_entry_row(reader, entry) for entry in m.entries]
    if arguments.json:
        head = {"step": m.step, "folder": folder, "kind": reader.kind, "root": m.root, "versions": m.versions}
        print(json.dumps({**head, "streams": rows, "aliases": m.aliases, "items": m.items}, default=repr))
        return GOOD
    print(f"step {m.step} ({reader.kind}{f' on {m.parent.folder}' if m.parent else ''}) root {m.root}")
    for row in rows:
        codecs = " ".join(f"{name} x{count}" for name, count in row["codecs"].items()) or "empty"
        sizes = f"{row['raw_bytes']} -> {row['stored_bytes']} B"
        split = f" in {row['shards']} shards" if row["shards"] > 1 else ""
        print(f"  {row['name']}  {row['dtype']}{row['shape']}{split}  {sizes}  {codecs}")
    for alias, name in m.aliases.items():
        print(f"  {alias}  = {name}")
    for name, value in m.items.items():
        text = repr(value)
        print(f"  item {name}  {text if len(text) <= 100 else text[:97] + '...'}")
    return GOOD


def _entry_row(reader: StepReader, entry: TensorEntry | BlobEntry) -> dict[str, Any]:
    tensor = entry if isinstance(entry, TensorEntry) else None
    runs = entry.runs()
    extents = [extent for placed, _ in runs for _, _, extent in reader.extents_of(placed)]
    return {
        "name": entry.name,
        "dtype": tensor.dtype if tensor else "bytes",
        "shape": list(tensor.shape) if tensor else [entry.nbytes],
        "shards": len(runs),
        "raw_bytes": entry.nbytes,
        "stored_bytes": sum(extent.stored_bytes for extent in extents),
        "codecs": dict(Counter(CODEC_NAMES[extent.codec] for extent in extents)),
    }


def _verify(catalog: Catalog, arguments: argparse.Namespace) -> int:
    folders = _chosen(catalog, arguments.step) if arguments.step else catalog.folders()
    good = [_verify_one(catalog, folder, arguments.deep) for folder in folders]
    return GOOD if all(good) else DAMAGED


def _verify_one(catalog: Catalog, folder: str, deep: bool) -> bool:
    """Check a step and print a line about it; whether it is good."""
    began = time.perf_counter()
    try:
        with StepReader(catalog.files, catalog.steps, folder) as reader:
            checked = verify_step(reader) if deep else 0
    except (CorruptError, OSError) as error:
        print(f"{folder:>10} DAMAGED {describe(error)}")
        return False
    rate = checked / 1e9 / max(time.perf_counter() - began, 1e-9)
    print(f"{folder:>10} ok ({f'every byte, {_human(checked)} at {rate:.2f} GB/s' if deep else 'structure'})")
    return True


def _chosen(catalog: Catalog, step: str | None) -> list[str]:
    """Folders that an argument names, oldest attempt first; CkptError when there are none."""
    folders = catalog.folders()
    chosen = [f for f in folders if step is None or f == step or f.partition(".")[0] == step]
    if not chosen:
        raise CkptError(
            f"{catalog.path}: no committed step {step or ''}; there are: {', '.join(folders) or 'none'}"
        )
    return chosen


def _human(count: int) -> str:
    """Bytes with a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
