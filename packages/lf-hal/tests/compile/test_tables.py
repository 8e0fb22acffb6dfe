"""Tables that are folded when a model is compiled have the bits that the kernels give when it runs."""

from __future__ import annotations

from op_maker import Maker

import lf_hal
from lf_hal.passes import PassOptions, optimize


def test_folded_and_unfolded_have_the_same_bits() -> None:
    m = Maker()
    place = m("reshape", m("iota", dtype="f32", length=50, start=-3.7, step=0.61), shape=(50, 1))
    rate = m("binary", m("iota", dtype="f32", length=9), fn="mul", scalar=-0.4)
    angle = m("binary", place, m("unary", rate, fn="exp"), fn="mul")
    fns = ("sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "erf", "exp", "relu", "abs")
    outputs = [m("unary", angle, fn=fn) for fn in fns]
    positive = m("binary", m("unary", angle, fn="abs"), fn="add", scalar=0.1)
    outputs += [m("unary", positive, fn=fn) for fn in ("sqrt", "rsqrt", "log")]
    outputs += [m("binary", positive, fn="pow", scalar=p) for p in (2, -0.5, 1.7)]
    outputs += [m("multiply_add", angle, rate, place), m("binary", angle, positive, fn="div")]
    graph = m.graph(tuple(outputs))
    assert not optimize(graph).ops
    found = []
    for options in (PassOptions(), PassOptions(fold_constants=False)):
        with lf_hal.compile(graph, {}, passes=options) as made:
            found.append({name: y.tobytes() for name, y in made.run([]).items()})
    assert found[0] == found[1]
