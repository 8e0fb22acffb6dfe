"""The package's numpy functions, by which passes fold tables, against the order's twin: the same bits."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import order_v1 as order
import pytest

from lf_hal.lir import functions

NAMES = {"gelu": "gelu_erf", "max": "maximum", "min": "minimum"}


@pytest.mark.parametrize("fn", list(functions.UNARY))
def test_unary_functions_have_the_bits_of_the_order(fn: str) -> None:
    x = cases.sweep()
    with np.errstate(all="ignore"):
        found, expected = functions.UNARY[fn](x), order.UNARY[NAMES.get(fn, fn)](x)
    assert (order.canonical(found) == order.canonical(expected)).all()


@pytest.mark.parametrize("fn", list(functions.BINARY))
def test_binary_functions_have_the_bits_of_the_order(fn: str) -> None:
    a, b = cases.values("special", 300, 7, seed=70), cases.values("special", 300, 1, seed=71)
    b[:12, 0] = [0, 1, 2, 3, -1, 0.5, -0.5, 4, -2, 2.5, 1e9, -0.0]
    with np.errstate(all="ignore"):
        found = functions.BINARY[fn](a, b)
        expected = order.BINARY[NAMES.get(fn, fn)](a, np.broadcast_to(b, a.shape))
    assert (order.canonical(found) == order.canonical(expected)).all()


def test_fma_has_the_bits_of_the_order() -> None:
    for kind in cases.KINDS:
        a, b, c = (cases.values(kind, 5000, seed=s) for s in (72, 73, 74))
        with np.errstate(all="ignore"):
            c[::3] = -(a * b)[::3]  # what is left is the rounding of the product
            found = functions.fma(a, b, c)
            assert (order.canonical(found) == order.canonical(order.fma(a, b, c))).all()
