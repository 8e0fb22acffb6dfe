"""`lf-hal compile MODEL`: an exported torch program, or a graph as text, becomes an artefact for a target."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lf_hal.errors import ArtifactError, HalError
from lf_hal.lir.graph import Graph
from lf_hal.passes import WEIGHTS_DTYPES
from lf_hal.sources import read_weights
from lf_hal.targets import SWITCHES, TARGETS

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", type=Path, help="a .pt2 of torch.export.save, or a graph as .lir text")
    parser.add_argument(
        "--target", default="native", help=f"native, loongarch64 or one of {', '.join(TARGETS)}"
    )
    parser.add_argument("--out", type=Path, help="folder to make (default: MODEL.TARGET)")
    parser.add_argument(
        "--weights", type=Path, help=".safetensors or .lfckpt file; a .lir needs it, a .pt2 brings its own"
    )
    parser.add_argument("--prefix", default="", help="take the names in --weights that begin so, without it")
    parser.add_argument("--threads", type=int, default=1, help="of a run that does not say (default 1)")
    parser.add_argument(
        "--weights-dtype",
        choices=WEIGHTS_DTYPES,
        default="f32",
        help="how weights of products are stored (default f32); sums stay float32",
    )
    parser.add_argument(
        "--sram-bytes", type=int, help="cut products so that the weights of each piece fit so many bytes"
    )
    parser.add_argument("--compiler", choices=("auto", "gcc", "zig"), default="auto")
    for switch in SWITCHES.values():
        parser.add_argument(f"--{switch.name}", action="store_true", help=switch.meaning)


def run(args: argparse.Namespace) -> int:
    """Compile, and print what was made."""
    from lf_hal.compiler import compile
    from lf_hal.targets import check_switches, resolve_target

    switches = [name for name in SWITCHES if getattr(args, name.replace("-", "_"))]
    target = resolve_target(args.target, switches)
    check_switches(target, switches)  # before torch is imported for the model
    if args.threads < 1:
        raise HalError(f"--threads {args.threads}: give at least 1")
    if args.sram_bytes is not None and args.sram_bytes < 1:
        raise HalError(f"--sram-bytes {args.sram_bytes}: give at least 1")
    graph, weights = _read(args.model, args.weights, args.prefix)
    out = args.out or args.model.with_suffix(f".{target.name}")
    begin = time.perf_counter()
    made = compile(
        graph,
        weights,
        target.name,
        args.threads,
        switches=switches,
        weights_dtype=args.weights_dtype,
        sram_bytes=args.sram_bytes,
        compiler=args.compiler,
        folder=out,
    )
    about = made.manifest
    print(f"{out}: {graph.name} for {target.name} ({about['evidence']}), {time.perf_counter() - begin:.1f} s")
    print(f"  by {about['compiler']['version']}, {len(about['steps'])} steps, order {about['order']}")
    sizes = (about["weight_bytes"], about["packed_bytes"], about["arena_bytes"])
    print("  weights {:,} bytes, packed when opened {:,}, arena {:,}".format(*sizes))
    storage = about["storage"]
    if storage["worst"]:
        name, error = storage["worst"]
        print(
            f"  {storage['narrow']} weights stored as {storage['dtype']}, relative error "
            f"{storage['relative_error']:.2e}, at most {error:.2e} ({name})"
        )
    for label, values in (("input", made.inputs), ("output", made.outputs)):
        for value in values:
            print(f"  {label} {value.name}: {value.type}")
    return 0


def _read(model: Path, weights: Path | None, prefix: str) -> tuple[Graph, Mapping[str, Any]]:
    given = read_weights(weights, prefix) if weights is not None else None
    if not model.is_file():
        raise ArtifactError(model, "is not there")
    if model.suffix == ".lir":
        from lf_hal.lir.text import parse

        graph = parse(model.read_text())
        return graph, given or {}
    if model.suffix != ".pt2":
        raise HalError(f"{model} is no model: give a .pt2 of torch.export.save, or a graph as .lir text")
    try:
        import torch
    except ImportError as error:
        raise HalError(f"reading {model} needs torch ({error}): pip install 'lf-hal[torch]'") from error
    from lf_hal.lir.trace import trace_program, weights_of

    try:
        program = torch.export.load(model)
    except Exception as error:
        raise HalError(f"{model}: torch.export.load cannot read it: {error}") from error
    graph = trace_program(program, model.stem)
    if given is None:
        return graph, weights_of(program, graph)
    return graph, {**program.constants, **given}  # buffers that are not persistent are in no checkpoint
