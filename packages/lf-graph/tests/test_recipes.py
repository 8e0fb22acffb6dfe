"""shard_block and merge: five parts of a block with the block's own bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lf_graph import Chain, GraphError
from lf_graph._recipes import PARTS, merge, shard_block
from lf_graph._specs import Spec, evaluate

LENGTH = 6


def gr00t_block(dropout: float = 0.0):
    lm = pytest.importorskip("lf_meta.models.gr00t_lm")
    config = lm.LMConfig(vocab_size=16, hidden=16, layers=1, heads=2, ffn=24, dropout=dropout)
    tables = lm.rope_tables(LENGTH, 8, 10000.0, torch.device("cpu"))
    block = lm.Block(config)
    return block, tables, lambda x, cos, sin, mask=None: block(x, cos, sin)


def hugging_face_layer(name: str, implementation: str = "sdpa", **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation=implementation,
        **options,
    )
    model = getattr(transformers, f"{name}Model")(config)
    cos, sin = model.rotary_emb(torch.zeros(1, LENGTH, 8), torch.arange(LENGTH)[None])
    layer = model.layers[0]

    def call(x, cos, sin, mask=None):
        return layer(x, attention_mask=mask, position_embeddings=(cos, sin))

    return layer, (cos, sin), call


LAYOUTS = {
    "gr00t": gr00t_block,
    "gr00t with dropout": lambda: gr00t_block(0.2),
    "llama": lambda: hugging_face_layer("Llama"),
    "llama, eager attention with dropout": lambda: hugging_face_layer(
        "Llama", "eager", attention_dropout=0.2
    ),
    "qwen2": lambda: hugging_face_layer("Qwen2"),
    "qwen3": lambda: hugging_face_layer("Qwen3"),
    "mistral": lambda: hugging_face_layer("Mistral", sliding_window=None),
}


@pytest.fixture(params=LAYOUTS, ids=str)
def case(request):
    torch.manual_seed(0)
    block, (cos, sin), call = LAYOUTS[request.param]()
    return block.train(), {"x": torch.randn(2, LENGTH, 16), "cos": cos, "sin": sin}, call


def run(call, *inputs: Tensor) -> Tensor:
    torch.manual_seed(1)
    return call(*inputs)


def test_five_parts_give_the_bits_of_the_block_forward_and_backward(case):
    block, inputs, call = case
    specs = shard_block(block)
    assert [s.name for s in specs] == [f"block.{part}" for part in PARTS]
    x = inputs["x"].requires_grad_()
    expected = run(call, x, inputs["cos"], inputs["sin"])
    expected.sum().backward()
    grads = {n: p.grad.clone() for n, p in block.named_parameters()}
    gradient, x.grad = x.grad, None
    block.zero_grad()
    found = run(lambda: evaluate(specs, inputs)["block.out"])
    found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, gradient)
    for name, p in block.named_parameters():
        assert torch.equal(p.grad, grads[name]), name


def test_merged_parts_give_the_same_bits(case):
    block, inputs, call = case
    expected = run(call, *inputs.values())
    for eager, count in (((), 1), (("attention",), 3), (("qkv",), 2), (("attention", "gate"), 5)):
        specs = merge(shard_block(block, eager=eager))
        assert len(specs) == count
        assert torch.equal(run(lambda s=specs: evaluate(s, inputs)["block.out"]), expected)


def test_autocast_gives_the_same_bits(case):
    block, inputs, call = case
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(call, *inputs.values())
        found = run(lambda: evaluate(shard_block(block), inputs)["block.out"])
    assert torch.equal(found, expected)


def test_evaluation_mode_is_the_blocks(case):
    block, inputs, call = case
    specs = shard_block(block)
    block.eval()
    assert torch.equal(evaluate(specs, inputs)["block.out"], call(*inputs.values()))


def test_a_chain_of_the_parts_trains_the_block(case):
    block, inputs, call = case
    expected = run(call, *inputs.values())
    expected.sum().backward()
    grads = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad(set_to_none=False)
    specs = merge(shard_block(block, eager=("attention",)))
    with Chain([s.element() for s in specs], ("x", "cos", "sin"), ("block.out",)) as chain:
        chain.capture(*inputs.values())
        found = run(chain, *inputs.values())
        found.sum().backward()
    assert torch.equal(found, expected)
    for name, p in block.named_parameters():
        assert torch.equal(p.grad, grads[name]), name


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_mask_goes_to_the_attention_part_alone(name):
    torch.manual_seed(0)
    layer, (cos, sin), call = hugging_face_layer(name)
    x = torch.randn(2, LENGTH, 16)
    mask = torch.ones(LENGTH, LENGTH).tril().bool()[None, None].expand(2, 1, -1, -1).clone()
    mask[1, :, :, :2] = False
    mask[1, :, 0, 0] = mask[1, :, 1, 1] = True
    specs = shard_block(layer, mask="mask")
    assert [i for i, s in enumerate(specs) if "mask" in s.inputs] == [1]
    values = evaluate(specs, {"x": x, "cos": cos, "sin": sin, "mask": mask})
    assert torch.equal(values["block.out"], call(x, cos, sin, mask))


def test_blocks_of_one_chain_have_values_of_their_own_names():
    torch.manual_seed(0)
    first, (cos, sin), _ = gr00t_block()
    second = gr00t_block()[0]
    specs = (*shard_block(first, name="b0"), *shard_block(second, name="b1", x="b0.out"))
    x = torch.randn(2, LENGTH, 16)
    found = evaluate(specs, {"x": x, "cos": cos, "sin": sin})["b1.out"]
    assert torch.equal(found, second(first(x, cos, sin), cos, sin))
    assert len({n for s in specs for n in s.outputs}) == sum(len(s.outputs) for s in specs)


def test_a_block_of_another_layout_is_refused_with_what_it_lacks():
    with pytest.raises(GraphError, match="TransformerEncoderLayer is no block of a known layout") as raised:
        shard_block(nn.TransformerEncoderLayer(8, 2))
    assert "by hand" in str(raised.value)
    block = gr00t_block()[0]
    del block.ffn.gate
    with pytest.raises(GraphError, match=r"it lacks ffn\.gate"):
        shard_block(block)


def test_a_block_whose_file_lacks_the_rotary_function_is_refused():
    class Attention(nn.Module):
        heads, dropout = 2, 0.0

        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    block = gr00t_block()[0]
    block.attention = Attention()
    with pytest.raises(GraphError, match="has no rotate"):
        shard_block(block)


def test_unknown_parts_are_refused():
    with pytest.raises(GraphError, match="no parts \\['softmax'\\]"):
        shard_block(gr00t_block()[0], eager=("softmax",))


# merge


class Plus(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, *values: Tensor) -> Tensor:
        return sum(values) + self.amount


def line_of(eager: list[bool], skips: list[int]) -> list[Spec]:
    """Parts in a line, each taking the value before it and an earlier one."""
    names = ["v0"]
    specs = []
    for i, (kind, skip) in enumerate(zip(eager, skips, strict=True)):
        takes = tuple(dict.fromkeys((names[-1], names[skip % len(names)])))
        names.append(f"v{i + 1}")
        specs.append(Spec("eager" if kind else "piece", Plus(i), takes, (names[-1],), f"s{i}"))
    return specs


@given(st.data(), st.lists(st.booleans(), min_size=1, max_size=8))
def test_merging_keeps_every_result_and_leaves_no_two_pieces_side_by_side(data, eager):
    skips = data.draw(st.lists(st.integers(0, 9), min_size=len(eager), max_size=len(eager)))
    specs = line_of(eager, skips)
    wanted = data.draw(st.lists(st.sampled_from([s.outputs[0] for s in specs]), unique=True, max_size=3))
    merged = merge(specs, wanted)
    before, after = evaluate(specs, {"v0": torch.ones(2)}), evaluate(merged, {"v0": torch.ones(2)})
    assert all(torch.equal(after[n], before[n]) for n in wanted or [specs[-1].outputs[0]])
    kinds = [s.kind for s in merged]
    assert ("piece", "piece") not in set(itertools.pairwise(kinds))
    assert kinds.count("eager") == sum(eager)


def test_a_merged_part_gives_only_what_is_wanted_later():
    specs = line_of([False, False, True, False], [0, 0, 1, 0])
    merged = merge(specs)
    assert [s.outputs for s in merged] == [("v1", "v2"), ("v3",), ("v4",)]
    assert merged[0].name == "s0..s1"
    assert merge(specs, ("v2", "v4"))[0].outputs == ("v1", "v2")


def test_a_wanted_value_that_nothing_gives_is_refused():
    with pytest.raises(GraphError, match="no part gives \\['other'\\]"):
        merge(line_of([False], [0]), ("other",))
