"""What a probe found out about one backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lf_hal.evidence import Evidence

__all__ = ["BACKENDS", "Backend", "Probe", "State"]


class State(StrEnum):
    """absent: neither driver nor package. installed_unusable: something is there and does not work. invisible: devices
    are there, and hidden from this process. ready: devices can be used."""

    ABSENT = "absent"
    INSTALLED_UNUSABLE = "installed_unusable"
    INVISIBLE = "invisible"
    READY = "ready"


@dataclass(frozen=True)
class Backend:
    """A way to devices: its name, the torch device type, and how far lf-hal's use of it is proved."""

    name: str
    device_type: str
    evidence: Evidence


BACKENDS = (
    Backend("cuda", "cuda", Evidence.NEEDS_GPU),
    Backend("ascend", "npu", Evidence.CONTRACT_ONLY),
    Backend("mlu", "mlu", Evidence.CONTRACT_ONLY),
    Backend("cpu", "cpu", Evidence.VERIFIED),
)


@dataclass(frozen=True)
class Probe:
    """One backend as a process of its own found it.

    `stage` is the last thing that was tried, `reason` says why the state is what it is, `fix` what would change it.
    `devices` are names by index, as the driver gives them; `versions` of packages, driver and SDK; `missing` the
    libraries and symbols that a loader did not find; `notes` what a user should know and what changes no state.
    """

    backend: str
    device_type: str
    state: State
    reason: str
    stage: str
    fix: str = ""
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: Evidence = Evidence.CONTRACT_ONLY

    @property
    def count(self) -> int:
        """How many devices can be used now: none unless the state is ready."""
        return len(self.devices) if self.state is State.READY else 0

    def line(self) -> str:
        """One line for errors and logs."""
        return f"{self.backend}: {self.state}, {self.reason}"

    def describe(self) -> dict[str, Any]:
        """The probe as JSON-able data."""
        return asdict(self)
