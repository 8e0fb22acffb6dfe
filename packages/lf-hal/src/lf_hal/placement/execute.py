"""Running a plan: segments in order on their devices, copies where the plan has them, and a report of both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.artifact import checked_inputs
from lf_hal.compiler import stored_values
from lf_hal.evidence import Evidence
from lf_hal.lir import verify
from lf_hal.lir.graph import Graph
from lf_hal.placement.cut import cut
from lf_hal.placement.errors import PlanMismatchError
from lf_hal.placement.plans import Copy, Plan, digest_of
from lf_hal.placement.pool import HOST
from lf_hal.placement.runners import Runner, TorchRunner, runner_for
from lf_hal.sources import read_weights

__all__ = ["CopyRun", "Execution", "Executor", "Report", "SegmentRun", "execute"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CopyRun:
    """One copy that was made, with what it took."""

    value: str
    source: str
    target: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class SegmentRun:
    """One segment that was run. ``seconds`` are without its ``copies``; ``evidence`` is the device's."""

    device: str
    evidence: Evidence
    ops: int
    seconds: float
    predicted: float
    copies: tuple[CopyRun, ...]


@dataclass(frozen=True)
class Report:
    """What a run did. ``seconds`` are of segments and copies together."""

    segments: tuple[SegmentRun, ...]
    predicted: float

    @property
    def copies(self) -> tuple[CopyRun, ...]:
        return tuple(c for s in self.segments for c in s.copies)

    @property
    def copied_bytes(self) -> int:
        return sum(c.nbytes for c in self.copies)

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.segments) + sum(c.seconds for c in self.copies)

    def __str__(self) -> str:
        lines = [
            f"{self.seconds * 1e3:.4g} ms (predicted {self.predicted * 1e3:.4g}), "
            f"{len(self.copies)} copies of {self.copied_bytes} bytes"
        ]
        for i, s in enumerate(self.segments):
            copied = sum(c.nbytes for c in s.copies)
            took = sum(c.seconds for c in s.copies)
            lines.append(
                f"  {i}: {s.device} ({s.evidence}), {s.ops} ops, {s.seconds * 1e3:.4g} ms, "
                f"{len(s.copies)} copies of {copied} bytes in {took * 1e3:.4g} ms"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Execution:
    """Outputs by name, as host arrays, and the report of the run."""

    outputs: dict[str, Array]
    report: Report


class Executor:
    """A plan made ready: weights on their devices, segments compiled. A context manager that frees them.

    Args:
        graph: the one that was planned.
        weights: as :func:`lf_hal.compile` takes them.
        threads: of C segments.
        allow_emulated: whether segments of other machines' targets may run under an emulator here. Their results are
            proved, their times are no device's.
        runners: own ones by device name, in the place of ours.

    Raises:
        PlanMismatchError: the graph is another one.
        EmulationNotAllowedError, PoolError: a device cannot be used; nothing is used in its place.
        WeightsError, CompilerMissingError, CompilerFailedError: as :func:`lf_hal.compile`.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        weights: Mapping[str, Any] | str | Path,
        *,
        threads: int = 1,
        allow_emulated: bool = False,
        runners: Mapping[str, Runner] | None = None,
    ) -> None:
        verify(graph)
        if digest_of(graph) != plan.digest:
            raise PlanMismatchError(plan.digest, digest_of(graph))
        self.plan, self.graph = plan, graph
        mapping = read_weights(Path(weights)) if isinstance(weights, (str, Path)) else weights
        self._stored = stored_values(graph, mapping)
        devices = {d.name: d for d in plan.devices}
        used = dict.fromkeys(s.device for s in plan.segments)
        given = runners or {}
        self._runners: dict[str, Runner] = {}
        for name in used:
            self._runners[name] = given.get(name) or runner_for(
                devices[name], threads=threads, allow_emulated=allow_emulated
            )
        self._spaces = {devices[name].space: self._runners[name] for name in reversed(used)}
        self._evidence = {name: devices[name].evidence for name in used}
        self._segments = [
            self._runners[s.device].prepare(cut(graph, s.ops), self._stored) for s in plan.segments
        ]
        self._last = {name: i for i, s in enumerate(plan.segments) for name in s.inputs}
        self._types = graph.types()

    def run(self, inputs: Mapping[str, Array] | Sequence[Array]) -> Execution:
        """Outputs for ``inputs`` by name, or in order; bf16 values are arrays of uint16 bits.

        Raises:
            InputError: an input is absent, unknown, or of another shape or element type; nothing is converted.
        """
        given = checked_inputs(self.graph.inputs, inputs)
        names = [v.name for v in self.graph.inputs]
        held: dict[str, dict[str, Any]] = {HOST: dict(zip(names, given, strict=True))}
        runs = []
        for i, segment in enumerate(self.plan.segments):
            runner = self._runners[segment.device]
            copies = [done for c in segment.copies for done in self._copy(held, c)]
            space = self._space(segment.device)
            start = time.perf_counter()
            found = self._segments[i]({name: held[space][name] for name in segment.inputs})
            runner.wait()
            seconds = time.perf_counter() - start
            held.setdefault(space, {}).update((name, found[name]) for name in segment.outputs)
            copies += [done for c in segment.returns for done in self._copy(held, c)]
            self._drop(held, i)
            device = segment.device
            runs.append(
                SegmentRun(
                    device,
                    self._evidence[device],
                    len(segment.ops),
                    seconds,
                    segment.seconds,
                    tuple(copies),
                )
            )
        host = {**self._stored, **held[HOST]}
        outputs = {name: _own(host[name], (*given, *self._stored.values())) for name in self.graph.outputs}
        return Execution(outputs, Report(tuple(runs), self.plan.seconds))

    def close(self) -> None:
        """Free artefacts and weights."""
        for runner in self._runners.values():
            runner.close()
        self._segments.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _space(self, device: str) -> str:
        return next(d.space for d in self.plan.devices if d.name == device)

    def _copy(self, held: dict[str, dict[str, Any]], c: Copy) -> list[CopyRun]:
        """Make one copy of the plan, in one or two steps."""
        source, target = self._spaces.get(c.source), self._spaces.get(c.target)
        direct = not c.via and isinstance(source, TorchRunner) and isinstance(target, TorchRunner)
        if HOST in (c.source, c.target) or direct:
            return [self._hop(held, c, c.source, c.target)]
        had = c.value in held[HOST]
        steps = [self._hop(held, c, c.source, HOST), self._hop(held, c, HOST, c.target)]
        if not had:
            del held[HOST][c.value]
        return steps

    def _hop(self, held: dict[str, dict[str, Any]], c: Copy, source: str, target: str) -> CopyRun:
        value = held[source][c.value]
        start = time.perf_counter()
        if target == HOST:
            made: Any = self._spaces[source].give(value)
        elif source == HOST:
            made = self._spaces[target].receive(value, self._types[c.value])
        else:
            made = self._spaces[target].adopt(value)  # type: ignore[attr-defined]
        if target != HOST:
            self._spaces[target].wait()
        seconds = time.perf_counter() - start
        held.setdefault(target, {})[c.value] = made
        return CopyRun(c.value, source, target, c.nbytes, seconds)

    def _drop(self, held: dict[str, dict[str, Any]], i: int) -> None:
        """Let go of values that no later segment reads, but for outputs in the host's memory."""
        for space, values in held.items():
            for name in list(values):
                if self._last.get(name, -1) <= i and not (space == HOST and name in self.graph.outputs):
                    del values[name]


def _own(array: Array, others: Sequence[Array]) -> Array:
    """``array``, or a copy of it where it shares memory with what belongs to somebody else."""
    return array.copy() if any(np.may_share_memory(array, other) for other in others) else array


def execute(
    plan: Plan,
    graph: Graph,
    weights: Mapping[str, Any] | str | Path,
    inputs: Mapping[str, Array] | Sequence[Array],
    *,
    threads: int = 1,
    allow_emulated: bool = False,
) -> Execution:
    """Make ``plan`` ready, run it once and free it; for more runs keep an :class:`Executor`. Raises as that does."""
    with Executor(plan, graph, weights, threads=threads, allow_emulated=allow_emulated) as ready:
        return ready.run(inputs)
