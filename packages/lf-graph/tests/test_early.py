"""Updates within the backward: the ordinary loop's numbers, and each gradient gone before the next are made."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import train_cases as cases
from adamw_cases import DEVICE, IMPLEMENTATIONS, same_bits
from adamw_cases import Twins as Moments
from test_compile import NO_PATTERNS, as_it_is
from test_sinks import Sum
from torch import Tensor, nn
from torch._inductor import compile_fx
from train_cases import TOLERANCE, Twins, batches, model_of

from lf_graph import AddressError, GraphError, TrainStep
from lf_graph._compile import compile_function
from lf_graph._early import Applied
from lf_graph._pool import GraphPool
from lf_graph._recorder import RecordBackend
from lf_graph._segment import Piece, Segment

EARLY: dict[str, Any] = {"release": "fused"}


@pytest.mark.parametrize("options", [{}, {"autocast": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_twenty_steps_of_a_schedule_equal_the_ordinary_loop(options: dict[str, Any], tied: bool) -> None:
    twins = Twins(cases.two_groups, model=model_of(tied=tied), **options, **EARLY)
    with twins.step as step:
        twins.run(batches(20), schedule=True)
        assert twins.difference() <= (2e-2 if options else 20 * TOLERANCE)
        assert step.info()["gradients"].startswith("Applied")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_it_gives_the_bits_of_a_step_that_keeps_its_gradients(autocast: torch.dtype | None) -> None:
    kept, early = model_of(), model_of()
    a, b = cases.adamw(kept), cases.adamw(early)
    with (
        TrainStep(kept, a, gate=False, autocast=autocast) as one,
        TrainStep(early, b, autocast=autocast, **EARLY) as other,
    ):
        for batch in batches(6):
            assert torch.equal(one(*batch).loss, other(*batch).loss)
    assert cases.equal(cases.snapshot(kept, a), cases.snapshot(early, b))


def test_the_capture_itself_updates_nothing() -> None:
    model = model_of()
    optimizer = cases.adamw(model)
    before = cases.snapshot(model)
    with TrainStep(model, optimizer, **EARLY) as step:
        step.capture(*batches(1)[0])
        assert cases.equal(cases.snapshot(model), before)
        assert all(not v.any() for s in optimizer.state.values() for v in s.values())


def test_two_signatures_update_the_same_weights_each_from_its_own_gradients() -> None:
    twins = Twins(max_graphs=2, **EARLY)
    short, long = batches(3, length=4), batches(3, length=7)
    with twins.step as step:
        twins.run([b for pair in zip(short, long, strict=True) for b in pair])
        assert twins.difference() <= 6 * TOLERANCE
        assert step.stats().captures == 2


def test_the_update_is_in_the_micro_batch_and_update_tells_its_loss() -> None:
    model = model_of()
    before = cases.snapshot(model)
    with TrainStep(model, cases.adamw(model), **EARLY) as step:
        step.micro(*batches(1)[0])
        assert not cases.equal(cases.snapshot(model), before)
        after, result = cases.snapshot(model), step.update()
        assert cases.equal(cases.snapshot(model), after)
        assert float(result.count) > 1
        with pytest.raises(GraphError, match="micro-batch first"):
            step.update()


def test_replaced_memory_is_found_before_anything_is_updated() -> None:
    model = model_of()
    with TrainStep(model, cases.adamw(model), **EARLY) as step:
        step(*batches(1)[0])
        model.head.weight.data = model.head.weight.data.clone()
        before = cases.snapshot(model)
        with pytest.raises(AddressError, match=r"head\.weight"):
            step.micro(*batches(1)[0])
        assert cases.equal(cases.snapshot(model), before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": 1.0}, r"clip=1\.0"),
        ({"gate": True}, "gate=True"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"reduce": lambda buffers, totals: None}, "reduce"),
        ({"fused": False}, "fused=False"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(options: dict[str, Any], said: str) -> None:
    model = model_of()
    with pytest.raises(GraphError, match=rf"{said}.*release='exact'"):
        TrainStep(model, cases.adamw(model), **options, **EARLY)


def test_another_mode_and_another_optimizer_are_refused() -> None:
    model = model_of()
    with pytest.raises(GraphError, match=r"release='early'.*'exact', 'fused'"):
        TrainStep(model, cases.adamw(model), release="early")  # type: ignore[arg-type]
    with TrainStep(model, cases.sgd(model), **EARLY) as step, pytest.raises(GraphError, match="SGD"):
        step(*batches(1)[0])


def test_a_weight_that_the_loss_also_holds_by_itself_is_refused() -> None:
    model = model_of()
    weight = model.head.weight

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        return model(ids, targets)[0] + weight.square().sum()

    before = cases.snapshot(model)
    with (
        TrainStep(model, cases.adamw(model), loss=loss, **EARLY) as step,
        pytest.raises(GraphError, match=r"head\.weight.*release='exact'"),
    ):
        step(*batches(1)[0])
    assert cases.equal(cases.snapshot(model), before)


def test_two_weights_with_one_gradient_are_both_updated() -> None:
    kept, early = Sum(), Sum()
    x = torch.ones(3, 4)
    with (
        TrainStep(kept, cases.adamw(kept), gate=False) as one,
        TrainStep(early, cases.adamw(early), **EARLY) as other,
    ):
        for _ in range(3):
            one(x)
            other(x)
    assert cases.equal(cases.snapshot(kept), cases.snapshot(early))


class Counted(Applied):
    """Notes the most bytes of gradients that were alive whenever one more came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def take_one(self, parameter: Tensor, gradient: Tensor) -> None:
        self.alive.add(gradient)
        self.peak = max(self.peak, sum(g.nbytes for g in self.alive))
        super().take_one(parameter, gradient)


