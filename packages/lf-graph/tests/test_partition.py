"""partition: cuts where check finds something, with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from marks import marks_of
from partition_cases import Model, Reads, X, kinds
from torch import Tensor, nn

from lf_graph import Chain, Eager, Piece
from lf_graph._partition import partition
from lf_graph._specs import evaluate

at = marks_of(__file__)


def test_modules_with_findings_stay_eager_and_everything_between_becomes_pieces():
    parts = partition(Model(), X)
    assert kinds(parts)[:5] == [
        ("piece", "piece0"),
        ("eager", "blocks.0.router"),
        ("piece", "piece2"),
        ("eager", "blocks.2.router"),
        ("piece", "piece4"),
    ]
    assert parts.inputs == ("in0",)
    assert "eager  blocks.0.router" in str(parts)
    assert {f.module for f in parts.report.findings} == {"blocks.0.router", "blocks.2.router"}


def test_every_value_is_given_before_it_is_taken_and_has_one_name():
    parts = partition(Model(), X)
    known = set(parts.inputs)
    for spec in parts.specs:
        assert set(spec.inputs) <= known
        assert not set(spec.outputs) & known
        known |= set(spec.outputs)
    assert set(parts.outputs) <= known


def test_elements_are_pieces_and_eager_parts_of_a_chain():
    parts = partition(Model(), X)
    elements = [s.element() for s in parts.specs]
    assert [type(e) for e in elements[:2]] == [Piece, Eager]
    assert isinstance(parts.chain(name="mine"), Chain)


def test_a_chain_of_the_parts_gives_the_bits_of_the_module_forward_and_backward():
    torch.manual_seed(0)
    model = Model()
    parts = partition(model, X, scale=2.0)
    chain = parts.chain().capture(X)
    for step in range(3):
        x = X + step
        torch.manual_seed(step)
        expected = model(x, scale=2.0)
        expected["loss"].backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        torch.manual_seed(step)
        found = parts.result(chain(x))
        found["loss"].backward()
        assert torch.equal(found["loss"], expected["loss"])
        assert torch.equal(found["mean"], expected["mean"])
        assert found["rows"] == 3
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, grads[name]), name
        model.zero_grad(set_to_none=False)


def test_nothing_of_the_module_changes_and_its_parameters_are_shared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Reads())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names = [n for n, _ in model.named_modules()]
    state = torch.get_rng_state()
    parts = partition(model, X)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [n for n, _ in model.named_modules()] == names
    assert torch.equal(torch.get_rng_state(), state)
    shared = {id(p) for s in parts.specs for p in s.module.parameters()}
    assert {id(p) for p in model.parameters()} <= shared


def test_a_clean_module_is_one_piece_whatever_its_forward_looks_like():
    class Tree(nn.Module):
        def forward(self, batch: dict[str, Tensor], flag: bool) -> tuple[Tensor, dict[str, object]]:
            rows = [r * 2 for r in batch["x"]] if flag else []
            return torch.stack(rows), {"y": batch["y"], "none": None}

    parts = partition(Tree(), {"x": X, "y": X + 1}, flag=True)
    assert kinds(parts) == [("piece", "Tree")]
    assert (parts.inputs, parts.outputs) == (("in0", "in1"), ("out0", "out1"))
    stacked, rest = parts.result(parts.chain().capture(X, X + 1)(X + 1, X))
    assert torch.equal(stacked, (X + 1) * 2)
    assert torch.equal(rest["y"], X)
    assert rest["none"] is None


def test_a_module_that_calls_an_eager_one_and_has_a_finding_itself_stays_eager_as_a_whole():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reads()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * x.sum().item()

    assert kinds(partition(nn.Sequential(nn.Linear(4, 4), Outer(), nn.ReLU()), X)) == [
        ("piece", "piece0"),
        ("eager", "1"),
        ("piece", "piece2"),
    ]


def test_state_and_hooks_of_a_submodule_keep_it_eager():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda m, a, out: out * 2)
    model = nn.Sequential(nn.Linear(4, 4), Counts(), nn.ReLU(), hooked)
    assert [n for k, n in kinds(partition(model, X)) if k == "eager"] == ["1", "3"]


class Contexts(nn.Module):
    """Modes inside of the forward that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.reads, self.head = nn.Linear(4, 4), Reads(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.tower(x) * 2
        with torch.autocast("cpu", torch.bfloat16):
            y = self.head(x + seen)
        return self.reads(y.float())


def test_no_grad_and_autocast_inside_of_the_module_are_kept():
    torch.manual_seed(0)
    model = Contexts()
    parts = partition(model, X)
    values = evaluate(parts.specs, dict(zip(parts.inputs, [X], strict=True)))
    assert torch.equal(values[parts.outputs[0]], model(X))
    values[parts.outputs[0]].sum().backward()
    assert model.tower.weight.grad is None
    assert model.head.weight.grad is not None
    assert any(v.dtype is torch.bfloat16 for v in values.values())


def test_autocast_around_the_call_is_given_to_the_chain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Reads(), nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        parts = partition(model, X)
        expected = model(X)
    chain = parts.chain(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chain.capture(X)(X), expected)


def test_in_place_operations_and_index_writes_stay_in_order():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            y[:, 1] = x[:, 0]
            y.add_(1).T.mul_(2)
            self.total.add_(x.detach().sum())
            return self.reads(y) + self.total

    model = InPlace()
    parts = partition(model, X)
    values = evaluate(parts.specs, {"in0": X})
    first = values[parts.outputs[0]]
    assert model.total == X.sum()
    model.total.zero_()
    assert torch.equal(first, model(X))


def test_mappings_and_data_classes_of_submodules_are_taken_apart():
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"a": x + 1, "b": (x * 2, None)}

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.reads = Named(), Reads()

        def forward(self, x: Tensor) -> Tensor:
            out = self.named(x=x)
            values, indices = out["a"].topk(2)
            return self.reads(out["b"][0]) + values.sum() + indices.sum() + torch.split(x, 2, dim=1)[0].sum()

    model = Uses()
    parts = partition(model, X)
    assert torch.equal(evaluate(parts.specs, {"in0": X})[parts.outputs[0]], model(X))


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.reads = nn.Embedding(6, 4), Reads()
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.reads(self.embed(tokens))), tokens)

    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(6)
    model(tokens).backward()
    expected = model.embed.weight.grad.clone()
    model.zero_grad()
    chain = partition(model, tokens).chain().capture(tokens)
    chain(tokens).backward()
    assert torch.equal(model.embed.weight.grad, expected)


def test_code_that_asks_whether_a_capture_is_on_takes_the_branch_of_a_capture():
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: Tensor) -> Tensor:
            capturing = torch.cuda.is_current_stream_capturing()
            return self.reads(x if capturing or x.sum() > 0 else -x) + capturing

    torch.manual_seed(0)
    model = Asks()
    parts = partition(model, X)
    assert torch.equal(evaluate(parts.specs, {"in0": X})[parts.outputs[0]], model.reads(X) + 1)


def test_a_hugging_face_model_is_cut_around_the_layer_that_reads():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=4, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.model.layers[1].mlp = Reads()
    tokens = torch.arange(12).view(2, 6)
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    parts = partition(model, **call)
    assert kinds(parts) == [("piece", "piece0"), ("eager", "model.layers.1.mlp"), ("piece", "piece2")]
    found = parts.result(parts.chain().capture(tokens, tokens)(tokens, tokens))
    assert type(found) is type(model(**call))
    torch.testing.assert_close(found.loss, model(**call).loss)
