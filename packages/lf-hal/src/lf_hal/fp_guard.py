"""Keeps a thread's floating-point control register in the state that lf-hal's bits are defined for.

Rounding to nearest, subnormals kept. Registers, fields and bits: x86-64 MXCSR (Intel SDM 1, 10.2.3), aarch64 FPCR (Arm
ARM D19.2), LoongArch FCSR0 (manual volume 1, 3.1.4), RISC-V fcsr (F extension). LoongArch and RISC-V cannot flush
subnormals. Whether a product and a sum are fused is in no register: the compiler decides it, see ORDER.md.

The register is read and written through fegetenv and fesetenv of the C library; the table says where in its fenv_t.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from lf_hal.errors import FpStateError

__all__ = ["LAYOUTS", "Field", "FpState", "check_fp_state", "fp_guard", "fp_guarded", "fp_state"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ENV_BYTES = 512  # more than any fenv_t


@dataclass(frozen=True)
class Field:
    """Bits of a control register that change results; the state wanted is 0 in each.

    offset: byte offset in fenv_t of the little-endian word of 32 bits that holds the register.
    """

    register: str
    name: str
    offset: int
    bit: int
    width: int
    meaning: str

    def of(self, env: bytes) -> int:
        """The field's value in a fenv_t."""
        word = int.from_bytes(env[self.offset : self.offset + 4], "little")
        return word >> self.bit & (1 << self.width) - 1

    def put(self, env: bytes, value: int) -> bytes:
        """The fenv_t with this value in the field."""
        word = int.from_bytes(env[self.offset : self.offset + 4], "little")
        word = word & ~((1 << self.width) - 1 << self.bit) | value << self.bit
        return env[: self.offset] + word.to_bytes(4, "little") + env[self.offset + 4 :]


_DIRECTION = "rounding direction, 0 is to nearest"
LAYOUTS = {
    "x86_64": (
        Field("MXCSR", "FTZ", 28, 15, 1, "subnormal results become zero"),
        Field("MXCSR", "DAZ", 28, 6, 1, "subnormal operands count as zero"),
        Field("MXCSR", "RC", 28, 13, 2, _DIRECTION),
        Field("x87 control", "RC", 0, 10, 2, _DIRECTION),  # long double only, but fegetround answers from it
    ),
    "aarch64": (
        Field("FPCR", "FZ", 0, 24, 1, "subnormals become zero"),
        Field("FPCR", "FZ16", 0, 19, 1, "half precision subnormals become zero"),
        Field("FPCR", "FIZ", 0, 0, 1, "subnormal operands count as zero"),
        Field("FPCR", "AH", 0, 1, 1, "alternate handling of NaNs and subnormals"),
        Field("FPCR", "RMode", 0, 22, 2, _DIRECTION),
    ),
    "loongarch64": (Field("FCSR0", "RM", 0, 8, 2, _DIRECTION),),
    "riscv64": (Field("fcsr", "frm", 0, 5, 3, _DIRECTION),),
}


@dataclass(frozen=True)
class FpState:
    """The control fields of one thread at one time; `values` are in the order of LAYOUTS[machine]."""

    machine: str
    values: tuple[int, ...]

    @classmethod
    def of(cls, machine: str, env: bytes) -> FpState:
        """The state in a fenv_t of this machine."""
        return cls(machine, tuple(f.of(env) for f in LAYOUTS[machine]))

    @property
    def wrong(self) -> tuple[str, ...]:
        """The fields that are not as lf-hal wants them, with bit, value and meaning."""
        return tuple(
            f"{f.register}.{f.name} (bit {f.bit}) is {value}: {f.meaning}"
            for f, value in zip(LAYOUTS[self.machine], self.values, strict=True)
            if value
        )


def fp_state() -> FpState:
    """The state of the calling thread. FpStateError on a machine that is not in LAYOUTS."""
    return FpState.of(_machine(), _read().raw)


def check_fp_state(where: str) -> None:
    """FpStateError, naming each bit, unless the calling thread rounds to nearest and keeps subnormals."""
    wrong = fp_state().wrong
    if wrong:
        raise FpStateError(
            where, wrong, "Run it in fp_guard(), or undo what set this (torch.set_flush_denormal?)."
        )


@contextmanager
def fp_guard(where: str = "fp_guard") -> Iterator[FpState]:
    """Sets the calling thread to the wanted state, and back to its own at the end; yields what it was before.

    FpStateError at the end when something within changed a field, naming the bit, and at the start when the machine
    does not take the setting. An exception of the body goes on as it is, with a note. Other threads are not touched:
    each worker needs a guard of its own (:func:`fp_guarded`).
    """
    before, thread = fp_state(), threading.get_ident()
    _set(FpState(before.machine, (0,) * len(before.values)))
    check_fp_state(f"{where}: this machine does not take the setting")
    try:
        yield before
    except BaseException as error:
        found = fp_state()
        _set(before)
        if found.wrong:
            error.add_note(f"{where}: meanwhile {'; '.join(found.wrong)}")
        raise
    if threading.get_ident() != thread:
        raise FpStateError(
            where, ("it was left in another thread than it was entered in",), "Guard each thread."
        )
    found = fp_state()
    _set(before)
    if found.wrong:
        fix = "Something within changed it, and results since then are others: find the library and keep it out."
        raise FpStateError(where, found.wrong, fix)


def fp_guarded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, run in :func:`fp_guard` by whichever thread calls it."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with fp_guard(function.__qualname__):
            return function(*args, **kwargs)

    return run


def _machine() -> str:
    machine = platform.machine().lower().replace("amd64", "x86_64")
    if machine not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise FpStateError(
            "fp_state", (f"the control register of {machine} is not known",), f"Known: {known}."
        )
    return machine


@functools.cache
def _libm() -> ctypes.PyDLL:
    return ctypes.PyDLL("libm.so.6" if platform.libc_ver()[0] == "glibc" else None)


def _read() -> ctypes.Array[ctypes.c_char]:
    env = ctypes.create_string_buffer(_ENV_BYTES)
    if _libm().fegetenv(env):
        raise FpStateError("fegetenv", ("the C library cannot read the state",), "Use another C library.")
    return env


def _set(state: FpState) -> None:
    """Writes the control fields; flags and masks of exceptions stay as they are."""
    env = _read()
    wanted = env.raw
    for field, value in zip(LAYOUTS[state.machine], state.values, strict=True):
        wanted = field.put(wanted, value)
    ctypes.memmove(env, wanted, _ENV_BYTES)
    if _libm().fesetenv(env):
        raise FpStateError("fesetenv", ("the C library cannot set the state",), "Use another C library.")
