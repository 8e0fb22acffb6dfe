"""`verify`: structure of every step, or of an .lfckpt bundle, or with --deep every byte."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from ..catalog import Catalog
from ..errors import CorruptError
from ..interop import bundle_reader
from ..loading import describe, verify_step
from ..reader import StepReader
from .common import DAMAGED, GOOD, Commands, add_step, add_verb, chosen, emit, human, plain, problem


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "check steps (all by default); --deep reads, decodes and hashes every byte"
    command = add_verb(commands, "verify", run, text)
    add_step(command)
    command.add_argument("--deep", action="store_true", help="read every byte")
    command.set_defaults(needs_store=False)  # PATH may also be a file of `export --lfckpt`


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """A line per step as it is checked, then the total; DAMAGED when one is bad."""
    if os.path.isfile(catalog.path):
        return _verify_file(catalog, arguments)
    catalog.identify()
    folders = chosen(catalog, arguments.step) if arguments.step else catalog.folders()
    rows = []
    for folder in folders:
        rows.append(row := verify_folder(catalog, folder, deep=arguments.deep))
        if not arguments.json:
            print(_line(row, arguments.deep), flush=True)
    bad = [row["folder"] for row in rows if not row["ok"]]
    emit(
        arguments,
        {"good": not bad, "deep": arguments.deep, "steps": rows},
        [_total(rows, bad, arguments.deep)],
    )
    return DAMAGED if bad else GOOD


def _verify_file(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """A bundle; damage is raised."""
    with bundle_reader(catalog.path, catalog.files) as reader:
        checked = verify_step(reader) if arguments.deep else 0
        step = reader.manifest.step
    how = f"every byte, {human(checked)}" if arguments.deep else "structure"
    data = {"good": True, "deep": arguments.deep, "step": step, "bytes": checked}
    emit(arguments, data, [f"{plain(catalog.path)}: step {step} ok ({how})"])
    return GOOD


def verify_folder(catalog: Catalog, folder: str, *, deep: bool) -> dict[str, Any]:
    """Check one step: whether it is good, bytes and seconds spent, and the first bad block."""
    began = time.perf_counter()
    try:
        with StepReader(catalog.files, catalog.steps, folder) as reader:
            checked = verify_step(reader) if deep else 0
    except (CorruptError, OSError) as error:
        return {"folder": folder, "ok": False, "problem": problem(error), "text": describe(error)}
    seconds = time.perf_counter() - began
    return {
        "folder": folder,
        "ok": True,
        "bytes": checked,
        "seconds": seconds,
        "gb_per_s": _rate(checked, seconds),
    }


def _rate(count: int, seconds: float) -> float:
    return round(count / 1e9 / max(seconds, 1e-9), 3)


def _line(row: dict[str, Any], deep: bool) -> str:
    if not row["ok"]:
        return f"{row['folder']:>10} DAMAGED {plain(row['text'])}"
    how = f"every byte, {human(row['bytes'])} at {row['gb_per_s']:.2f} GB/s" if deep else "structure"
    return f"{row['folder']:>10} ok ({how})"


def _total(rows: list[dict[str, Any]], bad: list[str], deep: bool) -> str:
    if not rows:
        return "no committed steps"
    count = sum(row.get("bytes", 0) for row in rows)
    rate = _rate(count, sum(row.get("seconds", 0.0) for row in rows))
    what = f", {human(count)} at {rate:.2f} GB/s" if deep else ""
    return f"{len(rows) - len(bad)} of {len(rows)} steps good{what}" + (
        f"; damaged: {', '.join(bad)}" if bad else ""
    )
