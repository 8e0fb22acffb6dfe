"""Planned buckets are those that DDP makes, the same on all ranks, and never a reason for other gradients."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import comm_schedule_jobs as jobs
import pytest
import torch
from comm_ranks import Ranks
from torch import nn

import lf_comm
from lf_comm._buckets import DEFAULT_BYTES, FIRST_BYTES, ddp_buckets, exposed
from lf_comm._plan import decide
from lf_comm._timer import same_order

DEFAULT = (FIRST_BYTES, DEFAULT_BYTES)
lists = pytest.mark.skipif(
    "bucket_cap_mb_list" not in lf_comm.supported_levers(), reason="this torch's DDP takes no list of sizes"
)
UNUSED = {"find_unused_parameters": True}


@lists
@pytest.mark.parametrize("what", ["", "tied", "frozen", "empty", "norm", "two dtypes"])
def test_ddp_makes_the_buckets_of_the_plan(ranks: Ranks, what: str) -> None:
    first, second = ranks.call(jobs.planned, 2, what=what, options={})
    assert first["json"] == second["json"]
    assert first["lever"] == "bucket_cap_mb_list"
    assert first["made"] == first["planned"]
    assert len(first["made"]) > 1
    assert first["exposed"][0] < first["exposed"][1]
    assert first["gradients"] == second["gradients"]
    # of two ranks a sum has one order only
    assert first["gradients"] == ranks.call(jobs.with_defaults, 2, what=what, options={})[0]


@lists
@pytest.mark.parametrize("what", ["", "experts"])
def test_with_unused_parameters_buckets_are_cut_as_parameters_are_defined(ranks: Ranks, what: str) -> None:
    first, second = ranks.call(jobs.planned, 2, what=what, options=UNUSED)
    assert first["json"] == second["json"]
    assert first["lever"] == "bucket_cap_mb_list"
    assert first["bytes"] == first["sizes"]
    assert first["gradients"] == second["gradients"]
    assert first["gradients"] == ranks.call(jobs.with_defaults, 2, what=what, options=UNUSED)[0]


def test_sparse_gradients_have_buckets_of_their_own(ranks: Ranks) -> None:
    first, second = ranks.call(jobs.planned, 2, what="sparse", options={})
    assert first["json"] == second["json"]
    assert ["table.weight"] in first["planned"]
    assert first["made"] == first["planned"]


def test_one_layer_is_planned_with_more_ranks(ranks: Ranks) -> None:
    answers = ranks.call(jobs.planned, 4, what="one layer", options={})
    assert len({answer["json"] for answer in answers}) == 1
    assert sorted(n for bucket in answers[0]["planned"] for n in bucket) == [
        "layers.0.bias",
        "layers.0.weight",
    ]


def test_one_rank_keeps_the_defaults(ranks: Ranks) -> None:
    (found,) = ranks.call(jobs.planned, 1, what="", options={})
    assert found["lever"] == "default"
    assert "nothing exposed" in found["text"]


def test_after_a_trial_all_ranks_have_the_plan_that_was_measured(ranks: Ranks) -> None:
    for options in ({}, {"static_graph": True, "gradient_as_bucket_view": True}):
        answers = ranks.call(jobs.planned, 2, what="", options=options, trial_steps=1)
        assert len({answer["json"] for answer in answers}) == 1
        plan = lf_comm.BucketPlan.from_json(answers[0]["json"])
        assert plan.measured is not None
        assert (plan.lever == "default") == (
            plan.measured.default_s - plan.measured.planned_s <= plan.measured.noise_s
        )
        assert "exposed" in answers[0]["text"]


def test_a_plan_leaves_no_trace(ranks: Ranks) -> None:
    for found in ranks.call(jobs.leaves_no_trace, 2):
        assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize(
    ("what", "where", "parameters"),
    [
        ("order by step", "step 1", {"layers.3.weight", "layers.3.bias"}),
        ("order by rank", "rank 1", {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}),
        ("experts", "rank 1", {f"layers.{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}),
    ],
)
def test_an_order_that_changes_is_refused_by_name_on_all_ranks(
    ranks: Ranks, what: str, where: str, parameters: set[str]
) -> None:
    answers = ranks.call(jobs.refused, 2, what=what, options={})
    for kind, parameter, text in answers:
        assert kind == "OrderChangedError"
        assert parameter in parameters
        assert where in text
    assert answers[0] == answers[1]


def test_when_one_rank_fails_the_others_do_not_wait(ranks: Ranks) -> None:
    answers = ranks.call(jobs.failing, 3)
    assert answers[1] == "KeyError: 'no batch'"
    assert all("rank 1 failed" in answers[rank] for rank in (0, 2))


def test_exposed_communication_is_step_less_compute(ranks: Ranks) -> None:
    for found in ranks.call(jobs.exposed, 2):
        step, compute = found["times"]
        assert step > 0
        assert compute > 0
        assert found["exposed"] == max(0.0, step - compute)
        assert found["gradient"]
        assert "static_graph" in found["said"]


def profile(count: int = 6, nbytes: int = 2 << 20) -> lf_comm.Profile:
    """A model of equal layers, 10 ms each."""
    gradients = tuple(lf_comm.Gradient(f"w{i}", nbytes, 0.01 * (count - i), 0.005 * i) for i in range(count))
    return lf_comm.Profile(gradients, tuple(reversed(range(count))), 0.005 * count, 0.01 * count)


def test_a_plan_says_what_it_hides_and_survives_json() -> None:
    plan = lf_comm.make_plan(profile(), lf_comm.Wire(1e-4, 4e-9))
    assert plan.ddp_options() == {"bucket_cap_mb_list": list(plan.caps_mb)}
    assert plan.exposed_s == pytest.approx(1e-4 + (2 << 20) * 4e-9, rel=0.05)
    assert sum(b.nbytes for b in plan.buckets) == 6 * (2 << 20)
    assert plan.order_stall_s <= plan.arrival_stall_s
    measured = replace(plan, measured=lf_comm.Measured(1.0, 2.0, 1.5, 0.1))
    assert lf_comm.BucketPlan.from_json(measured.to_json()) == measured
    assert "not applied" in str(measured)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "lever": "x"}', "[" * 100_000, '{"version": 1}'],
)
def test_other_json_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match="no plan"):
        lf_comm.BucketPlan.from_json(text)


@pytest.mark.parametrize("quicker", [1.0, 1.2, 1.5, 2.0])
def test_a_plan_from_a_slow_measurement_still_serves_a_quicker_backward(quicker: float) -> None:
    wire, measured = lf_comm.Wire(1e-4, 4e-9), profile(16, 4 << 20)
    plan = lf_comm.make_plan(measured, wire)
    real = replace(
        measured,
        gradients=tuple(replace(g, ready_s=g.ready_s / quicker) for g in measured.gradients),
        backward_s=measured.backward_s / quicker,
    )
    index = {g.name: i for i, g in enumerate(real.gradients)}
    buckets = [[index[name] for name in bucket.names] for bucket in plan.buckets]
    best = lf_comm.make_plan(real, wire).exposed_s
    assert exposed(real, buckets, wire) <= best + 0.15 * real.backward_s
    assert exposed(real, buckets, wire) < exposed(real, ddp_buckets(real, DEFAULT, rebuilt=True), wire)


def test_where_ddp_takes_no_list_one_size_is_planned() -> None:
    wire = lf_comm.Wire(1e-4, 4e-9)
    plan = lf_comm.make_plan(profile(), wire, levers=("bucket_cap_mb",))
    assert plan.ddp_options() == {"bucket_cap_mb": plan.caps_mb[0]}
    assert plan.lever == "bucket_cap_mb"
    assert plan.exposed_s < plan.default_exposed_s


def test_defaults_stay_where_nothing_is_gained() -> None:
    fast = lf_comm.make_plan(profile(), lf_comm.Wire(0.0, 1e-15))
    assert fast.ddp_options() == {}
    assert "less than 1 %" in fast.reason
    no_lever = lf_comm.make_plan(profile(), lf_comm.Wire(1e-4, 5e-9), levers=())
    assert no_lever.lever == "default"
    assert "neither" in no_lever.reason
    nothing = lf_comm.make_plan(profile(nbytes=0), lf_comm.Wire(1e-4, 5e-9))
    assert nothing.lever == "default"


def test_a_plan_that_was_not_faster_by_more_than_noise_is_dropped() -> None:
    wire = lf_comm.Wire(1e-4, 5e-9)
    plan, no_plan = lf_comm.make_plan(profile(), wire), lf_comm.make_plan(profile(), wire, levers=())
    steady, before = [0.1] * 4, [[0.2, 0.2]] * 4

    def decided(planned: list[list[float]], default: list[list[float]] = before) -> lf_comm.BucketPlan:
        return decide(plan, no_plan, lf_comm.Measured.of(steady, default, planned))

    assert decided([[0.15, 0.15]] * 4).lever == plan.lever
    dropped = decided([[0.1995, 0.1995]] * 4)
    assert dropped.lever == "default"
    assert "noise" in dropped.reason
    # faster and slower by turns
    assert decided([[0.1], [0.25], [0.1], [0.25]], [[0.2]] * 4).lever == "default"
    # one round of four was disturbed
    assert decided([[0.15], [0.15], [0.9], [0.15]], [[0.2]] * 4).lever == plan.lever
    assert decided([[0.2]] * 4, [[0.2], [0.2], [0.9], [0.2]]).lever == "default"
    # a drift of the machine, which moves both
    assert decided([[0.15], [0.35], [0.55], [0.75]], [[0.2], [0.4], [0.6], [0.8]]).lever == plan.lever


def test_the_timer_orders_gradients_and_uses() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    timer = lf_comm.BackwardTimer(net)
    for _ in range(3):
        with timer.step():
            net(torch.ones(2, 8)).sum().backward()
    found = timer.profile()
    names = [found.gradients[i].name for i in found.arrival]
    assert {name[0] for name in names[:2]} == {"1"}
    assert {name[0] for name in names[2:]} == {"0"}
    ready = [found.gradients[i].ready_s for i in found.arrival]
    assert ready == sorted(ready)
    assert 0 < ready[-1] <= found.backward_s
    uses = {g.name: g.use_s for g in found.gradients}
    assert uses["0.weight"] <= uses["1.weight"] <= found.forward_s
    assert [g.nbytes for g in found.gradients] == [256, 32, 256, 32]
    assert not net[0]._forward_pre_hooks
    assert not net[0].weight._post_accumulate_grad_hooks


class Head(nn.Module):
    """Uses the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight


