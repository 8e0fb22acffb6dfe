"""Kernel calls as data, run by one small program on any machine: an image of memory goes in and comes out."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.build import CSRC, Compiler, build_objects, find_compiler, run_compiler
from lf_hal.targets import Target

F = npt.NDArray[np.float32]
DRIVER = Path(__file__).parent / "csrc" / "driver.c"
SOURCES = sorted(CSRC.glob("lf_*.c"))
WORDS = 48
FLUSH_TO_ZERO = 1
PANEL = 16
FUNCTIONS = (
    *("pack_b", "gemm", "pack_conv", "conv2d", "attention", "softmax", "layer_norm", "rms_norm", "reduce"),
    *("unary", "binary", "multiply_add", "copy", "rope", "embedding", "pool2d"),
    *("pack_b_stored", "gemm_stored", "pack_conv_stored", "conv2d_stored"),
)
STORAGE = ("f32", "bf16", "f16", "i8")
UNARY = (
    *("neg", "rsqrt", "sin", "cos", "tanh", "sigmoid", "silu", "gelu_tanh", "gelu_erf", "relu"),
    *("exp", "erf", "sqrt", "abs", "log"),
)
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
REDUCE = ("sum", "mean", "max")


@dataclass(frozen=True)
class Place:
    """Where an array lies in the image: offset in floats and shape."""

    offset: int
    shape: tuple[int, ...]


@dataclass
class Program:
    """Calls and the memory they work on. ``outputs`` are what is compared, by name."""

    memory: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    outputs: dict[str, Place] = field(default_factory=dict)
    expected: dict[str, F] = field(default_factory=dict)
    size: int = 0

    def put(self, values: npt.NDArray[Any]) -> Place:
        """Memory with these values (of any element type), aligned to 16 floats."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        words = np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)]).view(np.uint32)
        place = Place(self.size, values.shape)
        room = (words.size + 15) // 16 * 16 + 16
        self.memory.append(np.concatenate([words, np.full(room - words.size, 0x7FC12345, np.uint32)]))
        self.size += room
        return place

    def out(self, name: str, shape: tuple[int, ...]) -> Place:
        """Memory for a result: NaN until a kernel has written it."""
        if name in self.outputs:
            raise ValueError(f"two results are named {name}")
        self.outputs[name] = self.put(np.full(shape, 1e30, np.float32))
        return self.outputs[name]

    def call(self, function: str, *arguments: int | float | Place | Sequence[int] | None) -> None:
        """A float goes as its bits, a place as its offset, None as NULL, a sequence as eight words."""
        words = [FUNCTIONS.index(function)]
        for a in arguments:
            if a is None:
                words.append(-1)
            elif isinstance(a, Place):
                words.append(a.offset)
            elif isinstance(a, float):
                words.append(struct.unpack("<I", struct.pack("<f", a))[0])
            elif isinstance(a, int):
                words.append(a)
            else:
                words += [*a, *[0] * (8 - len(a))]
        self.calls.append([*words, *[0] * (WORDS - len(words))])

    def image(self, flags: int = 0) -> bytes:
        head = struct.pack("<3q", flags, len(self.calls), self.size)
        return head + np.array(self.calls, np.int64).tobytes() + np.concatenate(self.memory).tobytes()

    def run(self, command: Sequence[str], flags: int = 0) -> dict[str, F]:
        """The results of ``command``, a driver built for some machine."""
        done = subprocess.run(list(command), input=self.image(flags), capture_output=True, check=False)
        if done.returncode != 0 or len(done.stdout) != self.size * 4:
            raise RuntimeError(f"{command}: status {done.returncode}, {done.stderr.decode()[-500:]}")
        memory = np.frombuffer(done.stdout, np.float32)
        return {
            name: memory[p.offset : p.offset + int(np.prod(p.shape))].reshape(p.shape)
            for name, p in self.outputs.items()
        }


def build_driver(
    target: Target,
    folder: Path,
    *,
    kind: str = "auto",
    extra: Sequence[str] = (),
) -> Path:
    """The driver with all kernels for ``target``, without a C library. ``extra`` flags spoil it on purpose."""
    compiler = find_compiler(target, kind)
    objects = [_driver_object(compiler, target, folder)]
    if extra:
        for source in SOURCES:
            objects.append(folder / f"{target.name}-{source.stem}-{'_'.join(extra)}.o")
            flags = [*compiler.flags(target), "-fno-stack-protector", *extra, f"-I{CSRC}"]
            run_compiler([*compiler.command, *flags, "-c", str(source), "-o", str(objects[-1])])
    else:
        objects += build_objects(compiler, target, SOURCES, [CSRC])
    made = folder / f"{target.name}-{compiler.kind}{'_'.join(extra)}"
    # as lf_hal.build links, so that zig builds its runtime once
    words = ["-target", target.zig_triple, *target.zig_link, "-O2"] if compiler.kind == "zig" else []
    run_compiler([*compiler.command, *words, "-nostdlib", "-static", *map(str, objects), "-o", str(made)])
    return made


def _driver_object(compiler: Compiler, target: Target, folder: Path) -> Path:
    made = folder / f"driver-{target.name}-{compiler.kind}.o"
    flags = [*compiler.flags(target), "-Wextra", "-Werror", "-O1", "-ffreestanding", f"-I{CSRC}"]
    run_compiler([*compiler.command, *flags, "-c", str(DRIVER), "-o", str(made)])
    return made


__all__ = [
    "BINARY",
    "FLUSH_TO_ZERO",
    "PANEL",
    "REDUCE",
    "SOURCES",
    "STORAGE",
    "UNARY",
    "Place",
    "Program",
    "build_driver",
]
