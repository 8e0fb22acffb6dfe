"""Whether two devices computed the same: bit for bit, or each within a bound of a float64 reference.

Comparing a device with itself proves nothing and is refused, and so are two results of which one was made in a reduced
precision (TF32, HF32) that hides in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lf_hal._values import EPS, Values, distance, values_of
from lf_hal.errors import ConsistencyError

__all__ = ["BoundReport", "Difference", "Report", "Run", "check_consistency"]

Outputs = Mapping[str, Any]
_REDUCED = ("tf32", "hf32")


class Named(Protocol):
    """Has a name, as a target does."""

    @property
    def name(self) -> str: ...


class Runnable(Protocol):
    """What :meth:`Run.of` needs of a :class:`lf_hal.Artifact`."""

    @property
    def target(self) -> Named: ...

    def run(self, inputs: Mapping[str, Any], /) -> Outputs: ...


@dataclass(frozen=True)
class Run:
    """One side: the device's name ("cpu:0", "npu:0", or a target such as "loongarch64-lasx"), what it gives by name
    (arrays or torch tensors, or a function of the inputs that returns them), and settings that change its arithmetic
    (:func:`lf_hal.precision.precision_settings` reads those of torch)."""

    device: str
    outputs: Outputs | Callable[[Mapping[str, Any]], Outputs]
    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, artifact: Runnable) -> Run:
        """The side of a compiled model: its target is the device, and it runs when it is compared."""
        return cls(artifact.target.name, artifact.run)

    def get(self, inputs: Mapping[str, Any] | None) -> Outputs:
        """The outputs; ConsistencyError where a function has no inputs, or gives no mapping."""
        if not callable(self.outputs):
            return self.outputs
        if inputs is None:
            raise ConsistencyError(f"{self.device} is a function: give it inputs")
        found = self.outputs(inputs)
        if not isinstance(found, Mapping):
            raise ConsistencyError(
                f"{self.device} returned a {type(found).__name__}; return a mapping by name"
            )
        return found

    def reduced(self) -> tuple[str, ...]:
        """Settings that are on and reduce the precision of float32."""
        return tuple(
            f"{self.device}: {name} is {value}"
            for name, value in self.settings.items()
            if any(word in f"{name}={value}".lower() for word in _REDUCED)
            and value not in (False, None, "ieee")
        )


@dataclass(frozen=True)
class Difference:
    """How one output differs: elements and bits that do, the largest distance in ULP (None: a NaN on one side only),
    and the first place with both values. All NaNs are one value; -0 and +0 differ, by 0 ULP."""

    name: str
    elements: int
    differing: int
    bits: int
    max_ulp: int | None
    first: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True)
class BoundReport:
    """Largest error of one output against the reference, as a share of its bound: above 1 is out of bounds."""

    name: str
    device: str
    worst: float
    error: float
    bound: float
    first: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What :func:`check_consistency` found; ok when there is neither a problem nor a difference that counts."""

    mode: str
    devices: tuple[str, str]
    compared: tuple[str, ...]
    problems: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    bounds: tuple[BoundReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the two are consistent in this mode."""
        outside = any(not b.worst <= 1 for b in self.bounds)
        return not self.problems and not outside and (self.mode != "bits" or not self.differences)

    def describe(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return asdict(self) | {"ok": self.ok}


def check_consistency(
    a: Run,
    b: Run,
    inputs: Mapping[str, Any] | None = None,
    mode: Literal["bits", "bound"] = "bits",
    *,
    reference: Run | None = None,
    k: int | Mapping[str, int] = 1,
    c: float = 2.0,
    magnitude: Mapping[str, Any] | None = None,
) -> Report:
    """Compares what two different devices give for the same inputs.

    bits: every bit, NaNs being one value. bound: each side lies within c * k * eps * magnitude of `reference` (float64
    results), k being the number of terms of a sum (one number, or by output), eps of the output's type, magnitude the
    sum of the terms' absolute values by output; the largest absolute value of the reference where it is left out.
    Types and shapes are compared in both modes. ConsistencyError: equal devices, the same function or the same array on
    both sides, other names, a reference that is missing or not float64, or nothing to compare.
    """
    if mode not in ("bits", "bound"):
        raise ConsistencyError(f"mode {mode!r} is neither 'bits' nor 'bound'")
    if a.device == b.device:
        raise ConsistencyError(
            f"both results are of {a.device}: comparing a device with itself proves nothing"
        )
    if a.outputs is b.outputs:
        raise ConsistencyError(f"{a.device} and {b.device} are the same object: run each device by itself")
    of_a, of_b = a.get(inputs), b.get(inputs)
    if set(of_a) != set(of_b):
        only = ", ".join(sorted(set(of_a) ^ set(of_b)))
        raise ConsistencyError(f"{a.device} and {b.device} give other outputs: {only} is of one of them only")
    if not of_a:
        raise ConsistencyError("there are no outputs to compare")
    same = [name for name in of_a if of_a[name] is of_b[name]]
    if same:
        raise ConsistencyError(f"output {same[0]} of {a.device} and of {b.device} is the same array")
    pairs = {name: (values_of(name, of_a[name]), values_of(name, of_b[name])) for name in sorted(of_a)}
    problems = [p for name, (x, y) in pairs.items() for p in _unlike(name, a.device, x, b.device, y)]
    alike = {name: pair for name, pair in pairs.items() if pair[0].shape == pair[1].shape}
    differences = tuple(
        d
        for name, (x, y) in alike.items()
        if x.dtype == y.dtype and (d := _difference(name, x, y)) is not None
    )
    reduced = [*a.reduced(), *b.reduced()]
    if mode == "bits":
        problems += [f"{setting}: float32 hides a shorter type; turn it off" for setting in reduced]
        return Report(mode, (a.device, b.device), tuple(pairs), tuple(problems), differences)
    bounds = _bounds(alike, (a.device, b.device), _reference(reference, inputs, alike), k, c, magnitude or {})
    return Report(
        mode, (a.device, b.device), tuple(pairs), tuple(problems), differences, bounds, tuple(reduced)
    )


def _unlike(name: str, device_a: str, a: Values, device_b: str, b: Values) -> list[str]:
    found = []
    if a.dtype != b.dtype:
        found.append(f"{name}: {device_a} gives {a.dtype}, {device_b} gives {b.dtype}")
    if a.shape != b.shape:
        found.append(f"{name}: {device_a} gives shape {a.shape}, {device_b} gives {b.shape}")
    return found


def _difference(name: str, a: Values, b: Values) -> Difference | None:
    where = a.bits != b.bits
    count = int(np.count_nonzero(where))
    if not count:
        return None
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), a.shape))
    x, y = a.bits[where], b.bits[where]
    bits = int(np.unpackbits((x ^ y).view(np.uint8)).sum())
    nan = np.isnan(a.numbers[where]) != np.isnan(b.numbers[where])
    ulp = None if nan.any() else int(distance(a.dtype, x, y).max())
    return Difference(
        name, a.bits.size, count, bits, ulp, first, float(a.numbers[first]), float(b.numbers[first])
    )


def _reference(
    reference: Run | None, inputs: Mapping[str, Any] | None, pairs: Mapping[str, Any]
) -> dict[str, npt.NDArray[np.float64]]:
    if reference is None:
        raise ConsistencyError("mode 'bound' needs a reference: the same computation in float64")
    given = reference.get(inputs)
    found = {}
    for name, (one, _) in pairs.items():
        if name not in given:
            raise ConsistencyError(f"the reference has no output {name}")
        values = values_of(name, given[name])
        if values.dtype != "f64":
            raise ConsistencyError(f"the reference of {name} is {values.dtype}; compute it in float64")
        if values.shape != one.shape:
            raise ConsistencyError(
                f"the reference of {name} has shape {values.shape}, the results {one.shape}"
            )
        found[name] = values.numbers
    return found


def _bounds(
    pairs: Mapping[str, tuple[Values, Values]],
    devices: tuple[str, str],
    reference: Mapping[str, npt.NDArray[np.float64]],
    k: int | Mapping[str, int],
    c: float,
    magnitude: Mapping[str, Any],
) -> tuple[BoundReport, ...]:
    found = []
    for name, pair in pairs.items():
        exact = reference[name]
        terms = k if isinstance(k, int) else k.get(name, 1)
        scale = np.asarray(magnitude[name], np.float64) if name in magnitude else _largest(exact)
        for device, side in zip(devices, pair, strict=True):
            eps = EPS.get(side.dtype, 0.0)
            bound = np.broadcast_to(c * terms * eps * np.abs(scale), exact.shape)
            found.append(_worst(name, device, side.numbers, exact, bound))
    return tuple(found)


def _largest(exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    finite = np.abs(exact[np.isfinite(exact)])
    return np.asarray(finite.max() if finite.size else 0.0)


def _worst(
    name: str,
    device: str,
    numbers: npt.NDArray[np.float64],
    exact: npt.NDArray[np.float64],
    bound: npt.NDArray[np.float64],
) -> BoundReport:
    """Equal values, infinite ones and NaNs too, have no error; any other that is not finite has an infinite one."""
    if not exact.size:
        return BoundReport(name, device, 0.0, 0.0, 0.0, ())
    equal = (numbers == exact) | (np.isnan(numbers) & np.isnan(exact))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(equal, 0.0, np.abs(numbers - exact))
        error = np.where(np.isnan(error), math.inf, error)
        share = np.where(error == 0, 0.0, error / bound)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(share)), exact.shape))
    return BoundReport(name, device, float(share[at]), float(error[at]), float(bound[at]), at)
