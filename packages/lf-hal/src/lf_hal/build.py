"""The compilers: gcc for this machine, zig's clang for all others, and a cache of what they made.

Kernels depend on the instruction set alone, so their objects are kept between models in a cache folder
(``LF_HAL_CACHE``, else ``~/.cache/lf-hal``), named after the hash of everything that went into them.

zig builds musl anew for each (machine, flags, -O level) that it links for, which takes minutes. Objects are therefore
compiled with the flags of the target, and all of a machine's targets link with one plain command.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lf_hal.errors import CompilerFailedError, CompilerMissingError, EmulatorMissingError
from lf_hal.targets import COMMON_FLAGS, Target

__all__ = ["CSRC", "Compiler", "build_objects", "emulator_command", "find_compiler", "link"]

CSRC = Path(__file__).parent / "csrc"
_INSTALL_GCC = (
    "install gcc (Debian: apt-get install gcc libc6-dev), or pip install 'lf-hal[zig]' for an executable"
)
_INSTALL_ZIG = "pip install 'lf-hal[zig]' (package ziglang), or put zig on PATH"
_INSTALL_QEMU = "install qemu-user 8.2 or newer (Debian 12: from bookworm-backports)"


@dataclass(frozen=True)
class Compiler:
    """A C compiler: ``kind`` is gcc or zig, ``command`` its words, ``version`` what it says of itself."""

    kind: str
    command: tuple[str, ...]
    version: str

    def flags(self, target: Target) -> tuple[str, ...]:
        """Flags that make an object for ``target``."""
        if self.kind == "zig":
            # zig's cc turns on the undefined-behaviour traps of its debug mode unless told not to
            march = tuple(f for f in target.flags if not f.startswith(("-march=", "-mtune=")))
            cpu = tuple("-mcpu=" + _zig_cpu(f) for f in target.flags if f.startswith("-march="))
            own = ("-target", target.zig_triple, *cpu, *march, *target.zig_only, "-fno-sanitize=undefined")
            return (*COMMON_FLAGS, *own)
        return (*COMMON_FLAGS, "-Wno-psabi", *target.flags)


def _zig_cpu(march: str) -> str:
    return march.removeprefix("-march=").replace("-", "_")


@cache
def _version(command: tuple[str, ...], *arguments: str) -> str | None:
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _zig() -> tuple[str, ...] | None:
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang")
    found = shutil.which("zig")
    return (found,) if found else None


def find_compiler(target: Target, kind: str = "auto") -> Compiler:
    """gcc for a target of this machine's architecture, zig otherwise, or the ``kind`` asked for.

    Raises :class:`CompilerMissingError` with what to install.
    """
    if kind not in ("auto", "gcc", "zig"):
        raise ValueError(f"compiler kind {kind!r}: choose auto, gcc or zig")
    here = platform.machine() == target.machine
    if kind == "gcc" or (kind == "auto" and here):
        gcc = shutil.which("gcc")
        version = _version((gcc,), "--version") if gcc else None
        if gcc is None or version is None:
            raise CompilerMissingError("gcc", target.name, _INSTALL_GCC)
        if not here:
            raise CompilerMissingError(f"a gcc for {target.machine}", target.name, _INSTALL_ZIG)
        return Compiler("gcc", (gcc,), version)
    zig = _zig()
    version = _version(zig, "version") if zig else None
    if zig is None or version is None:
        raise CompilerMissingError("zig", target.name, _INSTALL_ZIG)
    return Compiler("zig", (*zig, "cc"), f"zig {version}")


def emulator_command(target: Target) -> tuple[str, ...]:
    """The words that start a program of ``target`` here; raises :class:`EmulatorMissingError`."""
    if not target.emulator or shutil.which(target.emulator[0]) is None:
        name = target.emulator[0] if target.emulator else f"an emulator of {target.name}"
        raise EmulatorMissingError(name, target.name, _INSTALL_QEMU)
    return target.emulator


def cache_folder() -> Path:
    """Where objects are kept: ``LF_HAL_CACHE``, else ``lf-hal`` in the user's cache folder."""
    explicit = os.environ.get("LF_HAL_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lf-hal"


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler; raises :class:`CompilerFailedError` with its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise CompilerFailedError(command, done.returncode, done.stdout)


def _headers_digest(folders: Sequence[Path]) -> bytes:
    digest = hashlib.sha256()
    for folder in folders:
        # kernels may include each other's .c files as templates
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".c", ".inc")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def build_objects(
    compiler: Compiler, target: Target, sources: Sequence[Path], include: Sequence[Path] = ()
) -> list[Path]:
    """Objects of ``sources`` for ``target``, from the cache where they are there already."""
    folder = cache_folder() / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    headers = _headers_digest(include)
    flags = (*compiler.flags(target), *(f"-I{path}" for path in include))
    objects = []
    for source in sources:
        key = hashlib.sha256(headers)
        words = (compiler.kind, compiler.version, *compiler.flags(target), source.name)
        key.update("\0".join(words).encode() + b"\0" + source.read_bytes())
        made = folder / f"{source.stem}-{key.hexdigest()[:32]}.o"
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                temporary = Path(scratch) / "made.o"
                run_compiler([*compiler.command, *flags, "-c", str(source), "-o", str(temporary)])
                os.replace(temporary, made)
        objects.append(made)
    return objects


def link(compiler: Compiler, target: Target, objects: Sequence[Path], out: Path, *, shared: bool) -> None:
    """Make a shared library, or a static executable that needs nothing else, of ``objects``."""
    words = [*compiler.command]
    if compiler.kind == "zig":
        # one set of flags and one -O level for all of a machine: see the head of this file
        words += ["-target", target.zig_triple, *target.zig_link, "-O2"]
    words += ["-shared" if shared else "-static", *map(str, objects), "-o", str(out), "-pthread"]
    if shared:
        words += ["-Wl,--no-undefined"]
    run_compiler(words)
