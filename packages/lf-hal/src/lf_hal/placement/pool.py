"""The devices that a graph may be spread over, the memories they work in, and the links between these."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lf_hal import spec as _spec
from lf_hal.errors import SpecError
from lf_hal.evidence import Evidence
from lf_hal.placement.errors import MissingLinkError, PoolError
from lf_hal.targets import resolve_target

__all__ = ["HOST", "Device", "Link", "Links", "Pool", "c_target", "torch_device"]

HOST = "host"
"""The memory of this process: inputs come from it and outputs go to it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]*")


@dataclass(frozen=True)
class Device:
    """One place where ops run; made by :func:`torch_device` and :func:`c_target`.

    Attributes:
        name: unique in its pool ("npu:0", "c").
        runs: ``torch`` (LIR ops by torch functions) or ``c`` (segments compiled by lf-hal).
        where: the torch device, or the name of the target.
        space: the memory it works in. Devices of one memory share values without a copy.
        spec: name of a :class:`~lf_hal.DeviceSpec` ("mlu290"), which ``@hardware`` may use and whose types hold.
        dtypes: floating and i8 element types it computes in; None: all. Index types are always allowed.
        refuses: op kinds that it does not run.
        evidence: how far what runs there is proved.
    """

    name: str
    runs: Literal["torch", "c"]
    where: str
    space: str
    spec: str | None = None
    dtypes: tuple[str, ...] | None = None
    refuses: tuple[str, ...] = ()
    evidence: Evidence = Evidence.VERIFIED

    @property
    def type(self) -> str:
        """The name without its index: "npu" of "npu:0"."""
        return self.name.partition(":")[0]

    def answers_to(self, affinity: str) -> bool:
        """Whether ``@hardware(affinity)`` may mean this device: its name, type, spec or target."""
        known = {self.name, self.type, self.where if self.runs == "c" else self.type}
        return affinity in known or (self.spec is not None and affinity == self.spec)


def _spec_dtypes(name: str, spec: str | None) -> tuple[str, ...] | None:
    if spec is None:
        return None
    try:
        found = _spec.spec(spec)
    except SpecError as error:
        raise PoolError(name, str(error)) from None
    if found.refused:
        raise PoolError(name, f"{spec} is refused: {found.refused}")
    return found.dtypes


_TORCH_EVIDENCE = {"cpu": Evidence.VERIFIED, "cuda": Evidence.NEEDS_GPU}


def torch_device(
    name: str,
    *,
    on: str | None = None,
    spec: str | None = None,
    dtypes: Iterable[str] | None = None,
    refuses: Iterable[str] = (),
) -> Device:
    """A torch device, "type:index".

    Args:
        on: the torch device that really runs it, if another: a simulated device, which has a memory of its own
            and is never more than contract-only.
        spec: what it is ("mlu290"); its element types hold unless ``dtypes`` says others.

    Raises:
        PoolError: no such name or spec, or a chip that lf-hal refuses.
    """
    if not _NAME.fullmatch(name):
        raise PoolError(name, 'is no name; write "type:index"')
    kind = name.partition(":")[0]
    types = _spec_dtypes(name, spec) if dtypes is None else tuple(dtypes)
    simulated = on is not None and on != name
    evidence = Evidence.CONTRACT_ONLY if simulated else _TORCH_EVIDENCE.get(kind, Evidence.CONTRACT_ONLY)
    space = HOST if kind == "cpu" and not simulated else name
    return Device(name, "torch", on or name, space, spec, types, tuple(refuses), evidence)


def c_target(target: str = "native", *, name: str | None = None, refuses: Iterable[str] = ()) -> Device:
    """A C target of :data:`lf_hal.TARGETS`; its name is that of the target unless said.

    One of this machine's architecture works in the host's memory. Another one has a memory of its own, and runs here
    only under an emulator, where that is allowed.

    Raises:
        UnknownTargetError: no such target.
    """
    chosen = resolve_target(target)
    called = name or chosen.name
    if not _NAME.fullmatch(called):
        raise PoolError(called, "is no name: use letters, digits, _ . : and -")
    here = chosen.machine == platform.machine()
    evidence = chosen.evidence if here else Evidence.EMULATED
    return Device(
        called, "c", chosen.name, HOST if here else called, None, ("f32",), tuple(refuses), evidence
    )


@dataclass(frozen=True)
class Pool:
    """Devices of different names, and how many bytes each memory may hold (those not named: any number)."""

    devices: tuple[Device, ...]
    memory: Mapping[str, int] = field(default_factory=dict)

    def __init__(self, devices: Iterable[Device], memory: Mapping[str, int] | None = None) -> None:
        object.__setattr__(self, "devices", tuple(devices))
        object.__setattr__(self, "memory", dict(memory or {}))
        names = [d.name for d in self.devices]
        if not names:
            raise PoolError("", "a pool needs at least one device")
        for device in self.devices:
            if names.count(device.name) > 1:
                raise PoolError(device.name, "is twice in the pool; give name=")
            if device.name == HOST or (device.space not in (HOST, device.name)):
                raise PoolError(device.name, f"the memory {device.space!r} is neither the host's nor its own")
        for space, limit in self.memory.items():
            if space not in self.spaces:
                raise PoolError(space, f"is no memory of the pool, which has {', '.join(self.spaces)}")
            if type(limit) is not int or limit < 0:
                raise PoolError(space, f"a limit of {limit!r} bytes; give an integer from 0")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.devices)

    @property
    def spaces(self) -> tuple[str, ...]:
        """All memories, the host's first."""
        return tuple(dict.fromkeys((HOST, *(d.space for d in self.devices))))

    def device(self, name: str) -> Device:
        """PoolError if there is none of this name."""
        for found in self.devices:
            if found.name == name:
                return found
        raise PoolError(name, f"is not in the pool, which has {', '.join(self.names)}")


@dataclass(frozen=True)
class Link:
    """A way to copy from one memory to another: ``latency`` seconds and ``bandwidth`` bytes per second."""

    source: str
    target: str
    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """Links in one direction each. Memories without one are joined by way of the host."""

    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        pairs = [(k.source, k.target) for k in self.links]
        for link in self.links:
            if not (link.bandwidth > 0 and link.latency >= 0):
                raise PoolError(
                    f"{link.source} -> {link.target}", "bandwidth above 0 and latency from 0 are needed"
                )
            if pairs.count((link.source, link.target)) > 1:
                raise PoolError(f"{link.source} -> {link.target}", "is linked twice")

    @classmethod
    def both_ways(cls, *links: Link) -> Links:
        """These and their reverses."""
        back = (Link(k.target, k.source, k.bandwidth, k.latency) for k in links)
        return cls((*links, *back))

    def route(self, source: str, target: str) -> tuple[Link, ...]:
        """The direct link, or two by way of the host. MissingLinkError: there is neither."""
        known = {(k.source, k.target): k for k in self.links}
        if (source, target) in known:
            return (known[source, target],)
        if (source, HOST) in known and (HOST, target) in known:
            return known[source, HOST], known[HOST, target]
        raise MissingLinkError(source, target)
