"""A plan as data: which device runs each op, what is copied when, and how long that should take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lf_hal.evidence import Evidence
from lf_hal.lir.graph import Graph
from lf_hal.lir.text import to_text
from lf_hal.placement.errors import PlanFormatError
from lf_hal.placement.pool import Device, Pool

__all__ = ["Copy", "Plan", "Segment", "digest_of"]

VERSION = 1


def digest_of(graph: Graph) -> str:
    """sha256 of the graph's text, as hexadecimal: what a plan is bound to."""
    return hashlib.sha256(to_text(graph).encode()).hexdigest()


@dataclass(frozen=True)
class Copy:
    """A value copied from memory ``source`` to ``target``, ``via`` another one or directly (""). ``seconds`` are
    predicted."""

    value: str
    source: str
    target: str
    nbytes: int
    seconds: float
    via: str = ""


@dataclass(frozen=True)
class Segment:
    """Ops, by their results, that run in a row on one device.

    ``copies`` are made before it and ``returns`` (outputs, to the host) after it. ``inputs`` are the values it reads
    from before, ``outputs`` those that are read after it. ``seconds`` are predicted, without copies.
    """

    device: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float
    copies: tuple[Copy, ...] = ()
    returns: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Segments in the order in which they run.

    Attributes:
        graph, digest: name of the graph, and :func:`digest_of` it.
        devices: the pool that it was planned for.
        seconds: predicted time of one run: segments and copies, one after another.
        exact: whether no other placement is faster by the model of :mod:`lf_hal.placement.problem`.
        memory: most bytes that each memory holds by that model.
        how: how the costs were got that the prediction rests on ("measured", "emulated", ...), without doubles.
    """

    graph: str
    digest: str
    devices: tuple[Device, ...]
    segments: tuple[Segment, ...]
    seconds: float
    exact: bool
    memory: tuple[tuple[str, int], ...]
    how: tuple[str, ...] = ()

    @property
    def pool(self) -> Pool:
        """The devices as a pool, without limits."""
        return Pool(self.devices)

    @property
    def placed(self) -> dict[str, str]:
        """The device of each op, by its result."""
        return {op: s.device for s in self.segments for op in s.ops}

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All copies of one run."""
        return tuple(c for s in self.segments for c in (*s.copies, *s.returns))

    @property
    def copied_bytes(self) -> int:
        """Bytes of one run that go over links; a copy by way of the host goes over two."""
        return sum(c.nbytes * (2 if c.via else 1) for c in self.copies)

    def __str__(self) -> str:
        kind = "optimal by the model" if self.exact else "found by a beam search"
        costs = f", costs {', '.join(self.how)}" if self.how else ""
        lines = [f"plan of {self.graph!r}: {self.seconds * 1e3:.4g} ms, {kind}{costs}"]
        evidence = {d.name: d.evidence for d in self.devices}
        for i, s in enumerate(self.segments):
            lines += [_line(c) for c in s.copies]
            names = f"{s.ops[0]} .. {s.ops[-1]}" if len(s.ops) > 1 else s.ops[0]
            lines.append(
                f"  {i}: {s.device} ({evidence[s.device]}), {len(s.ops)} ops {names}, {s.seconds * 1e3:.4g} ms"
            )
            lines += [_line(c) for c in s.returns]
        lines += [f"  memory of {space}: {nbytes} bytes" for space, nbytes in self.memory]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({"format": "lf-hal-plan", "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What :meth:`to_json` wrote. PlanFormatError: it is something else."""
        try:
            found: dict[str, Any] = json.loads(text)
            if found.pop("format") != "lf-hal-plan" or found.pop("version") != VERSION:
                raise ValueError("another format or version")
            plan = _plan(found)
            names = {d.name for d in plan.pool.devices}
            if strange := {s.device for s in plan.segments} - names:
                raise ValueError(f"a segment is on {min(strange)}, which is no device of the plan")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanFormatError("plan", f"{type(error).__name__}: {error}") from None
        return plan


def _line(c: Copy) -> str:
    via = f" via {c.via}" if c.via else ""
    return f"     copy {c.value} {c.source} -> {c.target}{via}: {c.nbytes} bytes, {c.seconds * 1e3:.4g} ms"


def _plan(found: dict[str, Any]) -> Plan:
    devices = tuple(
        Device(
            **{
                **row,
                "dtypes": None if row["dtypes"] is None else tuple(row["dtypes"]),
                "refuses": tuple(row["refuses"]),
                "evidence": Evidence(row["evidence"]),
            }
        )
        for row in found.pop("devices")
    )
    segments = tuple(_segment(row) for row in found.pop("segments"))
    memory = tuple((str(space), int(nbytes)) for space, nbytes in found.pop("memory"))
    how = tuple(map(str, found.pop("how")))
    return Plan(devices=devices, segments=segments, memory=memory, how=how, **found)


def _segment(row: Mapping[str, Any]) -> Segment:
    ops, inputs, outputs = (tuple(map(str, row[key])) for key in ("ops", "inputs", "outputs"))
    copies, returns = (tuple(Copy(**c) for c in row[key]) for key in ("copies", "returns"))
    if not ops:
        raise ValueError("a segment without ops")
    return Segment(str(row["device"]), ops, inputs, outputs, float(row["seconds"]), copies, returns)
