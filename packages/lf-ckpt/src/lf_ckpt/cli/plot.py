"""`plot`: sizes and stalls over the steps of a store, as a picture."""

from __future__ import annotations

import argparse
import io
import os
from dataclasses import dataclass
from typing import Any

from ..catalog import Catalog
from ..commit import RenameCommit
from ..errors import CkptError
from ..files import FileLayer
from ..manifest import Manifest
from .common import GOOD, Commands, add_verb, emit, plain


@dataclass(frozen=True)
class Series:
    """Columns over the committed steps, oldest first. bytes; seconds (NaN where the manifest has none)."""

    steps: list[int]
    delta: list[bool]
    raw: list[int]
    stored: list[int]
    staged: list[float]
    written: list[float]


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "draw sizes and stalls over the steps that are there (needs matplotlib)"
    command = add_verb(commands, "plot", run, text)
    command.add_argument("picture", metavar="FILE", help="what to write: .png, .svg or .pdf")


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Read the manifests, draw, write the picture whole or not at all."""
    series = series_of(catalog.committed())
    if not series.steps:
        raise CkptError(f"{catalog.path}: no committed steps to draw")
    target = os.path.realpath(arguments.picture)
    data = draw(series, os.path.splitext(target)[1].lstrip(".").lower())
    pictures = RenameCommit(FileLayer())
    pictures.publish(os.path.dirname(target), os.path.basename(target), data, durable=False)
    line = f"{plain(target)}: {len(series.steps)} steps"
    emit(arguments, {"picture": target, **vars(series)}, [line])
    return GOOD


def series_of(manifests: list[Manifest]) -> Series:
    """What to draw. Pure."""
    nan = float("nan")
    return Series(
        [m.step for m in manifests],
        [m.parent is not None for m in manifests],
        [m.raw_bytes for m in manifests],
        [sum(file.size for file in m.files) for m in manifests],
        [m.seconds.get("staged", nan) for m in manifests],
        [m.seconds.get("written", nan) for m in manifests],
    )


def draw(series: Series, kind: str) -> bytes:
    """A picture of the series; CkptError without matplotlib or for a kind it cannot write."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no display, no state
    except ImportError as error:
        raise CkptError("plot: matplotlib is not installed; pip install lf-ckpt[plot]") from error
    figure: Any = Figure(figsize=(9, 6), layout="constrained")
    if kind not in figure.canvas.get_supported_filetypes():
        raise CkptError(f"plot: cannot write .{kind} files; use .png, .svg or .pdf")
    sizes, times = figure.subplots(2, 1, sharex=True)
    colors = ["tab:orange" if delta else "tab:blue" for delta in series.delta]
    sizes.plot(series.steps, [n / 1e6 for n in series.raw], color="0.6", label="state")
    sizes.scatter(series.steps, [n / 1e6 for n in series.stored], c=colors, s=14)
    sizes.scatter([], [], c="tab:blue", s=14, label="full step on disk")
    sizes.scatter([], [], c="tab:orange", s=14, label="delta on disk")
    sizes.set(ylabel="MB", ylim=(0, None))
    times.plot(series.steps, series.staged, "o-", ms=3, color="tab:red", label="stall (until staged)")
    times.plot(series.steps, series.written, "o-", ms=3, color="tab:green", label="until written")
    times.set(ylabel="seconds", xlabel="step", ylim=(0, None))
    for axes in (sizes, times):
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    return buffer.getvalue()
