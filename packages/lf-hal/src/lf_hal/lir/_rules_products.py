"""Types of products that take more: a residual, or int8 weights with a scale for each output."""

from __future__ import annotations

from lf_hal.lir import _rules
from lf_hal.lir._rules import Given, Types
from lf_hal.lir.graph import TensorType


def linear_i8(types: Types, a: Given) -> TensorType:
    """linear with w of i8, then what a step of each of its rows is worth."""
    x, w, scale, *bias = types
    _rules.need(x.dtype == "f32", f"x is {x}; it must be f32")
    _rules.need(w.dtype == "i8", f"w is {w}; it must be i8")
    _rules.same_dtype((x, scale))
    _rules.ranked(w, 2, "w")
    _rules.shaped(scale, (w.shape[0],), "the weights' scale")
    return _rules.linear((x, TensorType("f32", w.shape), *bias), a)


def conv_i8(types: Types, a: Given) -> TensorType:
    """conv2d likewise; a bias, or scale and shift, come last."""
    x, w, scale, *vectors = types
    _rules.need(x.dtype == "f32", f"x is {x}; it must be f32")
    _rules.need(w.dtype == "i8", f"w is {w}; it must be i8")
    _rules.same_dtype((x, scale))
    _rules.ranked(w, 4, "w")
    _rules.shaped(scale, (w.shape[0],), "the weights' scale")
    return _rules.conv2d((x, TensorType("f32", w.shape), *vectors), a)


def conv_add(types: Types, a: Given) -> TensorType:
    x, w, residual, *vectors = types
    y = _rules.conv2d((x, w, *vectors), a)
    _rules.need(residual == y, f"the residual is {residual}; it must be {y}")
    return y
