"""What lf-hal raises. Every error derives from :class:`HalError`, carries its data, and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "AffinityError",
    "ArtifactError",
    "BackendError",
    "CompilerFailedError",
    "CompilerMissingError",
    "ConsistencyError",
    "DeviceIndexError",
    "DeviceNameError",
    "DeviceUnavailableError",
    "EmulatorMissingError",
    "FpStateError",
    "HalError",
    "InputError",
    "NondeterministicError",
    "RunFailedError",
    "SpecError",
    "UnknownSwitchError",
    "UnknownTargetError",
    "UnsupportedOpError",
    "WeightsError",
    "WrongMachineError",
    "WrongTargetError",
]


class HalError(Exception):
    """Base class of all errors of lf-hal."""


class UnknownTargetError(HalError):
    """No target has this name. Attributes: ``name``, ``known``."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, tuple(known)
        super().__init__(f"unknown target {name!r}: choose one of native, {', '.join(known)}")


class UnknownSwitchError(HalError):
    """No compiler switch has this name. Attributes: ``switch``, ``known``."""

    def __init__(self, switch: str, known: Sequence[str]) -> None:
        self.switch, self.known = switch, tuple(known)
        super().__init__(f"unknown switch --{switch}: choose from {', '.join('--' + k for k in known)}")


class WrongTargetError(HalError):
    """A switch belongs to other machines than the target. Attributes: ``switch``, ``target``, ``allowed``."""

    def __init__(self, switch: str, target: str, allowed: Sequence[str]) -> None:
        self.switch, self.target, self.allowed = switch, target, tuple(allowed)
        super().__init__(
            f"--{switch} has no meaning for target {target}: drop it, or compile for {', '.join(allowed)}"
        )


class WrongMachineError(HalError):
    """This machine cannot execute the target natively. Attributes: ``target``, ``missing``."""

    def __init__(self, target: str, missing: Sequence[str]) -> None:
        self.target, self.missing = target, tuple(missing)
        super().__init__(
            f"this machine cannot run target {target} (missing: {', '.join(missing)}): "
            "run it on such a machine, or compile with target='native'"
        )


class CompilerMissingError(HalError):
    """A needed compiler is not here. Attributes: ``compiler``, ``target``, ``install``."""

    def __init__(self, compiler: str, target: str, install: str) -> None:
        self.compiler, self.target, self.install = compiler, target, install
        super().__init__(f"target {target} needs {compiler}, which was not found: {install}")


class EmulatorMissingError(HalError):
    """A program for another machine needs an emulator. Attributes: ``emulator``, ``target``."""

    def __init__(self, emulator: str, target: str, install: str) -> None:
        self.emulator, self.target, self.install = emulator, target, install
        super().__init__(f"running target {target} here needs {emulator}, which was not found: {install}")


class CompilerFailedError(HalError):
    """The compiler refused our C. Attributes: ``command``, ``returncode``, ``output``."""

    def __init__(self, command: Sequence[str], returncode: int, output: str) -> None:
        self.command, self.returncode, self.output = tuple(command), returncode, output
        super().__init__(
            f"the compiler ended with status {returncode}; this is a fault of lf-hal or of the compiler, "
            f"please report it with this text.\n$ {' '.join(command)}\n{output.rstrip()}"
        )


class UnsupportedOpError(HalError):
    """An operation has no C form. Attributes: ``op`` (name of its result), ``kind``, ``reason``."""

    def __init__(self, op: str, kind: str, reason: str) -> None:
        self.op, self.kind, self.reason = op, kind, reason
        super().__init__(f"cannot compile {kind} (result {op!r}): {reason}")


class WeightsError(HalError):
    """A weight is absent or of another form than the graph says. Attributes: ``name``, ``expected``, ``found``."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        self.name, self.expected, self.found = name, expected, found
        super().__init__(f"weight {name!r}: the graph expects {expected}, found {found}")


class InputError(HalError):
    """An input of a run is absent, unknown or of another form. Attributes: ``name``, ``expected``, ``found``."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        self.name, self.expected, self.found = name, expected, found
        super().__init__(f"input {name!r}: expected {expected}, found {found}")


class BackendError(HalError):
    """``torch.compile(backend="lf_hal")`` was asked for what it has not."""


class ArtifactError(HalError):
    """A file of an artefact is absent, cut or changed. Attributes: ``path``, ``offset``, ``expected``, ``found``."""

    def __init__(
        self, path: Path, reason: str, *, offset: int | None = None, expected: str = "", found: str = ""
    ) -> None:
        self.path, self.offset, self.expected, self.found = path, offset, expected, found
        where = f"{path}" if offset is None else f"{path}, at byte {offset}"
        detail = f" (expected {expected}, found {found})" if expected else ""
        super().__init__(f"{where}: {reason}{detail}; compile the model again or copy the file anew")


class RunFailedError(HalError):
    """A compiled program ended with an error. Attributes: ``command``, ``returncode``, ``output``."""

    def __init__(self, command: Sequence[str], returncode: int, output: str) -> None:
        self.command, self.returncode, self.output = tuple(command), returncode, output
        super().__init__(f"{' '.join(command)} ended with status {returncode}: {output.strip()}")


class SpecError(HalError):
    """A device, or a field of one, that the tables do not know. `name` is what was asked for."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class DeviceNameError(HalError, ValueError):
    """A device was not named as "type:index" or by a torch.device. `given` is what came instead."""

    def __init__(self, given: object, reason: str) -> None:
        super().__init__(f"{given!r} names no device: {reason}")
        self.given, self.reason = given, reason


class DeviceUnavailableError(HalError):
    """A device cannot be used, and nothing was used in its place. `causes` has one line per backend."""

    def __init__(self, device: str, causes: Sequence[str], fix: str = "") -> None:
        lines = [f"{device} cannot be used, and nothing is used in its place:"]
        lines += [f"  {cause}" for cause in causes]
        super().__init__("\n".join([*lines, *([f"  what to do: {fix}"] if fix else [])]))
        self.device, self.causes, self.fix = device, tuple(causes), fix


class DeviceIndexError(DeviceUnavailableError):
    """The backend is ready and has no device of this index. `count` is how many it has."""

    def __init__(self, device: str, count: int) -> None:
        kind = device.partition(":")[0]
        there = f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
        super().__init__(device, [f"there is {there}" if count else f"there is no {kind} device"])
        self.count = count


class AffinityError(HalError, ValueError):
    """A CPU list that cannot be read, or cannot be had here. `part` is the piece of `text` that is wrong."""

    def __init__(self, text: str, part: str, reason: str) -> None:
        super().__init__(f"LOONGFORGE_CPU_AFFINITY={text!r}: {part!r} {reason}")
        self.text, self.part, self.reason = text, part, reason


class FpStateError(HalError):
    """Floating-point control bits of this thread were changed, or cannot be set. `bits` names each with its value."""

    def __init__(self, where: str, bits: Sequence[str], fix: str) -> None:
        super().__init__(f"{where}: {'; '.join(bits)}. {fix}")
        self.where, self.bits = where, tuple(bits)


class ConsistencyError(HalError, ValueError):
    """Two results that cannot be compared at all: the same device twice, other names, shapes or settings."""


class NondeterministicError(HalError):
    """Transforms that are not functions of their input. `transforms` has a line for each, with the reason."""

    def __init__(self, transforms: Sequence[str]) -> None:
        lines = "\n".join(f"  {line}" for line in transforms)
        super().__init__(
            f"not deterministic:\n{lines}\nDraw from a generator of (seed, index) for each sample, or leave them out."
        )
        self.transforms = tuple(transforms)
