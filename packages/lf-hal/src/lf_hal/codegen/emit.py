"""The text of a program: one C function for each step, tables of sizes, and the table of steps in order."""

from __future__ import annotations

import re

from lf_hal.codegen.lower import Program
from lf_hal.codegen.lowering import Step

__all__ = ["emit"]

_ADDRESS = re.compile("\x01([^\x02]*)\x02")

_HEAD = """/* Made by lf-hal from graph {name}; the same text for every target. */
#include "lf_kernels.h"
#include "lf_convert.h"
#include "lf_runtime.h"

const int64_t lf_graph_weight_bytes = {weights}, lf_graph_packed_bytes = {packed}, lf_graph_arena_bytes = {arena};
const int32_t lf_graph_inputs = {inputs}, lf_graph_outputs = {outputs};
const int64_t lf_graph_input_bytes[] = {{{input_bytes}}};
const int64_t lf_graph_output_bytes[] = {{{output_bytes}}};
"""


def emit(program: Program) -> str:
    """C of a program, for csrc/lf_kernels.h and codegen/c/lf_runtime.h."""
    graph, types = program.graph, program.graph.types()
    sizes = [str(v.type.nbytes) for v in graph.inputs]
    out_sizes = [str(types[n].nbytes) for n in graph.outputs]
    parts = [
        _HEAD.format(
            name=_comment(graph.name),
            weights=program.weight_bytes,
            packed=program.packed_bytes,
            arena=program.arena.nbytes,
            inputs=len(sizes),
            outputs=len(out_sizes),
            input_bytes=", ".join([*sizes, "0"]),
            output_bytes=", ".join([*out_sizes, "0"]),
        )
    ]
    for prefix, steps in (("pack", program.packing), ("step", program.steps)):
        parts += [_function(program, f"{prefix}_{i}", step) for i, step in enumerate(steps)]
    parts.append(_scratch(program))
    parts += [
        _table("lf_graph_packing", "pack", program.packing),
        _table("lf_graph_steps", "step", program.steps),
    ]
    return "\n".join(parts)


def _comment(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]|\*/|/\*|\\", "?", text)


def _function(program: Program, name: str, step: Step) -> str:
    body = _ADDRESS.sub(lambda m: program.placed[m.group(1)], step.text)
    head = f"static void {name}(lf_ctx *x, int64_t begin, int64_t end, uint8_t *scratch) {{"
    return f"/* {_comment(step.label)} */\n{head}\n(void)x, (void)scratch;\n{body}\n}}\n"


def _scratch(program: Program) -> str:
    needs = dict.fromkeys(s.scratch for s in program.steps if s.scratch)
    lines = [f"{{ {text}\nif (need > most) most = need; }}" for text in needs]
    head = "int64_t lf_graph_scratch_bytes(void) {\nint64_t most = 0, need = 0;\n(void)need;"
    return "\n".join([head, *lines, "return most;\n}\n"])


def _table(name: str, prefix: str, steps: tuple[Step, ...]) -> str:
    rows = [f"{{{prefix}_{i}, {s.total}, {s.grain}}}," for i, s in enumerate(steps)]
    return "\n".join([f"const lf_step {name}[] = {{", *rows, "{0, 0, 0}};\n"])
