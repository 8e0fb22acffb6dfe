"""``compile``: a graph and its weights become an artefact for one target."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_hal.artifact import FORMAT, LIBRARY, PROGRAM, SOURCE, WEIGHTS, Artifact, load, write_manifest
from lf_hal.build import CSRC, Compiler, build_objects, find_compiler, link, run_compiler
from lf_hal.codegen.emit import emit
from lf_hal.codegen.lower import Program, lower
from lf_hal.errors import ArtifactError, HalError, WeightsError
from lf_hal.lir import verify
from lf_hal.lir.graph import Graph, Value
from lf_hal.lir.recipes import apply_recipes
from lf_hal.passes import PassOptions, optimize, store_weights, tile_products
from lf_hal.sources import as_array, read_weights
from lf_hal.storage import storage_report
from lf_hal.targets import Target, check_switches, resolve_target
from lf_hal.weights import NUMPY_DTYPES, open_weights, write_weights

__all__ = ["compile", "stored_values"]

_RUNTIME = Path(__file__).parent / "codegen" / "c"

Array = npt.NDArray[Any]


def compile(
    graph: Graph,
    weights: Mapping[str, Any] | str | Path,
    target: str = "native",
    threads: int = 1,
    *,
    switches: Iterable[str] = (),
    passes: PassOptions | None = None,
    weights_dtype: str = "f32",
    sram_bytes: int | None = None,
    compiler: str = "auto",
    folder: str | Path | None = None,
) -> Artifact:
    """Compile ``graph`` for ``target``.

    Args:
        weights: name -> array, torch tensor or buffer for every weight of the graph, or a .safetensors or .lfckpt
            file of them. No element type is converted.
        target: a name of :data:`lf_hal.TARGETS`, ``native``, or ``loongarch64``, see
            :func:`lf_hal.resolve_target`. Results are the same bits on all of them.
        threads: how many a run uses if it does not say; they share out outputs, so they change no bit.
        switches: names of :data:`lf_hal.targets.SWITCHES`.
        passes: which rewrites of the graph run; those that ``switches`` say, if None. They change roundings.
        weights_dtype: how weights of linear layers, convolutions and embeddings are stored: ``f32`` (as they are),
            ``bf16``, ``f16`` or ``i8`` (one scale for each output channel). Sums stay float32; the error that this
            makes is in the manifest under ``storage``.
        sram_bytes: cut products along their outputs until the weights of each piece fit so many bytes, such as
            ``device_spec("mlu290").sram_bytes``; no bit changes. Contract-only but for its arithmetic.
        compiler: ``gcc`` or ``zig``; ``auto`` takes gcc for this machine's architecture and zig for all others.
        folder: where the artefact goes, new or empty; without it, it lives as long as the returned object.

    Returns:
        An artefact: a shared library for this machine's architecture, else a static program.

    Raises:
        UnknownTargetError, UnknownSwitchError, WrongTargetError: before anything is compiled.
        InvalidGraphError: the graph does not hold together.
        WeightsError: a weight is absent, of another type than the graph says, or not finite as it would be stored.
        UnsupportedOpError: an op has no C form.
        TileError: the weights of one output alone are larger than ``sram_bytes``.
        CompilerMissingError, CompilerFailedError: as :func:`lf_hal.build.find_compiler` and its runs.
    """
    chosen = resolve_target(target, switches := list(switches))
    names = check_switches(chosen, switches)
    if threads < 1:
        raise ValueError(f"threads={threads}; give at least 1")
    tool = find_compiler(chosen, compiler)
    verify(graph)
    options = passes or PassOptions.from_switches(names)
    graph = store_weights(_optimised(graph, options), weights_dtype)
    if sram_bytes is not None:
        graph = tile_products(graph, sram_bytes)
    mapping = read_weights(Path(weights)) if isinstance(weights, (str, Path)) else weights
    owner = tempfile.TemporaryDirectory(prefix="lf-hal-") if folder is None else None
    out = Path(folder) if folder is not None else Path(owner.name if owner else "")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ArtifactError(out, "is not empty; give another folder")

    values = _values(graph, mapping)
    storage = storage_report(graph, values, weights_dtype)
    write_weights(out / WEIGHTS, _stored(graph, values))
    file = open_weights(out / WEIGHTS, verify=False)
    program = lower(
        graph, {b.name: b.offset for b in file.blobs}, file.data.nbytes, padding=options.cache_line_padding
    )
    (out / SOURCE).write_text(emit(program))
    _build(tool, chosen, out)
    manifest = {**_manifest(program, chosen, tool, threads, names), "storage": storage}
    manifest["passes"] = {**asdict(options), "sram_bytes": sram_bytes}
    write_manifest(out, manifest)
    return Artifact(out, load(out).manifest, owner=owner)


def _optimised(graph: Graph, options: PassOptions) -> Graph:
    return optimize(replace(graph, outputs=tuple(dict.fromkeys(graph.outputs))), options)


def _values(graph: Graph, given: Mapping[str, Any]) -> dict[str, Array]:
    """Weights and derived weights by name."""
    found: dict[str, Array] = {}
    for value in graph.weights:
        if value.name not in given:
            raise WeightsError(value.name, str(value.type), "nothing of this name")
        found[value.name] = as_array(value, given[value.name])
    return dict(apply_recipes(graph, found)) if graph.recipes else found


def _stored(graph: Graph, found: Mapping[str, Array]) -> dict[str, tuple[str, Array]]:
    """What the file holds: weights, derived weights and constants that an op or output reads."""
    known = dict(found)
    for constant in graph.constants:
        shape, dtype = constant.value.type.shape, NUMPY_DTYPES[constant.value.type.dtype]
        known[constant.value.name] = np.array(constant.data).astype(dtype).reshape(shape)
    used = {*(i for o in graph.ops for i in o.inputs), *graph.outputs}
    values = (*graph.weights, *(r.output for r in graph.recipes), *(c.value for c in graph.constants))
    return {v.name: (v.type.dtype, known[v.name]) for v in values if v.name in used}


def stored_values(graph: Graph, given: Mapping[str, Any]) -> dict[str, Array]:
    """Weights, derived weights and constants that an op or output of ``graph`` reads, by name; WeightsError."""
    return {name: array for name, (_, array) in _stored(graph, _values(graph, given)).items()}


def _build(tool: Compiler, target: Target, folder: Path) -> None:
    """The library or the program of ``graph.c``; kernels come from the cache."""
    sources = [*sorted(CSRC.glob("*.c")), _RUNTIME / "lf_runtime.c"]
    shared = tool.kind == "gcc"
    if not shared:
        sources.append(_RUNTIME / "lf_main.c")
    include = [CSRC, _RUNTIME]
    objects = build_objects(tool, target, sources, include)
    with tempfile.TemporaryDirectory(prefix="lf-hal-") as scratch:
        made = Path(scratch) / "graph.o"
        words = [*tool.command, *tool.flags(target), *(f"-I{path}" for path in include)]
        run_compiler([*words, "-c", str(folder / SOURCE), "-o", str(made)])
        out = folder / (LIBRARY if shared else PROGRAM)
        link(tool, target, [*objects, made], out, shared=shared)


def _rows(values: Iterable[Value]) -> list[dict[str, Any]]:
    return [{"name": v.name, "dtype": v.type.dtype, "shape": list(v.type.shape)} for v in values]


@cache
def order_version() -> int:
    """The version of ORDER.md that the kernels keep, as their header says."""
    found = re.search(r"#define LF_ORDER_VERSION (\d+)", (CSRC / "lf_kernels.h").read_text())
    if found is None:
        raise HalError(f"{CSRC / 'lf_kernels.h'} names no LF_ORDER_VERSION; install lf-hal again")
    return int(found.group(1))


def _manifest(
    program: Program, target: Target, tool: Compiler, threads: int, switches: frozenset[str]
) -> dict[str, Any]:
    from lf_hal import __version__

    graph, types = program.graph, program.graph.types()
    return {
        "format": FORMAT,
        "lf_hal": __version__,
        "order": order_version(),
        "graph": graph.name,
        "target": target.name,
        "evidence": str(target.evidence),
        "compiler": {"kind": tool.kind, "version": tool.version, "flags": list(tool.flags(target))},
        "switches": sorted(switches),
        "threads": threads,
        "inputs": _rows(graph.inputs),
        "outputs": _rows(Value(n, types[n]) for n in graph.outputs),
        "steps": [s.label for s in program.steps],
        "work": [[s.flops, s.nbytes] for s in program.steps],
        "arena_bytes": program.arena.nbytes,
        "packed_bytes": program.packed_bytes,
        "weight_bytes": program.weight_bytes,
    }
