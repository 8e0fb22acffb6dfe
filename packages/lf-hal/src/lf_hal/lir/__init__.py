"""The intermediate form between a torch module and a target: see graph.py for its data, ops.py for its ops."""

from lf_hal.lir.graph import DTYPES, Constant, Graph, Op, Recipe, TensorType, Value
from lf_hal.lir.ops import OPS, infer, make_op
from lf_hal.lir.recipes import RECIPES, apply_recipes
from lf_hal.lir.text import parse, to_text
from lf_hal.lir.verify import verify

__all__ = [
    "DTYPES",
    "OPS",
    "RECIPES",
    "Constant",
    "Graph",
    "Op",
    "Recipe",
    "TensorType",
    "Value",
    "apply_recipes",
    "infer",
    "make_op",
    "parse",
    "to_text",
    "verify",
]
