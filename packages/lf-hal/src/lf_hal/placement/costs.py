"""What ops cost on devices: a table of seconds by device and signature, that JSON keeps.

A signature says all that the time of an op follows from: kind, attributes, types, and which operands are stored. So a
table that was measured for one graph serves any other with the same ops.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lf_hal.lir.graph import Graph, Op
from lf_hal.placement.errors import PlanFormatError
from lf_hal.placement.pool import Link, Links, Pool

if TYPE_CHECKING:
    from lf_hal.placement.pool import Device

__all__ = ["Cost", "CostTable", "signature"]

VERSION = 1
HOW = ("measured", "emulated", "simulated", "given")


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, and ``how`` they were got: measured, emulated, simulated (neither is a device's speed), or
    given by the caller."""

    seconds: float
    how: str = "given"


def signature(graph: Graph, ops: Sequence[Op]) -> str:
    """What the time of these ops, run together, follows from; names play no part.

    One op reads ``linear(f32[2,8], *f32[4,8])``, a star marking what is stored; several give a hash.
    """
    types, made = graph.types(), graph.producers()
    inputs = {v.name for v in graph.inputs}
    places: dict[str, str] = {}
    lines = []
    for op in ops:
        words = []
        for name in op.inputs:
            stored = name not in made and name not in inputs
            kind = f"{'*' if stored else ''}{types[name]}"
            words.append(places.setdefault(name, f"{kind}" if len(ops) == 1 else f"%{len(places)}:{kind}"))
        attrs = ", ".join(f"{key}={value}" for key, value in op.attrs)
        lines.append(f"{op.kind}({', '.join(words)})" + (f" {{{attrs}}}" if attrs else ""))
        places[op.output.name] = f"%{len(places)}"
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} ops, sha256 {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


@dataclass
class CostTable:
    """Costs by device name and signature, what it costs to start a segment on a device, and links between memories.

    The time of a segment is taken to be the device's ``launch`` and the sum of its ops, or what was measured for just
    these ops together.
    """

    costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    launch: dict[str, float] = field(default_factory=dict)
    links: Links = field(default_factory=Links)

    def set(self, device: str, signature: str, seconds: float, how: str = "given") -> None:
        """Enter a cost. ValueError: it is negative or no number, or ``how`` is unknown."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{seconds!r} seconds for {signature} on {device}; give a finite number from 0")
        if how not in HOW:
            raise ValueError(f"how={how!r}; give one of {', '.join(HOW)}")
        self.costs[device, signature] = Cost(float(seconds), how)

    def get(self, device: str, signature: str) -> Cost | None:
        return self.costs.get((device, signature))

    def measure(
        self,
        graph: Graph,
        device: Device,
        *,
        groups: Iterable[Sequence[str]] = (),
        repeats: int = 5,
        allow_emulated: bool = False,
        threads: int = 1,
    ) -> CostTable:
        """Time every op of ``graph`` that ``device`` runs and the table lacks; the fastest of ``repeats`` runs counts.

        Ops run on random inputs, one at a time, and the time of starting a segment is measured apart and taken off.
        ``groups`` are lists of ops (by their results) that are timed together as well. Ops that the device cannot run
        are left out: :func:`~lf_hal.placement.plan` says why when it needs them.

        Returns:
            This table.

        Raises:
            EmulationNotAllowedError: the device is an emulator here and ``allow_emulated`` is not given; what it takes
                there is marked ``emulated`` and is no device's speed.
        """
        from lf_hal.placement.measure import measure

        measure(self, graph, device, groups, repeats, allow_emulated, threads)
        return self

    def measure_links(self, pool: Pool, repeats: int = 5) -> CostTable:
        """Time copies between the host and every other memory of the pool, at two sizes; the rest goes by the host."""
        from lf_hal.placement.measure import measure_links

        self.links = measure_links(pool, repeats)
        return self

    def to_json(self) -> str:
        rows = [
            {"device": device, "op": signature, **asdict(cost)}
            for (device, signature), cost in sorted(self.costs.items())
        ]
        found = {
            "format": "lf-hal-costs",
            "version": VERSION,
            "machine": platform.machine(),
            "launch": dict(sorted(self.launch.items())),
            "links": [asdict(link) for link in self.links.links],
            "costs": rows,
        }
        return json.dumps(found, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """What :meth:`to_json` wrote. PlanFormatError: it is something else."""
        try:
            found: dict[str, Any] = json.loads(text)
            if found["format"] != "lf-hal-costs" or found["version"] != VERSION:
                raise ValueError(f"format {found['format']!r}, version {found['version']!r}")
            table = cls(
                launch={str(k): float(v) for k, v in found["launch"].items()},
                links=Links(tuple(Link(**row) for row in found["links"])),
            )
            for row in found["costs"]:
                table.set(str(row["device"]), str(row["op"]), row["seconds"], row["how"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanFormatError("cost table", f"{type(error).__name__}: {error}") from None
        return table

    def save(self, path: str | Path) -> None:
        """Write the table to a file, which appears complete or not at all."""
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(self.to_json())
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """The table in a file. PlanFormatError: the file holds something else."""
        return cls.from_json(Path(path).read_text())
