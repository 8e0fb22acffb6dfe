"""use(): which modules are exchanged, that numbers, keys and parameters stay, and that it can be undone."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from kernel_cases import assert_near
from ranks import Ranks
from torch import nn
from use_cases import (
    EXCHANGED,
    NOT_QUITE,
    Block,
    Gated,
    OwnGELU,
    Packed,
    Rows,
    TypedRows,
    block,
    gradients_on_a_rank,
    trained,
)

import lf_graph
from lf_graph.kernels import use

ALL = ["gate", "up", "down"]


def test_exchanges_every_module_that_computes_what_an_operator_does() -> None:
    report = use(block())

    assert report.exchanged == EXCHANGED
    assert report.left == {}


@pytest.mark.parametrize("implementation", ["plain", "triton"])
def test_values_and_gradients_stay(implementation: Any) -> None:
    model, x = block(), torch.randn(2, 3, 16)
    expected = trained(copy.deepcopy(model).double(), x.double())

    use(model, implementation=implementation)

    assert_near(trained(model, x), expected, slack=2)


@pytest.mark.parametrize("case", NOT_QUITE)
def test_leaves_what_only_looks_alike_and_says_why(case: str) -> None:
    build, reason = NOT_QUITE[case]
    model = nn.ModuleDict({"it": build()})
    before = model["it"]

    report = use(model)

    assert reason in report.left["it"]
    assert "it" not in report.exchanged
    assert model["it"] is before


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.Tanh()])
def test_leaves_a_branch_whose_weights_are_zero_and_whose_activation_is_another(act: nn.Module) -> None:
    model = nn.Sequential(Gated(act=act))
    nn.init.zeros_(model[0].down_proj.weight)  # it gives zeros, as a SwiGLU of its weights would

    assert "swiglu" not in use(model).exchanged.values()


@pytest.mark.parametrize("names", list(itertools.permutations(ALL)))
@pytest.mark.parametrize("inner", [16, 24])
def test_finds_gate_and_up_by_what_they_do_not_by_name_or_order(names: Any, inner: int) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(Gated(16, inner, names)), torch.randn(3, 16)
    expected = model(x)

    assert use(model).exchanged == {"0": "swiglu"}
    torch.testing.assert_close(model(x), expected)


def test_finds_norms_of_any_epsilon_and_gelu_written_out() -> None:
    norms = [Rows(16, eps) for eps in (1e-12, 1e-6, 1e-2)]
    model = nn.Sequential(*norms, TypedRows(8), OwnGELU())

    assert use(model).exchanged == {**{str(i): "rms_norm" for i in range(4)}, "4": "gelu_tanh"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_torch_norms_without_weight_bias_or_epsilon(dtype: torch.dtype, eps: float | None) -> None:
    x = (torch.randn(4, 64) * 1e-2).to(dtype)
    kinds = [nn.RMSNorm(64, eps=eps, elementwise_affine=affine, dtype=dtype) for affine in (False, True)]
    kinds += [nn.LayerNorm(64, eps or 1e-5, bias=False, dtype=dtype)]
    for kind in kinds:
        model = nn.Sequential(kind)
        expected = model(x)
        assert len(use(model).exchanged) == 1
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm, Rows, TypedRows])
def test_results_keep_their_dtype(kind: Any, x_dtype: torch.dtype, autocast: bool) -> None:
    model, x = nn.Sequential(kind(16)), torch.randn(2, 16, dtype=x_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        use(model)
        found = model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm, Rows])
def test_results_take_the_dtype_of_autocast_where_that_is_asked_for(kind: Any) -> None:
    model, x = nn.Sequential(kind(16)), torch.randn(2, 16)
    use(model, norm_outputs="autocast")
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


def test_parameters_keys_ties_and_modes_stay() -> None:
    model = block()
    model.gated.up_proj.weight = model.gated.gate_proj.weight  # tied
    model.second.weight.requires_grad_(False)
    model.packed.eval()
    model.third.note = "of the user"
    parameters, keys = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict())
    modes = {name: m.training for name, m in model.named_modules()}

    use(model)

    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(parameters)
    assert all(after[n] is p for n, p in parameters.items())
    assert list(model.state_dict()) == keys
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert model.third.note == "of the user"
    assert isinstance(model.first, nn.RMSNorm)
    assert isinstance(model.second, nn.LayerNorm)
    model.load_state_dict(block(1).state_dict())


def test_a_module_in_two_places_stays_one() -> None:
    shared = Rows(16)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])

    report = use(model)

    assert report.exchanged == {"0.0": "rms_norm", "1.0": "rms_norm"}
    assert model[0][0] is model[1][0]
    report.undo()
    assert model[0][0] is model[1][0] is shared


def test_a_second_call_finds_nothing_to_do() -> None:
    model = block()
    use(model)
    modules = list(model.modules())

    again = use(model)

    assert (again.exchanged, again.left) == ({}, {})
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_undo_gives_the_modules_back_with_what_became_of_them() -> None:
    model = block()
    modules = list(model.modules())
    with use(model) as report:
        model.eval()
        model.load_state_dict(block(3).state_dict(), assign=True)  # other Parameter objects
        called: list[int] = []
        model.first.register_forward_hook(lambda *_: called.append(1))
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not any(m.training for m in model.modules())
    assert torch.equal(model.third.weight, block(3).third.weight)
    model(torch.randn(1, 16))
    assert called == [1]
    report.undo()  # nothing more to do


def test_undo_leaves_what_somebody_else_put_there() -> None:
    model = block()
    report = use(model)
    model.first = mine = nn.Identity()
    report.undo()
    assert model.first is mine
    assert type(model.second) is nn.LayerNorm


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_the_exchange(how: str) -> None:
    model, x = block(), torch.randn(2, 16)
    use(model)
    if how == "deepcopy":
        made = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        made = torch.load(stream, weights_only=False)
    assert torch.equal(made(x), model(x))
    assert [type(m) for m in made.modules()] == [type(m) for m in model.modules()]
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}


@pytest.mark.parametrize("off", [{"norms": False}, {"activations": False}])
def test_only_what_is_asked_for(off: dict[str, bool]) -> None:
    found = set(use(block(), **off).exchanged.values())
    norms = {"rms_norm", "layer_norm"}
    assert found == ({"swiglu", "gelu_tanh"} if "norms" in off else norms)


def test_modules_with_hooks_or_a_forward_of_their_own_are_left() -> None:
    model = block()
    model.first.register_forward_hook(lambda *_: None)
    model.gated.act_fn.register_forward_pre_hook(lambda *_: None)
    model.second.forward = model.second.forward

    report = use(model)

    assert set(report.left) == {"first", "gated", "second"}
    assert "has hooks" in report.left["first"]
    assert "has hooks" in report.left["gated"]
    assert "was replaced" in report.left["second"]


def test_weights_of_another_kind_of_tensor_are_left() -> None:
    class Sharded(nn.Parameter):
        pass

    model = nn.Sequential(nn.RMSNorm(8), Gated())
    model[0].weight = Sharded(torch.ones(8))
    model[1].up_proj.weight = Sharded(torch.ones(24, 16))
    left = use(model).left
    assert "weight is a Sharded" in left["0"]
    assert "up_proj.weight is a Sharded" in left["1"]


def test_a_model_that_is_one_norm_is_left() -> None:
    assert "lf_graph.kernels.rms_norm" in use(nn.RMSNorm(8)).left[""]


def test_random_numbers_and_weights_are_not_touched() -> None:
    model = nn.Sequential(block(), nn.Sequential(Gated(act=nn.GELU()), Packed(True)))
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    use(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_works_on_the_meta_device_and_whatever_the_defaults_are() -> None:
    with torch.device("meta"):
        model = Block()
        assert use(model).exchanged == EXCHANGED
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            assert use(Block()).exchanged == EXCHANGED
    finally:
        torch.set_default_dtype(torch.float32)
    assert model(torch.empty(2, 16, device="meta")).shape == (2, 16)


def test_the_report_prints_blocks_as_one_line_each() -> None:
    model = nn.ModuleList([block(i) for i in range(3)])
    model[1].first.register_forward_hook(lambda *_: None)
    assert str(use(model)).splitlines() == [
        "17 exchanged, 1 left alone",
        "  rms_norm: *.first (2), *.third (3)",
        "  layer_norm: *.second (3)",
        "  swiglu: *.gated (3), *.packed (3)",
        "  gelu_tanh: *.mlp.* (3)",
        "  RMSNorm has hooks: register them after use(): *.first",
    ]


def test_refuses_unknown_outputs() -> None:
    with pytest.raises(ValueError, match="norm_outputs='bf16'"):
        use(block(), norm_outputs="bf16")  # type: ignore[arg-type]


# -- with the rest of lf-graph and torch --------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["same", "autocast"])
def test_compiles_as_one_graph(outputs: Any) -> None:
    model, x = block(), torch.randn(2, 3, 16)
    use(model, implementation="plain", norm_outputs=outputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(trained(compiled, x), trained(model, x))


def test_a_dry_run_finds_nothing() -> None:
    model = block()
    use(model)
    assert lf_graph.check(model, torch.randn(2, 16)).ok


def test_trains_in_a_captured_step_as_before() -> None:
    losses = []
    for exchange in (False, True):
        model = block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if exchange:
            use(model)  # after the optimizer was made
        with lf_graph.TrainStep(model, optimizer, loss=lambda x, m=model: m(x).square().mean()) as step:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
            losses.append([float(step(x).loss) for _ in range(6)])
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]))


def test_ranks_sum_gradients_of_a_model_exchanged_before_or_after_it_is_wrapped() -> None:
    expected = []
    for rank in range(2):
        model = block()
        torch.manual_seed(rank)
        expected.append(trained(model, torch.randn(4, 16))[2:])
    mean = [(a + b) / 2 for a, b in zip(*expected, strict=True)]
    ranks = Ranks(2)
    try:
        for inside in (True, False):
            for found in ranks.call(gradients_on_a_rank, inside=inside):
                torch.testing.assert_close(found, mean)
    finally:
        ranks.close()
