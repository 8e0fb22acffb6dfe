"""The intermediate form between a torch module and a target: see graph.py for its data, ops.py for its ops."""

from lf_hal.lir.graph import DTYPES, Constant, Graph, Op, Recipe, TensorType, Value
from lf_hal.lir.ops import OPS, infer, make_op

__all__ = ["DTYPES", "OPS", "Constant", "Graph", "Op", "Recipe", "TensorType", "Value", "infer", "make_op"]
