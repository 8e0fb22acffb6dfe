"""Where the time of a compiled model goes: each step's time, rates and counters, by looking between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal._counters import HARDWARE, Counters
from lf_hal.artifact import LIBRARY, Artifact, checked_inputs
from lf_hal.errors import WrongMachineError

__all__ = ["Profile", "StepProfile", "profile"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StepProfile:
    """One step of a model: ``seconds`` is the median of the runs, ``share`` its part of the sum of all medians.

    ``gflops`` counts a multiply-add as two and is None for steps without products; ``gbytes`` is what the step must
    read and write once, per second, in 10^9 bytes (from a cache or from memory: nobody looks), None where that follows
    the data. ``counters`` are medians by name, of the counters that could be read.
    """

    label: str
    seconds: float
    share: float
    gflops: float | None
    gbytes: float | None
    counters: Mapping[str, float]


@dataclass(frozen=True)
class Profile:
    """The steps of ``runs`` runs, in order, and ``missing``: why a counter that was asked for has no numbers.

    ``seconds`` is the median of whole runs, from before the first step to behind the last one, looking included.
    """

    graph: str
    target: str
    threads: int
    runs: int
    seconds: float
    steps: tuple[StepProfile, ...]
    missing: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data, ``version`` 1."""
        return {"version": 1, **asdict(self)}

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for step in self.steps for name in step.counters))
        head = f"{self.graph} on {self.target}, threads {self.threads}, median of {self.runs} runs: "
        lines = [f"{head}{self.seconds * 1e3:.3f} ms"]
        columns = "".join(f" {name:>16}" for name in names)
        lines.append(f"{'ms':>9} {'share':>6} {'GFLOP/s':>8} {'GB/s':>7}{columns}  step")
        for step in sorted(self.steps, key=lambda s: -s.seconds):
            rates = f"{_rate(step.gflops):>8} {_rate(step.gbytes):>7}"
            counts = "".join(f" {step.counters[name]:>16,.0f}" for name in names)
            lines.append(f"{step.seconds * 1e3:9.4f} {step.share:6.1%} {rates}{counts}  {step.label}")
        lines += [f"no {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def profile(
    artifact: Artifact,
    inputs: Mapping[str, Array] | Sequence[Array],
    *,
    runs: int = 20,
    threads: int | None = None,
    counters: Sequence[str] = HARDWARE,
) -> Profile:
    """Run ``artifact`` here ``runs`` times, after one run that is not counted, and look at the clock between steps.

    A look takes some 30 ns, and about a microsecond for each counter; ordinary runs have no part in it.

    Args:
        inputs: as for :meth:`Artifact.run`.
        threads: of the runs (that of the compilation, if None). Counters are of one thread, so they are read with
            ``threads=1`` only, and reported as missing otherwise.
        counters: names of :data:`lf_hal._counters.COUNTERS`. Those that this machine has not or forbids are in
            :attr:`Profile.missing` with the reason; none is ever reported as zero.

    Raises:
        WrongMachineError: the artefact is a program or of another machine. An emulator's times say nothing.
        InputError, RunFailedError: as for :meth:`Artifact.run`.
        ValueError: ``runs`` below 1, or an unknown counter.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}; give at least 1")
    if LIBRARY not in artifact.manifest["files"]:
        raise WrongMachineError(
            artifact.target.name, ("a library of this machine's kind: compile for native",)
        )
    count = artifact.manifest["threads"] if threads is None else threads
    arrays = checked_inputs(artifact.inputs, inputs)
    with Counters(counters if count == 1 else ()) as opened:
        seen = [artifact._timed(arrays, count, opened.files) for _ in range(runs + 1)][1:]
        missing = dict(opened.missing)
        values, unsteady = _differences(np.stack([c for _, c in seen]), opened)
    missing |= unsteady
    if count > 1:
        missing |= dict.fromkeys(
            counters, f"counters are of one thread, and {count} ran; profile with threads=1"
        )
    marks = np.stack([ns for ns, _ in seen])
    seconds = np.median(np.diff(marks, axis=1), axis=0) * 1e-9
    work = artifact.manifest.get("work") or [[0, 0]] * len(seconds)
    steps = tuple(
        StepProfile(
            label,
            float(s),
            float(s / max(seconds.sum(), 1e-12)),
            flops / max(s, 1e-9) * 1e-9 if flops else None,
            nbytes / max(s, 1e-9) * 1e-9 if nbytes else None,
            {name: float(v[i]) for name, v in values.items()},
        )
        for i, (label, s, (flops, nbytes)) in enumerate(
            zip(artifact.manifest["steps"], seconds, work, strict=True)
        )
    )
    whole = float(np.median(marks[:, -1] - marks[:, 0])) * 1e-9
    return Profile(artifact.manifest["graph"], artifact.target.name, count, runs, whole, steps, missing)


def _differences(
    counts: npt.NDArray[np.uint64], opened: Counters
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, str]]:
    """Medians by step of each counter of counts [runs, steps + 1, counters, 3], and why others have none."""
    values: dict[str, npt.NDArray[np.float64]] = {}
    missing: dict[str, str] = {}
    for i, name in enumerate(opened.names):
        value, enabled, running = np.diff(counts[:, :, i].astype(np.int64), axis=1).transpose(2, 0, 1)
        if (running < enabled).any():
            missing[name] = "the processor has too few counters at a time and took turns; ask for fewer"
        elif silent := opened.silent(name, int(value.sum())):
            missing[name] = silent
        else:
            values[name] = np.median(value, axis=0)
    return values, missing
