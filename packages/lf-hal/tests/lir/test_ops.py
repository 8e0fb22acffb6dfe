"""Shape and type rules of the op kinds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lf_hal.lir import OPS, Graph, Op, TensorType, Value, infer, make_op
from lf_hal.lir.errors import OpRuleError

Case = tuple[str, list[str], dict[str, object], str]


def tensor(text: str) -> TensorType:
    dtype, _, rest = text.partition("[")
    return TensorType(dtype, tuple(int(n) for n in rest[:-1].split(",") if n))


def values(texts: list[str]) -> list[Value]:
    return [Value(f"v{i}", tensor(t)) for i, t in enumerate(texts)]


ALLOWED: list[Case] = [
    ("embedding", ["f32[10,4]", "i64[2,3]"], {}, "f32[2,3,4]"),
    ("embedding", ["bf16[10]", "i32[]"], {}, "bf16[]"),
    ("linear", ["f32[2,3]", "f32[5,3]", "f32[5]"], {}, "f32[2,5]"),
    ("linear", ["f32[3]", "bf16[5,3]"], {}, "f32[5]"),
    ("linear_i8", ["f32[2,3]", "i8[5,3]", "f32[5]", "f32[5]"], {}, "f32[2,5]"),
    ("conv_add_act", ["f32[1,2,5,5]", "f32[4,2,3,3]", "f32[1,4,3,3]", "f32[4]"], {}, "f32[1,4,3,3]"),
    ("conv_i8", ["f32[2,6,8,8]", "i8[4,6,3,3]", "f32[4]"], {}, "f32[2,4,6,6]"),
    ("matmul", ["f32[4,1,2,3]", "f32[6,3,5]"], {}, "f32[4,6,2,5]"),
    ("attention", ["f32[2,4,3,8]", "f32[2,2,5,8]", "f32[2,2,5,6]"], {"scale": 0.5}, "f32[2,4,3,6]"),
    ("attention", ["f32[2,4,3,8]"] * 3 + ["bool[2,1,1,3]"], {"scale": 0.5}, "f32[2,4,3,8]"),
    ("softmax", ["f32[2,3]"], {}, "f32[2,3]"),
    ("layer_norm", ["f32[2,3]", "f32[3]", "f32[3]"], {"eps": 1e-5}, "f32[2,3]"),
    ("conv2d", ["f32[1,4,9,9]", "f32[6,2,3,3]"], {"stride": (2, 1), "groups": 2}, "f32[1,6,4,7]"),
    (
        "conv_affine_act",
        ["f32[1,2,4,4]", "f32[6,2,1,1]", "f32[6]", "f32[6]"],
        {"act": "relu"},
        "f32[1,6,4,4]",
    ),
    ("pool2d", ["f32[1,2,7,7]"], {"fn": "max", "kernel": (3, 3), "stride": (2, 2)}, "f32[1,2,3,3]"),
    ("reduce", ["f32[2,3,4]"], {"fn": "mean", "axes": (0, 2), "keepdim": True}, "f32[1,3,1]"),
    ("reduce", ["bool[2,3]"], {"fn": "any", "axes": (1,)}, "bool[2]"),
    ("binary", ["f32[2,1]", "f32[3]"], {"fn": "add"}, "f32[2,3]"),
    ("binary", ["i64[2]"], {"fn": "mul", "scalar": 3}, "i64[2]"),
    ("compare", ["i64[2]"], {"fn": "lt", "scalar": 3}, "bool[2]"),
    ("where", ["bool[2,1]", "f32[]", "f32[3]"], {}, "f32[2,3]"),
    ("rope", ["f32[2,4,3,8]", "f32[3,4]", "f32[3,4]"], {}, "f32[2,4,3,8]"),
    ("concat", ["f32[2,1]", "f32[2,4]"], {"axis": 1}, "f32[2,5]"),
    ("slice", ["f32[2,9]"], {"axis": 1, "start": 1, "end": 8, "step": 3}, "f32[2,3]"),
    ("reshape", ["f32[2,6]"], {"shape": (3, 4)}, "f32[3,4]"),
    ("permute", ["f32[2,6,1]"], {"perm": (2, 0, 1)}, "f32[1,2,6]"),
    ("broadcast", ["f32[2,1]"], {"shape": (5, 2, 3)}, "f32[5,2,3]"),
    ("iota", [], {"dtype": "i64", "length": 4}, "i64[4]"),
    ("cast", ["i64[4]"], {"dtype": "f32"}, "f32[4]"),
    ("gather", ["f32[4,5]", "i64[2,7]"], {"axis": 1}, "f32[2,7]"),
    ("scatter", ["f32[4,5]", "i64[2,3]", "f32[2,3]"], {"axis": 1}, "f32[4,5]"),
    ("upsample", ["f32[1,2,3,4]"], {"fn": "nearest", "size": (6, 8)}, "f32[1,2,6,8]"),
    ("lstm_cell", ["f32[2,3]", "f32[2,4]", "f32[2,4]", "f32[16,3]", "f32[16,4]"], {}, "f32[2,2,4]"),
]

REFUSED: list[Case] = [
    ("conv_add_act", ["f32[1,2,5,5]", "f32[4,2,3,3]", "f32[4,1,1]"], {}, "residual is f32[4,1,1]"),
    ("linear_i8", ["f32[2,3]", "i8[5,3]", "f32[3]"], {}, "weights' scale"),
    ("linear_i8", ["f32[2,3]", "f32[5,3]", "f32[5]"], {}, "must be i8"),
    ("embedding", ["f32[10,4]", "f32[2]"], {}, "the index is f32[2]"),
    ("linear", ["f32[2,3]", "f32[5,4]"], {}, "rows of x have 3"),
    ("linear", ["bf16[2,3]", "f32[5,3]"], {}, "cast one"),
    ("linear", ["f32[2,3]"], {}, "1 inputs; it takes 2 to 3"),
    ("matmul", ["f32[2,3]", "f32[4,5]"], {}, "inner sizes"),
    ("attention", ["f32[2,3,3,8]", "f32[2,2,5,8]", "f32[2,2,5,8]"], {"scale": 0.5}, "3 heads of q"),
    (
        "attention",
        ["f32[2,4,3,8]"] * 3 + ["bool[3]"],
        {"scale": 0.5, "causal": True},
        "both a mask and causal",
    ),
    ("conv2d", ["f32[1,4,2,2]", "f32[6,4,3,3]"], {}, "larger than the padded image"),
    ("conv2d", ["f32[1,4,2,2]", "f32[6,4,1,1]"], {"stride": (0, 1)}, "must be positive"),
    ("conv2d", ["f32[1,4,2,2]", "f32[6,4,1,1]"], {"groups": 0}, "0 groups"),
    ("reduce", ["f32[2,3]"], {"fn": "sum", "axes": (1, 0)}, "ascending"),
    ("reduce", ["f32[2,3]"], {"fn": "median", "axes": (1,)}, "must be 'sum' or 'mean'"),
    ("reduce", ["f32[2,0]"], {"fn": "max", "axes": (1,)}, "over no elements"),
    ("binary", ["f32[2]", "f32[3]"], {"fn": "add"}, "do not broadcast"),
    ("binary", ["f32[2]", "i64[2]"], {"fn": "add"}, "cast them to one"),
    ("binary", ["f32[2]"], {"fn": "add"}, "give two inputs, or one"),
    ("binary", ["i64[2]"], {"fn": "add", "scalar": 0.5}, "cast the tensor first"),
    ("rope", ["f32[3,7]", "f32[3,7]", "f32[3,7]"], {}, "even size"),
    ("slice", ["f32[2,9]"], {"axis": 1, "start": 3, "end": 10}, "not within"),
    ("slice", ["f32[2,9]"], {"axis": 2, "start": 0, "end": 1}, "not among the 2"),
    ("reshape", ["f32[2,6]"], {"shape": (-3, -4)}, "negative"),
    ("permute", ["f32[2,6]"], {"perm": (0, 0)}, "no permutation"),
    ("softmax", ["f32[2,6]"], {"axis": 1}, "no attribute 'axis'"),
    ("cast", ["f32[2]"], {"dtype": "f8"}, "must be 'f32'"),
    ("layer_norm", ["f32[2]"], {}, "attribute eps is missing"),
    ("attentoin", [], {}, "no such op kind"),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "expected"), ALLOWED)
def test_the_type_of_an_output(kind: str, inputs: list[str], attrs: dict[str, object], expected: str) -> None:
    assert str(make_op(kind, "out", values(inputs), attrs).output.type) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "reason"), REFUSED)
def test_what_a_rule_refuses(kind: str, inputs: list[str], attrs: dict[str, object], reason: str) -> None:
    with pytest.raises(OpRuleError) as e:
        make_op(kind, "out", values(inputs), attrs)  # type: ignore[arg-type]
    assert e.value.kind == kind
    assert reason in e.value.reason


def test_every_kind_has_a_case_or_is_told_here() -> None:
    told = {
        "linear_act",
        "rms_norm",
        "batch_norm",
        "affine_channel",
        "cumsum",
        "unary",
        "multiply_add",
        "fill",
    }
    told |= {"copy_to"}
    assert {kind for kind, *_ in ALLOWED} | told == set(OPS)


def test_infer_wants_every_attribute() -> None:
    with pytest.raises(OpRuleError, match="attribute stride is missing"):
        infer("conv2d", [tensor("f32[1,1,4,4]"), tensor("f32[1,1,1,1]")], {})


def test_an_op_gives_its_attributes_by_type() -> None:
    op = make_op("slice", "out", values(["f32[9]"]), {"axis": 0, "start": 1, "end": 2})
    assert (op.get_int("end"), op.get_float("end"), op.has("stop")) == (2, 2.0, False)
    with pytest.raises(TypeError, match=r"slice\.end is 2, no string"):
        op.get_str("end")
    with pytest.raises(KeyError):
        op.attr("stop")


def test_a_graph_is_hashable_and_goes_through_json() -> None:
    x = Value("x", tensor("f32[2]"))
    graph = Graph("g", (x,), ops=(make_op("unary", "y", [x], {"fn": "relu"}),), outputs=("y",))
    assert hash(graph) == hash(dataclasses.replace(graph))
    assert json.loads(json.dumps(dataclasses.asdict(graph)))["ops"][0]["kind"] == "unary"
    assert isinstance(graph.producers()["y"], Op)
    assert graph.uses() == {"x": 1, "y": 1}
