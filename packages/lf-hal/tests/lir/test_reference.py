"""The plain twin against torch: whole models, and each operator that the tracer knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lir_graphs import sample, value
from torch import Tensor, nn
from traced import check

from lf_hal.lir import Graph, TensorType, Value, make_op, reference


class Do(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


SEEDED = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SEEDED)


X, Y = rand(2, 3, 8, 6), rand(3, 1, 6)
IDS, TRUTH = torch.tensor([[0, 2, -1], [1, 1, 0]]), torch.tensor([[True, False, True], [False, False, True]])
IMAGE = rand(2, 4, 9, 7)

CASES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "arithmetic": (lambda x, y: ((x + y) * 2 - y / 3, 1 - x, 2 / (y.abs() + 1), x - 2 * y), (X, Y)),
    "alpha": (lambda x, y: torch.add(torch.sub(x, y, alpha=2), y, alpha=3), (X, Y)),
    "powers": (
        lambda x: (x**2, x.abs() ** 0.5, x.abs() ** 1.5, 2.0**x, (x.abs() + 1) ** -0.5, x.square()),
        (X,),
    ),
    "power of tensors": (lambda x, y: x.abs() ** y, (X, Y)),
    "promotion": (lambda x, i: (x[0, 0, 0, :3] + i, i + 1, i / 2, i * 0.5, i.float()), (X, IDS)),
    "extremes": (
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.clamp(-0.5, 1), x.clamp(min=0)),
        (X, Y),
    ),
    "functions": (
        lambda x: (x.cos(), x.sin(), x.exp(), x.tanh(), x.sigmoid(), x.abs().sqrt(), -x, x.abs().rsqrt()),
        (X,),
    ),
    "activations": (
        lambda x: (
            F.relu(x),
            F.silu(x),
            F.gelu(x),
            F.gelu(x, approximate="tanh"),
            F.relu6(x),
            F.leaky_relu(x),
            F.hardswish(x),
        ),
        (X * 3,),
    ),
    "more functions": (lambda x: (x.abs().log(), x.erf(), x.log_softmax(-1), x.log_softmax(1)), (X,)),
    "activations of vision": (
        lambda x: (F.relu6(x), F.leaky_relu(x), F.hardswish(x), F.hardtanh(x), F.hardsigmoid(x), F.mish(x)),
        (X * 3,),
    ),
    "bent lines": (
        lambda x: (
            F.elu(x),
            F.elu(x, 0.5),
            F.softplus(x),
            F.softplus(x, 2, 5),
            F.glu(x),
            F.prelu(x, torch.ones(3) / 4),
        ),
        (X * 9,),
    ),
    "functions of integers": (lambda i: (i.abs(), i.exp(), -i, F.relu(i)), (IDS,)),
    "logic": (
        lambda t, i: (t & (i > 0), t | (i == 0), ~t, t.logical_and(i != 1), t.any(1), t.any()),
        (TRUTH, IDS),
    ),
    "comparisons": (lambda x, y: (x < y, x <= 0, x >= y, x == x, x != y), (X, Y)),
    "comparison of types": (lambda x, i: (x[0, 0, 0, :3] < i, i < 0.5, i == i.to(torch.int32)), (X, IDS)),
    "choice": (
        lambda t, x: (torch.where(t, x[0, 0, 0, :3], 0.0), torch.zeros(2, 3).masked_fill(t, -2.0)),
        (TRUTH, X),
    ),
    "sums": (
        lambda x: (x.sum(), x.sum((1, -1)), x.mean(0, keepdim=True), x.mean(), x.amax(2), x.max()),
        (X,),
    ),
    "sums of integers": (lambda i, t: (i.sum(), t.sum(1), i.cumsum(1), t.cumsum(0)), (IDS, TRUTH)),
    "softmax": (lambda x: (x.softmax(-1), x.softmax(1)), (X,)),
    "shapes": (
        lambda x: (
            x.flatten(1, 2),
            x.reshape(6, -1),
            x[:, None],
            x[:, :1].squeeze(1),
            x.unflatten(2, (2, 4)),
            x.mT,
        ),
        (X,),
    ),
    "moves": (lambda x: (x.permute(3, 0, 2, 1), x.movedim(-1, 1), x.transpose(0, -1), x[0, 0].T), (X,)),
    "cuts": (
        lambda x: (
            *x.chunk(3, 2),
            *x.split(5, 2),
            *x.split([1, 2], 1),
            *x[0].unbind(0),
            x[..., 1:-1:2],
            x[:, -1],
        ),
        (X,),
    ),
    "joins": (
        lambda x, i: (torch.cat((x, x * 2), -1), torch.stack((x, x), 1), torch.cat((x[0, 0, :3, 0], i[0]))),
        (X, IDS),
    ),
    "stretches": (
        lambda y: (
            y.expand(2, 3, 5, 6),
            y.repeat(2, 1, 3, 1),
            y.repeat_interleave(2, 0),
            y.expand_as(torch.ones(3, 2, 6)),
        ),
        (Y,),
    ),
    "padding": (
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 2, 0), value=1.5), F.pad(x, (-1, 1, 0, -2))),
        (X,),
    ),
    "made": (
        lambda x: (
            torch.zeros(2) + x[0, 0, 0, :2],
            torch.full((2,), 3),
            torch.arange(1, 9, 3),
            torch.arange(0, 1, 0.25),
            x.new_ones(2),
        ),
        (X,),
    ),
    "rows": (lambda x, i: (x[0, 0][i], x[0, 0, :, 0][i], F.embedding(i.abs(), x[0, 0])), (X, IDS)),
    "picked": (
        lambda x, i: (x[i[:, :2].clamp(0, 1), i[:, 1:]], x[:, i], x[:, :, i[0], i[1]], x[:, 0, 1:4][..., i]),
        (X, IDS),
    ),
    "differences": (
        lambda x, i, t: (x.diff(), i.diff(dim=0), t.diff(), i[0].diff(prepend=i[1])),
        (X, IDS, TRUTH),
    ),
    "pixels": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x[..., :8, :6], 2)), (IMAGE,)),
    "gathered": (lambda x, i: x[0, 0, :2].gather(1, i.abs()), (X, IDS)),
    "scattered": (
        lambda x, i: torch.zeros(2, 8).scatter(1, torch.tensor([[0, 3, 7], [1, 2, 5]]), x[0, 0, :2, :4]),
        (X, IDS),
    ),
    "triangles": (lambda x: (x.tril(), x.triu(1), x.tril(-1)), (X,)),
    "constants": (lambda x: x * torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, 2.0]), (X,)),
    "products": (
        lambda x, y: (x @ y.mT, x[0, 0] @ y[0, 0], y[0, 0] @ y[1, 0], torch.outer(y[0, 0], y[1, 0])),
        (X, Y),
    ),
    "sums with products": (
        lambda x, y: (
            torch.addmm(y[0], x[0, 0], torch.ones(6, 6)),
            torch.baddbmm(y, x[0], x[1].mT[:, :, :6]),
        ),
        (X, Y),
    ),
    "norms": (
        lambda x, y: (
            F.layer_norm(x, (6,)),
            F.layer_norm(x, (8, 6)),
            F.rms_norm(x, (6,), y[0, 0]),
            F.rms_norm(x, (8, 6)),
        ),
        (X, Y),
    ),
    "norm with a bias alone": (lambda x, y: F.layer_norm(x, (6,), bias=y[0, 0]), (X, Y)),
    "batch norm without parameters": (
        lambda x: F.batch_norm(x, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 0.5])),
        (X,),
    ),
    "convolutions": (
        lambda x: (
            F.conv2d(x, torch.arange(72).reshape(2, 4, 3, 3) / 50, stride=(2, 1), padding=1),
            F.conv2d(x, torch.arange(36).reshape(4, 1, 3, 3) / 50, torch.ones(4), groups=4, dilation=2),
            F.conv2d(x, torch.arange(36).reshape(1, 4, 3, 3) / 50, padding="same"),
            F.conv2d(x[0], torch.arange(36).reshape(1, 4, 3, 3) / 50, padding="valid"),
        ),
        (IMAGE,),
    ),
    "pools": (
        lambda x: (
            F.max_pool2d(x, 3, 2, 1),
            F.max_pool2d(x[0], (2, 1)),
            F.avg_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_avg_pool2d(x[..., :6], 3),
        ),
        (IMAGE,),
    ),
    "upsampling": (
        lambda x: (
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(5, 11)),
            F.interpolate(x, size=(5, 11), mode="bilinear"),
            F.interpolate(x, scale_factor=3, mode="bilinear", align_corners=True),
            F.interpolate(x, size=(12, 7), mode="bilinear", antialias=True),
        ),
        (IMAGE,),
    ),
    "attention": (
        lambda q, k: (
            F.scaled_dot_product_attention(q, k, k),
            F.scaled_dot_product_attention(q, k, k, scale=0.3),
            F.scaled_dot_product_attention(q, q, q, is_causal=True),
            F.scaled_dot_product_attention(q, k, k, attn_mask=torch.ones(5, 7).tril(2).bool()),
            F.scaled_dot_product_attention(q, k, k, attn_mask=torch.arange(7.0).expand(1, 1, 5, 7)),
            F.scaled_dot_product_attention(q, k[:, :2], k[:, :2], enable_gqa=True),
            F.scaled_dot_product_attention(q[0], k[0], k[0]),
        ),
        (rand(2, 4, 5, 8), rand(2, 4, 7, 8)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_are_torchs(name: str) -> None:
    function, inputs = CASES[name]
    check(Do(function), inputs, bound=1e-5)


MODULES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (rand(2, 5, 16),)),
    "attention with weights": (lambda: nn.MultiheadAttention(16, 2, batch_first=True), (rand(2, 5, 16),) * 3),
    "gru": (lambda: nn.GRU(6, 4, 2, bidirectional=True, batch_first=True), (rand(2, 5, 6),)),
    "gru cell": (lambda: nn.GRUCell(6, 4, bias=False), (rand(2, 6), rand(2, 4))),
    "lstm": (lambda: nn.LSTM(6, 4, bias=False), (rand(5, 2, 6),)),
    "convolution of rows": (lambda: nn.Conv1d(4, 6, 3, 2, 1, groups=2), (rand(2, 4, 9),)),
    "convolution of one row": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (rand(4, 9),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (IMAGE,)),
    "instance norm": (lambda: nn.InstanceNorm2d(4), (IMAGE,)),
    "batch norm of rows": (lambda: nn.BatchNorm1d(4), (rand(2, 4, 9),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_layers_are_torchs(name: str) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    check(make().eval(), inputs, bound=1e-5)


HUGGING_FACE = ("Qwen3", "GPT2", "Bert")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_transformers_are_within_the_bound(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "Qwen3":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = getattr(
        transformers, {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}.get(name, f"{name}ForCausalLM")
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(config)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.model(ids)[0]
            return out

    graph = check(Logits().eval(), (torch.arange(8)[None],))
    found = [op.kind for op in graph.ops]
    assert found.count("attention") == 2
    if name == "Qwen3":
        assert (found.count("rope"), found.count("rms_norm")) == (4, 9)


def test_one_step_of_decoding_with_caches_is_torchs() -> None:
    """Caches of a fixed length as inputs and outputs, a position that is data."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor, at: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, new_k, new_v = self.qkv(x).view(1, 1, 3, 2, 8).permute(2, 0, 3, 1, 4)
            places = torch.arange(k.shape[2])
            here = (places == at)[None, None, :, None]
            k, v = torch.where(here, new_k, k), torch.where(here, new_v, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(places <= at)[None, None, None])
            return self.out(y.transpose(1, 2).reshape(1, 1, 16)), k, v

    torch.manual_seed(0)
    graph = check(Step().eval(), (rand(1, 1, 16), torch.tensor([3]), rand(1, 2, 6, 8), rand(1, 2, 6, 8)))
    assert len(graph.outputs) == 3


