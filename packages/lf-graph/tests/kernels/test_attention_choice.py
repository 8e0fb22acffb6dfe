"""``attention``: other ways keep our contract, and the fastest one that was measured is taken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_close, cumulative, gradients, inputs, reference
from kernel_cases import DEVICE, same_bits
from torch import Tensor
from torch.nn.attention import SDPBackend

from lf_graph.kernels import KernelUnavailableError, attention, attention_lengths, varlen_attention
from lf_graph.kernels import _attention_choice as choice
from lf_graph.kernels import _attention_ways as ways
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._choice import choices
from lf_graph.kernels._tunable import TUNABLES, Key


def padded(rows: int = 20, heads: int = 2) -> tuple[Tensor, Tensor]:
    """x [2, rows, heads, 16] with NaN behind the lengths, and lengths."""
    x = torch.randn(2, rows, heads, 16, device=DEVICE)
    x[0, 13:] = float("nan")
    return x, torch.tensor([13, rows], dtype=torch.int32, device=DEVICE)


def test_by_default_it_is_ours() -> None:
    case = Case((9, 20), causal=True)
    q, k, v, _ = inputs(case)
    options: dict[str, Any] = {"causal": True, "scale": 0.3}
    expected = varlen_attention(q, k, v, case.cu_q, **options)
    assert same_bits([attention(q, k, v, case.cu_q, **options)], [expected])
    x, lengths = padded()
    expected = attention_lengths(x, x, x, lengths, **options)
    assert same_bits([attention(x, x, x, lengths_q=lengths, **options)], [expected])
    plain = attention_lengths(x, x, x, lengths, implementation="plain")
    assert same_bits([attention(x, x, x, lengths_q=lengths, implementation="plain")], [plain])


def test_lengths_are_those_of_the_kind_of_rows() -> None:
    x, lengths = padded()
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="no lengths"):
        attention(x[0], x[0], x[0], cumulative((20,)), lengths_q=lengths)
    with pytest.raises(ValueError, match="packed rows"):
        attention(x, x, x, cumulative((20, 20)))
    with pytest.raises(ValueError, match="one of"):
        attention(x, x, x, implementation="fastest")  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there they run")
@pytest.mark.parametrize("way", choice.NAMES[1:])
def test_another_way_says_why_it_cannot_run_here(way: Any) -> None:
    x, _ = padded()
    with pytest.raises(KernelUnavailableError, match="CUDA device"):
        attention(x, x, x, implementation=way)


# other ways; on the CPU with functions of torch that run there


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA by its formula, FlexAttention as it is: without a compiler, and without gradients."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    monkeypatch.setitem(ways._WAYS, "flash", functools.partial(ways._sdpa, SDPBackend.MATH))
    monkeypatch.setattr(ways, "_flex_functions", lambda: (flex_attention, create_block_mask))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths_k", [None, (30, 0, 8)])
def test_flex_over_packed_rows(causal: bool, lengths_k: tuple[int, ...] | None) -> None:
    case = Case((21, 5, 8), lengths_k, heads=4, kv_heads=2, causal=causal)
    q, k, v, gradient = inputs(case)
    layout = Layout(case.cu_q, case.cu_k, 3, True, causal, 0.25)
    out = ways.run("flex", q[None], k[None], v[None], layout)[0]
    assert_close([out], reference(Case(**{**vars(case), "scale": 0.25}), q, k, v, gradient)[:1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_over_padded_rows(causal: bool) -> None:
    x, lengths = padded()
    out = ways.run("flex", x, x, x, Layout(lengths, lengths, 2, False, causal, 0.25))
    expected = attention_lengths(x, x, x, lengths, causal=causal, scale=0.25, implementation="plain")
    assert_close([out], [expected.double()])
    whole = ways.run("flex", x[1:], x[1:], x[1:], Layout(None, None, 1, False, causal, 0.25))
    assert_close([whole], [expected[1:].double()])


@pytest.mark.usefixtures("on_cpu")
def test_sdpa_over_padded_rows_has_our_values_and_gradients() -> None:
    x, lengths = padded()
    layout = Layout(lengths, lengths, 2, False, True, 0.25)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_lengths(q, k, v, lengths, causal=True, scale=0.25, implementation="plain")

    found = gradients(lambda q, k, v: ways.run("flash", q, k, v, layout), x, x, x, x)
    assert_close(found, [t.double() for t in gradients(plain, x, x, x, x)])


class _Half:
    """Looks like a bf16 tensor on a GPU, for all that ``obstacle`` asks."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.device = shape, torch.bfloat16, torch.device("cuda")


