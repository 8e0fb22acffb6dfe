"""What a device is like: vector width, caches, on-chip memory, types. Each field says where it was learned.

:func:`host` reads the CPU that runs this; :func:`spec` also looks into a table of what vendors state, whose numbers
nobody here has measured. A field that no source speaks of is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from lf_hal._cpu import read_cpu
from lf_hal.errors import SpecError
from lf_hal.evidence import Evidence

__all__ = ["DeviceSpec", "Origin", "chip", "host", "names", "spec"]

READ = "read here"
STATED = "vendor-stated, unverified"


@dataclass(frozen=True)
class Origin:
    """Where a field was learned: `how` is READ or STATED, `source` the file, instruction or document."""

    how: str
    source: str


@dataclass(frozen=True)
class DeviceSpec:
    """A device as a compiler and a planner see it.

    Sizes are bytes, bandwidth bytes/s of the device's memory, vector_bits the widest vector register. l1_bytes is the
    data cache of one core, l2_bytes of one core for CPUs and of the chip for NPUs, l3_bytes shared. sram_bytes is the
    software-managed memory that a tile must fit in; `memories` has the others by their vendor's name. `refused` says
    why lf-hal does not use the device, and is empty for those it may use.
    """

    name: str
    kind: str
    core_type: str | None = None
    cores: int | None = None
    vector_bits: int | None = None
    cache_line: int | None = None
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    sram_bytes: int | None = None
    bandwidth: int | None = None
    dtypes: tuple[str, ...] | None = None
    fma: bool | None = None
    memories: Mapping[str, int] | None = None
    refused: str = ""
    note: str = ""
    evidence: Evidence = Evidence.CONTRACT_ONLY
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The spec as JSON-able data."""
        return asdict(self)


FACTS = tuple(
    f.name
    for f in fields(DeviceSpec)
    if f.name not in ("name", "kind", "refused", "note", "evidence", "origins")
)


def host() -> DeviceSpec:
    """The CPU that runs this, from /proc/cpuinfo, getauxval, cpucfg (LoongArch) and /sys."""
    name, facts, sources = read_cpu()
    origins = {key: Origin(READ, sources[key]) for key in facts}
    return DeviceSpec(name, "cpu", **facts, evidence=Evidence.VERIFIED, origins=origins)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        resources.files("lf_hal").joinpath("data/devices.json").read_text("utf-8")
    )
    return table


def names() -> tuple[str, ...]:
    """What :func:`spec` knows by name, without other spellings."""
    return ("host", *_table()["devices"])


def spec(name: str) -> DeviceSpec:
    """The device called `name` in any case: "host", a name of the table ("mlu290", "910b"), or what its driver calls it
    ("MLU290-M5", "Ascend910B3"). SpecError names those there are.

    People call the second generation of the Ascend 910 "910B"; drivers gave that name to chips of the first, and
    :func:`chip` reads it as they do.
    """
    if name.lower() == "host":
        return host()
    for key, row in _table()["devices"].items():
        if name.lower() in {key, *row["names"]}:
            return _from_row(key, row)
    found = chip(name) or chip(name.upper())
    if found is None:
        raise SpecError(name, f"not in the table; there are {', '.join(names())}")
    return found


def chip(name: str) -> DeviceSpec | None:
    """The device whose driver says `name` of itself, letter for letter ("Ascend910B3", "MLU370-X8"); None: unknown."""
    for key, row in _table()["devices"].items():
        if name in row["chips"]:
            return _from_row(key, row)
    return None


def _from_row(name: str, row: Mapping[str, Any]) -> DeviceSpec:
    sources = _table()["sources"]
    unknown = set(row["fields"]) - set(FACTS)
    if unknown:
        raise SpecError(name, f"the table has fields that DeviceSpec lacks: {', '.join(sorted(unknown))}")
    facts = {key: fact["value"] for key, fact in row["fields"].items()}
    if facts.get("dtypes") is not None:
        facts["dtypes"] = tuple(facts["dtypes"])
    origins = {key: Origin(STATED, sources[fact["source"]]) for key, fact in row["fields"].items()}
    return DeviceSpec(name, row["kind"], **facts, refused=row["refused"], note=row["note"], origins=origins)
