"""Compiled models: a folder of C, a library or program, weights, and a manifest that all of it is checked against."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI

from lf_hal.build import emulator_command
from lf_hal.direct import ReadReport, check_strategy
from lf_hal.errors import ArtifactError, HalError, InputError, RunFailedError, WrongMachineError
from lf_hal.lir.graph import TensorType, Value
from lf_hal.targets import Target, missing_features, resolve_target
from lf_hal.weights import NUMPY_DTYPES, WeightsFile, head_digest, open_weights

__all__ = ["FORMAT", "MANIFEST", "WEIGHTS", "Artifact", "checked_inputs", "load", "write_manifest"]

FORMAT = "lf-hal-artifact-1"
MANIFEST, WEIGHTS, SOURCE, LIBRARY, PROGRAM = "manifest.json", "weights.lfw", "graph.c", "model.so", "model"

_CDEF = """
typedef struct lf_model lf_model;
int32_t lf_model_open(lf_model **model, const uint8_t *weights, int64_t bytes, int32_t threads);
int32_t lf_model_run(lf_model *model, const void *const *in, void *const *out, int64_t *bad);
int32_t lf_model_profile(lf_model *model, const void *const *in, void *const *out, int64_t *bad, int64_t *ns,
                         const int32_t *files, int32_t counters, uint64_t *counts);
void lf_model_close(lf_model *model);
"""
_STATUS = {
    1: "there is not enough memory",
    2: "no thread could be started",
    4: "the weights are of another model",
}

_NO_COUNTER = 5

Array = npt.NDArray[Any]


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` with the hashes of the files beside it, and of itself."""
    files = {p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.name not in (MANIFEST, WEIGHTS)}
    full = {**manifest, "files": files, "weights_head": head_digest(folder / WEIGHTS)}
    full["sha256"] = _seal(full)
    (folder / MANIFEST).write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True)
class _Opened:
    ffi: Any
    library: Any
    model: Any
    weights: WeightsFile  # the model reads from its mapping
    process: int  # whose threads it has


def _close_models(opened: dict[int, _Opened]) -> None:
    while opened:
        _, one = opened.popitem()
        if one.process == os.getpid():  # a forked child has none of the threads that closing would wait for
            one.library.lf_model_close(one.model)