def test_a_parameter_of_a_module_that_is_not_called_is_used_when_the_module_around_begins() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Head())
    net[2].inner.bias.requires_grad_(False)
    timer = lf_comm.BackwardTimer(net)
    with timer.step():
        net(torch.ones(2, 8)).sum().backward()
    uses = {g.name: g.use_s for g in timer.profile().gradients}
    assert uses["0.weight"] < uses["1.weight"] < uses["2.inner.weight"]


def test_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(lf_comm.ScheduleError, match="no parameter"):
        lf_comm.BackwardTimer(nn.ReLU())
    timer = lf_comm.BackwardTimer(nn.Linear(2, 2))
    with pytest.raises(lf_comm.ScheduleError, match="no step"):
        timer.profile()
    with pytest.raises(lf_comm.ScheduleError, match="did not call"), timer.step():
        pass


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"steps": 0}, ValueError),
        ({"trial_steps": -1}, ValueError),
        ({"ddp_options": {"bucket_cap_mb": 3}}, ValueError),
    ],
)
def test_options_without_meaning_are_refused_before_anything_is_sent(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        lf_comm.plan_buckets(nn.Linear(2, 2), lambda m: None, **options)


def test_orders_may_differ_in_what_they_do_not_share_only_where_ddp_looks_for_it() -> None:
    same_order([["a", "b"], ["a", "c", "b"]], ["step 0", "step 1"], True)
    with pytest.raises(lf_comm.OrderChangedError, match="c: has no gradient") as caught:
        same_order([["a", "b"], ["a", "c", "b"]], ["step 0", "step 1"], False)
    assert caught.value.where == "step 0"
    with pytest.raises(lf_comm.OrderChangedError, match="another place"):
        same_order([["a", "b", "c"], ["b", "a"]], ["step 0", "step 1"], True)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.parameter, error.where) == ("c", "step 0")