def test_a_row_of_attention_that_sees_nothing_is_zero() -> None:
    x, mask = value("x", 1, 1, 2, 4), value("m", 2, 2, dtype="bool")
    op = make_op("attention", "y", [x, x, x, mask], {"scale": 0.5})
    given = {"x": np.ones((1, 1, 2, 4), np.float32), "m": np.array([[False, False], [True, False]])}
    found = reference.run(Graph("g", (x, mask), ops=(op,), outputs=("y",)), given)["y"]
    assert found[0, 0].tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2**-7), ("f16", 2**-10)])
def test_narrow_floats_are_rounded_to_nearest_even(dtype: str, step: float) -> None:
    x = Value("x", TensorType("f32", (3,)))
    op = make_op("cast", "y", [x], {"dtype": dtype})
    given = {"x": np.array([1 + step / 2, 1 + 1.5 * step, 1 + step * 0.75], np.float32)}
    graph = Graph("g", (x,), ops=(op,), outputs=("y",))
    assert reference.run(graph, given)["y"].tolist() == [1, 1 + 2 * step, 1 + step]
    assert reference.run(graph, given, precision="float64")["y"].tolist() == given["x"].tolist()


def test_buffers_that_are_missing_or_of_another_shape_are_named() -> None:
    graph = sample()
    for given, found in (
        ({}, "missing"),
        ({"x": np.zeros(3)}, "of shape [3]"),
        ({"x": np.zeros((2, 3, 8, 8), int)}, "of int64"),
    ):
        with pytest.raises(reference.BadBufferError) as e:
            reference.run(graph, given)
        assert (e.value.name, e.value.found) == ("x", found)