class Artifact:
    """A compiled model. Made by :func:`lf_hal.compile` or :func:`lf_hal.load`; a context manager that frees it.

    ``run`` executes it here: in this process if this machine is of the target's kind, else as a program under the
    target's emulator. Runs of several Python threads wait for each other; a forked child opens the model anew.
    """

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], *, owner: object = None, io_strategy: str = "mmap"
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self._io_strategy = check_strategy(io_strategy)
        self._owner = owner  # a temporary folder lives as long as its artefact
        self.target: Target = resolve_target(manifest["target"])
        self.inputs = tuple(_value(row) for row in manifest["inputs"])
        self.outputs = tuple(_value(row) for row in manifest["outputs"])
        self._weights: WeightsFile | None = None
        self._opened: dict[int, _Opened] = {}
        self._process, self._lock = os.getpid(), threading.Lock()
        weakref.finalize(self, _close_models, self._opened)

    def run(
        self, inputs: Mapping[str, Array] | Sequence[Array], *, threads: int | None = None
    ) -> dict[str, Array]:
        """Outputs by name for ``inputs`` by name, or in order; bf16 values are arrays of uint16 bits.

        ``threads`` (that of the compilation, if None) change the time only, never a bit.

        Raises:
            InputError: an input is absent, unknown, or of another shape or element type; nothing is converted.
            WrongMachineError: the processor lacks what the target needs.
            EmulatorMissingError: the target is of another machine, and its emulator is not here.
            RunFailedError: the program ended with an error, or an index lies outside its table.
        """
        count = self.manifest["threads"] if threads is None else threads
        if count < 1:
            raise ValueError(f"threads={count}; give at least 1")
        arrays = checked_inputs(self.inputs, inputs)
        outputs = {v.name: np.empty(v.type.shape, NUMPY_DTYPES[v.type.dtype]) for v in self.outputs}
        if LIBRARY in self.manifest["files"]:  # whatever else lies there was not made by compile
            with self._alone():
                self._run_here(arrays, outputs, count)
        else:
            self._run_program(arrays, outputs, count)
        return outputs

    def open(self, threads: int | None = None) -> None:
        """Map the weights and pack them now, not in the first run; a model that runs as a program is not kept."""
        if LIBRARY in self.manifest["files"]:
            with self._alone():
                self._open(self.manifest["threads"] if threads is None else threads)

    @property
    def weights_io(self) -> ReadReport | None:
        """How the weights were read, with why if not as asked for; None while the model is not open."""
        return self._weights.io if self._weights is not None else None

    def save(self, folder: str | Path) -> Artifact:
        """Copy the artefact to a new or empty folder; it appears with its manifest last. Returns the copy, loaded.

        Raises:
            ArtifactError: the folder has files in it.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise ArtifactError(target, "is not empty; give another folder")
        for path in sorted(self.folder.iterdir()):
            if path.name != MANIFEST:
                shutil.copy2(path, target / path.name)
        shutil.copy2(self.folder / MANIFEST, target / MANIFEST)
        return load(target)

    def close(self) -> None:
        """Free the model's memory and end its threads. A run opens it again."""
        with self._alone():
            _close_models(self._opened)
            self._weights = None

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Artifact({self.manifest['graph']!r}, target={self.target.name!r}, folder={str(self.folder)!r})"
        )

    def _alone(self) -> threading.Lock:
        """What one thread of this process holds at a time; a fork may have copied it held."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _open(self, threads: int) -> _Opened:
        known = self._opened.get(threads)
        if known is not None and known.process == os.getpid():
            return known
        missing = missing_features(self.target)
        if missing:
            raise WrongMachineError(self.target.name, missing)
        if self._weights is None:
            self._weights = open_weights(self.folder / WEIGHTS, io_strategy=self._io_strategy)
        ffi = FFI()
        ffi.cdef(_CDEF)
        library = ffi.dlopen(str(self.folder / LIBRARY))
        handle = ffi.new("lf_model **")
        data = self._weights.data
        status = library.lf_model_open(handle, ffi.cast("uint8_t *", data.ctypes.data), data.nbytes, threads)
        if status != 0:
            raise HalError(f"{self.folder}: the model cannot be opened: {_STATUS.get(status, status)}")
        self._opened[threads] = _Opened(ffi, library, handle[0], self._weights, os.getpid())
        return self._opened[threads]

    def _run_here(self, arrays: list[Array], outputs: Mapping[str, Array], threads: int) -> None:
        opened = self._open(threads)
        ffi = opened.ffi
        ins = ffi.new("void *[]", [ffi.cast("void *", a.ctypes.data) for a in arrays])
        outs = ffi.new("void *[]", [ffi.cast("void *", a.ctypes.data) for a in outputs.values()])
        bad = ffi.new("int64_t[2]")
        status = opened.library.lf_model_run(opened.model, ffi.cast("void const *const *", ins), outs, bad)
        if status != 0:
            raise RunFailedError([str(self.folder / LIBRARY)], status, self._bad_index(bad[0], bad[1]))

    def _timed(
        self, arrays: list[Array], threads: int, files: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """One run looked at before its first step and after each: nanoseconds [steps + 1], and what a read of each of
        ``files`` of perf_event_open gave [steps + 1, files, 3]. For lf_hal.profiling; arrays are checked already.
        """
        marks = len(self.manifest["steps"]) + 1
        ns, counts = np.zeros(marks, np.int64), np.zeros((marks, len(files), 3), np.uint64)
        outputs = [np.empty(v.type.shape, NUMPY_DTYPES[v.type.dtype]) for v in self.outputs]
        with self._alone():
            opened = self._open(threads)
            ffi = opened.ffi
            if not hasattr(opened.library, "lf_model_profile"):
                raise HalError(f"{self.folder} was compiled before profiles were known; compile it again")
            ins = ffi.new("void *[]", [ffi.cast("void *", a.ctypes.data) for a in arrays])
            outs = ffi.new("void *[]", [ffi.cast("void *", a.ctypes.data) for a in outputs])
            bad, handles = ffi.new("int64_t[2]"), ffi.new("int32_t[]", list(files))
            places = (ffi.cast("int64_t *", ns.ctypes.data), handles, len(files))
            status = opened.library.lf_model_profile(
                *(opened.model, ffi.cast("void const *const *", ins), outs, bad, *places),
                ffi.cast("uint64_t *", counts.ctypes.data),
            )
        if status == _NO_COUNTER:
            raise HalError(f"{self.folder}: a hardware counter that was opened cannot be read")
        if status != 0:
            raise RunFailedError([str(self.folder / LIBRARY)], status, self._bad_index(bad[0], bad[1]))
        return ns, counts

    def _bad_index(self, step: int, index: int) -> str:
        label = self.manifest["steps"][step] if 0 <= step < len(self.manifest["steps"]) else f"step {step}"
        return f"in {label}, index number {index} lies outside its table"

    def _run_program(self, arrays: list[Array], outputs: Mapping[str, Array], threads: int) -> None:
        command = [*([] if not missing_features(self.target) else emulator_command(self.target))]
        open_weights(self.folder / WEIGHTS)
        with tempfile.TemporaryDirectory(prefix="lf-hal-") as scratch:
            ins = [Path(scratch) / f"in{i}" for i in range(len(arrays))]
            outs = [Path(scratch) / f"out{i}" for i in range(len(outputs))]
            for path, array in zip(ins, arrays, strict=True):
                array.tofile(path)
            command += [str(self.folder / PROGRAM), "-t", str(threads), str(self.folder / WEIGHTS)]
            command += [*map(str, ins), *map(str, outs)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RunFailedError(command, done.returncode, done.stderr)
            for path, array in zip(outs, outputs.values(), strict=True):
                array[...] = np.fromfile(path, array.dtype).reshape(array.shape)


def checked_inputs(values: Sequence[Value], inputs: Mapping[str, Array] | Sequence[Array]) -> list[Array]:
    """Contiguous arrays for ``values``, from ``inputs`` by name or in order. InputError: nothing is converted."""
    names = [v.name for v in values]
    if not isinstance(inputs, Mapping):
        if len(inputs) != len(names):
            raise InputError("*", f"{len(names)} arrays ({', '.join(names)})", f"{len(inputs)}")
        inputs = dict(zip(names, inputs, strict=True))
    for name in inputs:
        if name not in names:
            raise InputError(name, f"one of {', '.join(names)}", "another name")
    found = []
    for value in values:
        if value.name not in inputs:
            raise InputError(value.name, str(value.type), "nothing")
        array = np.asarray(inputs[value.name])
        if array.dtype != np.dtype(NUMPY_DTYPES[value.type.dtype]) or array.shape != value.type.shape:
            raise InputError(value.name, str(value.type), f"{array.dtype} of shape {list(array.shape)}")
        found.append(np.ascontiguousarray(array).reshape(array.shape))  # which makes scalars vectors
    return found


def _value(row: Mapping[str, Any]) -> Value:
    return Value(row["name"], TensorType(row["dtype"], tuple(row["shape"])))


def load(folder: str | Path, *, io_strategy: str = "mmap") -> Artifact:
    """The artefact in ``folder``, its manifest and all its files checked against their hashes.

    ``io_strategy`` says how a library's weights are read when it is opened: ``mmap``, or ``direct``, past the page
    cache; where the system refuses that they are read through it, and :attr:`Artifact.weights_io` says why.

    Hashes find accidents. They do not say who made an artefact, and running one runs its code: load what you trust.
    The weights are checked when they are mapped, in the first run or :meth:`Artifact.open`.

    Raises:
        ArtifactError: a file is absent, cut or changed, or of a format that this version does not know.
        UnknownTargetError: it was compiled for a target that this version does not know.
        HalError: direct reads are asked for, and it is a program, which maps its weights itself.
        ValueError: there is no such ``io_strategy``.
    """
    check_strategy(io_strategy)
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(path, "is not there") from None
    except ValueError as error:
        raise ArtifactError(path, f"is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise ArtifactError(path, "is of another format", expected=FORMAT, found=str(found))
    if manifest.get("sha256") != _seal(manifest):
        raise ArtifactError(path, "was changed", expected=str(manifest.get("sha256")), found=_seal(manifest))
    try:
        artifact = Artifact(path.parent, manifest, io_strategy=io_strategy)
        hashes = {str(name): str(digest) for name, digest in manifest["files"].items()}
        head, steps, threads = manifest["weights_head"], manifest["steps"], manifest["threads"]
        sound = type(threads) is int and threads > 0 and type(steps) is list
        sound = sound and all(isinstance(step, str) for step in steps)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(path, f"is incomplete: {error!r}") from None
    if not sound or not hashes.keys() & {LIBRARY, PROGRAM} or not hashes.keys() <= {LIBRARY, PROGRAM, SOURCE}:
        raise ArtifactError(path, "describes no artefact of this version")
    if io_strategy == "direct" and LIBRARY not in hashes:
        raise HalError(
            f"{path.parent} is a program, which maps its weights itself; load it without io_strategy"
        )
    for name, expected in hashes.items():
        file = path.parent / name
        if not file.is_file():
            raise ArtifactError(file, "is not there")
        found = _sha256(file)
        if found != expected:
            raise ArtifactError(file, "was changed", expected=expected, found=found)
    found = head_digest(path.parent / WEIGHTS)
    if found != head:
        where = path.parent / WEIGHTS
        raise ArtifactError(where, "was changed or exchanged", offset=0, expected=str(head), found=found)
    return artifact