def most_alive(together: int, layers: int = 6, width: int = 32) -> tuple[int, int]:
    """(most bytes of gradients alive, bytes of one layer's), in a backward that updates as it goes."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    moments = Moments(shapes=[(width, width)] * layers, shadowed=())
    moments.fused.prepare([torch.float32] * layers)
    sink = Counted(moments.fused, {id(p): i for i, p in enumerate(model.parameters())}, together)
    segment = Segment([Piece(model, ("x",), ("y",))], ["y"], GraphPool(RecordBackend()), torch.enable_grad)
    sink.begin(torch.ones(()))
    segment._run_eagerly({"x": torch.randn(4, width)}, sink)
    assert sink.taken == layers
    return sink.peak, width * width * 4


@pytest.mark.skipif(DEVICE != "cpu", reason="the recorder is a CPU backend")
def test_one_gradient_is_alive_at_a_time_or_as_many_as_wait_for_each_other() -> None:
    peak, each = most_alive(together=1)
    assert peak == each
    peak, each = most_alive(together=3 * 32 * 32 * 4)
    assert peak == 3 * each
    peak, each = most_alive(together=1 << 30)
    assert peak == 6 * each


@pytest.mark.skipif(DEVICE != "cpu", reason="the recorder is a CPU backend")
def test_compiled_code_hands_its_gradients_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=as_it_is))
    with monkeypatch.context() as compiled:
        compiled.setattr(nn.Linear, "forward", compile_function(nn.Linear.forward, NO_PATTERNS, "cheap"))
        peak, each = most_alive(together=1, layers=2)
    assert peak == each


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parameters_one_after_the_other_get_the_bits_of_all_at_once(implementation: str) -> None:
    whole, parts = (
        Moments(implementation, step={"gate": False}),
        Moments(implementation, step={"gate": False}),
    )
    addresses = torch.tensor([g.data_ptr() for g in parts.gradients], device=DEVICE)
    scale = torch.full((), 0.5, device=DEVICE)
    for _ in range(2):
        for twins in (whole, parts):
            twins.new_gradients()
        whole.fused.step(scale)
        parts.fused.begin(scale)
        for chosen in ((4, 3), (0, 2), (1,)):
            given: Mapping[int, Tensor] = {i: parts.gradients[i] for i in chosen}
            parts.fused.step_some(given, addresses)
    assert same_bits(whole.everything(), parts.everything())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_announcing_the_same_gradients_again_moves_nothing_that_a_graph_may_hold(implementation: str) -> None:
    twins = Moments(implementation, step={"gate": False})
    dtypes = [g.dtype for g in twins.gradients]
    made = vars(twins.fused._kernels).copy()
    twins.fused.prepare(dtypes)
    assert all(vars(twins.fused._kernels)[k] is v for k, v in made.items())
    with pytest.raises(GraphError, match=r"weight0.*float32"):
        twins.fused.prepare([torch.float32, *dtypes[1:]])


def test_a_gradient_of_another_dtype_than_was_announced_is_refused() -> None:
    twins = Moments(step={"gate": False})
    twins.fused.begin()
    with pytest.raises(GraphError, match=r"weight1.*bfloat16"):
        twins.fused.step_some(
            {1: twins.gradients[1].bfloat16()}, torch.zeros(5, dtype=torch.int64, device=DEVICE)
        )


def test_neighbours_in_the_chunk_table_share_a_launch() -> None:
    pytest.importorskip("triton")
    from lf_graph._adamw_triton import Part, merged

    parts = [Part(1, 0, 2), Part(0, 4, 5), Part(0, 0, 3), Part(0, 3, 4), Part(1, 5, 6)]
    assert merged(parts) == [Part(0, 0, 5), Part(1, 0, 2), Part(1, 5, 6)]
