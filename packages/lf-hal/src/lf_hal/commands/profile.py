"""`lf-hal profile FOLDER`: where the time of an artefact goes, step by step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal._counters import COUNTERS, HARDWARE
from lf_hal.errors import HalError
from lf_hal.lir.graph import Value
from lf_hal.weights import NUMPY_DTYPES

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("artifact", type=Path, help="folder that `lf-hal compile` or Artifact.save made")
    made = "default: seeded random numbers, and zeros for integers"
    parser.add_argument("--inputs", type=Path, nargs="+", default=[], help=f".npy files in order ({made})")
    parser.add_argument("--runs", type=int, default=20, help="of which the median is shown (default 20)")
    parser.add_argument("--threads", type=int, help="default: those of the compilation")
    parser.add_argument(
        "--counters", default=",".join(HARDWARE), help=f"of {', '.join(COUNTERS)}; '' for none"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the steps, longest first."""
    from lf_hal.artifact import load
    from lf_hal.profiling import profile

    names = [name for name in args.counters.split(",") if name]
    for name in names:
        if name not in COUNTERS:
            raise HalError(f"--counters {name}: choose of {', '.join(COUNTERS)}")
    if args.runs < 1 or (args.threads is not None and args.threads < 1):
        raise HalError("--runs and --threads: give at least 1")
    with load(args.artifact) as artifact:
        if args.inputs and len(args.inputs) != len(artifact.inputs):
            wanted = ", ".join(v.name for v in artifact.inputs)
            raise HalError(f"{len(args.inputs)} input files, but the model has {wanted}")
        given = [_read(path) for path in args.inputs] or [_made(value) for value in artifact.inputs]
        found = profile(artifact, given, runs=args.runs, threads=args.threads, counters=names)
    print(json.dumps(found.to_json(), indent=1) if args.json else found)
    return 0


def _read(path: Path) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return found
    except ValueError as error:
        raise HalError(f"{path} is no .npy file: {error}") from error


def _made(value: Value) -> npt.NDArray[Any]:
    kind = np.dtype(NUMPY_DTYPES[value.type.dtype])
    if kind.kind != "f":
        return np.zeros(value.type.shape, kind)
    return np.random.default_rng(0).standard_normal(value.type.shape).astype(kind)