def test_sdpa_is_not_for_what_it_would_compute_otherwise() -> None:
    lengths, others = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    x, longer = _Half(2, 20, 4, 64), _Half(2, 30, 4, 64)

    def obstacle(k: Any, offsets_q: Any, offsets_k: Any, causal: bool, packed: bool = False) -> str | None:
        return ways.obstacle("cudnn", x, k, Layout(offsets_q, offsets_k, 2, packed, causal, 1.0))  # type: ignore[arg-type]

    assert obstacle(x, None, None, True) is None
    assert obstacle(longer, None, None, False) is None
    assert obstacle(x, lengths, lengths, True) is None
    assert "first row" in str(obstacle(longer, None, None, True))
    assert "no lengths" in str(obstacle(x, lengths, lengths, False))
    assert "no lengths" in str(obstacle(x, lengths, others, True))
    assert "packed" in str(obstacle(x, lengths, lengths, True, packed=True))


# the choice


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Key]]:
    """Pretends that a way won everywhere; returns the keys that were asked for."""

    def pretend(way: str) -> list[Key]:
        asked: list[Key] = []

        def fastest(key: Key) -> tuple[str, str]:
            asked.append(key)
            return way, "fastest as tuned"

        monkeypatch.setattr(choice, "fastest", fastest)
        monkeypatch.setattr(choice, "is_measured", lambda q: True)
        return asked

    return pretend


def test_the_fastest_way_is_taken_and_counted(
    measured: Callable[[str], list[Key]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured("cudnn")
    monkeypatch.setattr(ways, "obstacle", lambda *a: None)
    monkeypatch.setattr(ways, "run", lambda way, q, k, v, layout: q * 0 + 5)
    x = torch.randn(2, 20, 4, 16, device=DEVICE)
    before = choices().get("attention", {}).get("cudnn (fastest as tuned)", 0)
    assert (attention(x, x[:, :, :2], x[:, :, :2], causal=True) == 5).all()
    assert choices()["attention"]["cudnn (fastest as tuned)"] == before + 1
    assert asked == [("whole", False, "float32", 16, 4, 2, True, 32, 32, 64)]


def test_a_fast_way_that_cannot_compute_a_call_is_not_taken(measured: Callable[[str], list[Key]]) -> None:
    measured("varlen_attn")
    x, lengths = padded()
    assert same_bits([attention(x, x, x, lengths_q=lengths)], [attention_lengths(x, x, x, lengths)])
    assert any(
        label.startswith("triton (varlen_attn would be faster, but") for label in choices()["attention"]
    )


def test_what_was_not_measured_is_ours() -> None:
    assert choice.fastest(("packed", True, "bfloat16", 64, 3, 3, True, 64, 64, 128)) == (
        "triton", "not measured on this card",
    )  # fmt: skip


KEYS: list[Key] = [
    (kind, wanted, "float32", 16, 2, 1, causal, 32, rows_k, 64)
    for kind, wanted, causal, rows_k in (
        ("packed", True, True, 32), ("padded", True, False, 16), ("whole", False, True, 16),
    )
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_problem_compares_ways_with_float64(key: Key) -> None:
    calls, expected, allowed = choice._problem(key, DEVICE)
    assert list(calls) == ["triton"]  # the others have no fp32
    assert len(expected) == len(allowed) == (4 if key[1] else 1)
    found = calls["triton"]()
    for x, r, limit in zip(found, expected, allowed, strict=True):
        assert float((x.double() - r).abs().max() / r.abs().max()) < limit
    assert TUNABLES["attention"].default(key)["alternative"] == 0
