"""Products cut along their outputs, so that the weights of each piece fit an on-chip memory.

    linear(x, w[N,K], b[N]) = concat(linear(x, w[n0:n1], b[n0:n1]), ...)     conv2d likewise, by output channels

Every output keeps all its terms in their order, so no bit changes. A pass for devices whose kernels hold weights in a
memory of their own (``DeviceSpec.sram_bytes``); on CPUs it only proves the arithmetic, and costs a copy.
"""

from __future__ import annotations

from lf_hal.lir.errors import LirError
from lf_hal.lir.graph import Graph, Op, TensorType, Value
from lf_hal.lir.ops import make_op
from lf_hal.lir.rewrite import Editor

__all__ = ["TileError", "tile_products", "weight_bytes"]

_LINEAR = ("linear", "linear_act", "linear_i8")
_CONV = ("conv2d", "conv_affine_act", "conv_add_act", "conv_i8")
GRAIN = 16
"""Outputs of a piece are a multiple of a packed panel's columns where that fits."""


class TileError(LirError):
    """One output's weights alone do not fit. Attributes ``value``, ``needed`` and ``sram_bytes``, in bytes."""

    def __init__(self, value: str, needed: int, sram_bytes: int) -> None:
        self.value, self.needed, self.sram_bytes = value, needed, sram_bytes
        super().__init__(
            f"%{value}: the weights of one output are {needed} bytes, and {sram_bytes} are there; "
            "cutting its sum would change bits: give more, or leave this op to another device"
        )


def weight_bytes(op: Op, types: dict[str, TensorType]) -> int:
    """Bytes of the weights and vectors that a product holds: all its inputs but images, rows and residuals."""
    return sum(types[n].nbytes for i, n in enumerate(op.inputs) if _held(op, i))


def tile_products(graph: Graph, sram_bytes: int) -> Graph:
    """``graph`` with every product whose weights are larger than ``sram_bytes`` cut along its outputs.

    Convolutions with groups stay whole, as their groups are pieces already.

    Raises:
        TileError: the weights of one output alone are larger.
        ValueError: ``sram_bytes`` is not positive.
    """
    if sram_bytes <= 0:
        raise ValueError(f"sram_bytes={sram_bytes}; give at least 1")
    e, types = Editor(graph), graph.types()
    for op in e.graph.ops:
        if op.kind not in _LINEAR + _CONV or (op.kind in _CONV and op.get_int("groups") != 1):
            continue
        total, outputs = weight_bytes(op, types), types[op.inputs[1]].shape[0]
        if total <= sram_bytes:
            continue
        each = total // outputs
        most = sram_bytes // each
        if most == 0:
            raise TileError(op.output.name, each, sram_bytes)
        e.replace(op, *_pieces(e, op, outputs, most // GRAIN * GRAIN or most))
    return e.done()


def _held(op: Op, i: int) -> bool:
    return i > 0 and not (op.kind == "conv_add_act" and i == 2)


def _pieces(e: Editor, op: Op, outputs: int, width: int) -> list[Op]:
    made: list[Op] = []
    parts: list[Value] = []
    for begin in range(0, outputs, width):
        end = min(begin + width, outputs)
        inputs = [e.values[op.inputs[0]]]
        for i, name in enumerate(op.inputs[1:], 1):
            attrs = {"axis": 0 if _held(op, i) else 1, "start": begin, "end": end}
            label = e.fresh(f"{op.output.name}.{i}.{begin}")
            made.append(make_op("slice", label, [e.values[name]], attrs, op.hardware_affinity))
            inputs.append(made[-1].output)
        label = e.fresh(f"{op.output.name}.{begin}")
        made.append(make_op(op.kind, label, inputs, dict(op.attrs), op.hardware_affinity))
        parts.append(made[-1].output)
    axis = 1 if op.kind in _CONV else len(op.output.type.shape) - 1
    joined = make_op("concat", op.output.name, parts, {"axis": axis}, op.hardware_affinity)
    return [*made, joined]
