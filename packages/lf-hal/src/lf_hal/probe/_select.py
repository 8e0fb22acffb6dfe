"""Devices by name, and one choice that stays: an explicit device is had or is an error, never another one."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lf_hal.errors import DeviceIndexError, DeviceNameError, DeviceUnavailableError
from lf_hal.evidence import Evidence
from lf_hal.probe._run import probe
from lf_hal.probe._types import Probe
from lf_hal.spec import chip

__all__ = ["Choice", "Devices", "choose", "parse_device", "require"]

_NAME = re.compile(r"([a-z][a-z0-9_]*):(0|[1-9][0-9]{0,3})")
_log = logging.getLogger("lf_hal.devices")


@dataclass(frozen=True)
class Choice:
    """A device that may be used: "type:index", the driver's name of it, why it, and how far its use is proved."""

    device: str
    name: str
    reason: str
    evidence: Evidence

    def torch_device(self) -> Any:
        """The torch.device; imports torch."""
        import torch

        return torch.device(self.device)


def parse_device(device: object) -> tuple[str, int]:
    """(type, index) of "npu:0" or torch.device("npu", 0); "cpu" is "cpu:0". DeviceNameError for all else.

    A bare int is refused: torch takes device=1 for an index of whatever accelerator it thinks of first. So is a type
    without an index, which would mean "the current one", a state that others change.
    """
    if isinstance(device, bool | int):
        raise DeviceNameError(device, 'an int has no device type; write "cuda:0", "npu:0" or "mlu:0"')
    text = device if isinstance(device, str) else _of_torch(device)
    if text == "cpu":
        return "cpu", 0
    found = _NAME.fullmatch(text)
    if not found:
        raise DeviceNameError(device, 'write "type:index", such as "npu:0"')
    return found[1], int(found[2])


def _of_torch(device: object) -> str:
    torch = sys.modules.get("torch")  # nobody has a torch.device who has not imported it
    if torch is None or not isinstance(device, torch.device):
        raise DeviceNameError(
            device, f'a {type(device).__name__} is none; write "npu:0" or give a torch.device'
        )
    return str(device)


class Devices:
    """What this process may use. Probes once, on the first question, and keeps the answer and its choice.

    `ask` is what probes; tests give their own.
    """

    def __init__(self, ask: Callable[[], Sequence[Probe]] = probe) -> None:
        self._ask = ask
        self._lock = threading.RLock()
        self._probes: tuple[Probe, ...] | None = None
        self._choice: Choice | None = None
        self._told: set[str] = set()

    def probes(self) -> tuple[Probe, ...]:
        """The probes that decisions of this process rest on."""
        with self._lock:
            if self._probes is None:
                self._probes = tuple(self._ask())
            return self._probes

    def require(self, device: object) -> Choice:
        """This device and no other. DeviceNameError: not a name; DeviceIndexError: the backend has no such index;
        DeviceUnavailableError: it cannot be used, with the cause that each backend gave."""
        kind, index = parse_device(device)
        name = f"{kind}:{index}"
        probes = self.probes()
        found = next((p for p in probes if p.device_type == kind), None)
        if found is None or not found.count:
            own = [found] if found else []
            others = [p for p in probes if p is not found]
            causes = [p.line() for p in (*own, *others)]
            notes = [f"note on {p.backend}: {note}" for p in probes for note in p.notes]
            raise DeviceUnavailableError(name, [*causes, *notes], found.fix if found else "")
        if index >= found.count:
            raise DeviceIndexError(name, found.count)
        known = chip(found.devices[index])
        if known is not None and known.refused:
            raise DeviceUnavailableError(name, [f"{found.devices[index]} is refused: {known.refused}"])
        return self._tell(Choice(name, found.devices[index], "asked for", found.evidence))

    def choose(self, accelerator: bool = False) -> Choice:
        """The first ready backend in the order cuda, ascend, mlu, cpu; the same answer for the life of the process.

        accelerator: DeviceUnavailableError, with each backend's cause, rather than the CPU.
        """
        with self._lock:
            if self._choice is None:
                self._choice = self._first()
            if accelerator and self._choice.device == "cpu:0":
                raise DeviceUnavailableError("an accelerator", [p.line() for p in self.probes()])
            return self._tell(self._choice)

    def _first(self) -> Choice:
        passed: list[str] = []
        for found in self.probes():
            if found.count:
                reason = "the first that is ready" + (f"; before it: {'; '.join(passed)}" if passed else "")
                return Choice(f"{found.device_type}:0", found.devices[0], reason, found.evidence)
            passed.append(found.line())
        raise DeviceUnavailableError("any device", passed)

    def _tell(self, choice: Choice) -> Choice:
        with self._lock:
            if choice.device not in self._told:
                self._told.add(choice.device)
                _log.info(
                    "using %s (%s): %s [%s]", choice.device, choice.name, choice.reason, choice.evidence
                )
        return choice


_process = Devices()


def require(device: object) -> Choice:
    """:meth:`Devices.require` for this process."""
    return _process.require(device)


def choose(accelerator: bool = False) -> Choice:
    """:meth:`Devices.choose` for this process."""
    return _process.choose(accelerator)
