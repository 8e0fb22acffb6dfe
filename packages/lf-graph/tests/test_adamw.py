"""FusedAdamW against torch.optim, in both implementations (Triton by its interpreter where there is no GPU)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from adamw_cases import DEVICE, IMPLEMENTATIONS, SMALL, Twins, assert_twins_equal, cosine, error, same_bits
from torch import nn

from lf_graph import GraphError
from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._flat import FlatParameters, OptimizerError

both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
kinds = pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])


@both
@kinds
def test_twenty_steps_of_a_cosine_schedule_equal_torch(implementation: str, kind: Any) -> None:
    twins = Twins(implementation, kind=kind)
    for step in range(20):
        twins.set_lr(cosine(step), 0.1 * cosine(step))
        twins.step()
    assert_twins_equal(twins)


@both
def test_fp32_gradients_and_no_shadow_equal_torch(implementation: str) -> None:
    twins = Twins(implementation, shadowed=(), half=False)
    for _ in range(5):
        twins.step()
    assert_twins_equal(twins)
    assert twins.flat.shadow.numel() == 0


@both
def test_fp32_gradients_of_shadowed_parameters_equal_torch(implementation: str) -> None:
    twins = Twins(implementation, half=False)
    for _ in range(5):
        twins.step()
    assert_twins_equal(twins)


@both
def test_odd_sizes_and_tensors_crossing_chunks_equal_torch(implementation: str) -> None:
    shapes = ((1,), (3,), (255,), (0,), (1_000_003,), (8192,), (8193,))
    launch = Launch(block=4096, chunk=8192)
    twins = Twins(implementation, shapes=shapes, shadowed=(0, 2, 3, 4, 6), launch=launch)
    for _ in range(2):
        twins.step()
    assert_twins_equal(twins)


@both
@kinds
@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_clipping_equals_clip_grad_norm(implementation: str, kind: Any, clip: float) -> None:
    twins = Twins(implementation, kind=kind, step={"clip": clip})
    for _ in range(10):
        twins.new_gradients()
        norm = torch.nn.utils.clip_grad_norm_(twins.plain, clip)
        twins.reference.step()
        twins.fused.step()
        assert error(twins.fused.norm, norm) < 1e-6
    # Both norms are fp32 sums in another order; exp_avg_sq feels twice their difference.
    assert_twins_equal(twins, 2e-6)


@both
def test_scale_multiplies_gradients_before_norm_and_clipping(implementation: str) -> None:
    twins = Twins(implementation, step={"clip": 0.5})
    scale = torch.tensor([1 / 37], device=DEVICE, dtype=torch.float64)
    for _ in range(5):
        twins.new_gradients()
        for p in twins.plain:
            p.grad *= scale.float().item()
        norm = torch.nn.utils.clip_grad_norm_(twins.plain, 0.5)
        twins.reference.step()
        twins.fused.step(scale)
        assert error(twins.fused.norm, norm) < 1e-6
    assert_twins_equal(twins, 2e-6)


@both
def test_scale_is_forgotten_by_a_step_without_one(implementation: str) -> None:
    twins = Twins(implementation)
    twins.new_gradients()
    twins.fused.step(torch.tensor(3.0, device=DEVICE))
    tripled = twins.fused.norm.clone()
    twins.fused.step()
    assert error(twins.fused.norm * 3, tripled) < 1e-6


@both
def test_shadow_is_the_rounded_master_after_every_step(implementation: str) -> None:
    twins = Twins(implementation)
    for _ in range(8):
        twins.step()
        for p in twins.shadowed:
            assert same_bits([twins.flat.shadow_of(p)], [p.detach().bfloat16()])


@both
def test_ties_of_the_shadow_go_to_even(implementation: str) -> None:
    twins = Twins(implementation, shapes=((128,), (4,)), shadowed=(0,), split=1, lr=0.0)
    ties = 1 + torch.arange(128, device=DEVICE) / 256  # every other one lies between two bf16 numbers
    with torch.no_grad():
        twins.ours[0].copy_(ties)
    twins.step()
    assert same_bits([twins.ours[0].detach()], [ties])
    assert same_bits([twins.flat.shadow_of(twins.ours[0])], [ties.bfloat16()])


@both
def test_gaps_between_parameters_stay_zero(implementation: str) -> None:
    twins = Twins(implementation)
    twins.step()
    for slot in twins.flat.layout.slots:
        slot.view(twins.flat.master).zero_()
        if slot.shadow_offset >= 0:
            slot.shadow_view(twins.flat.shadow).zero_()
    assert not twins.flat.master.any()
    assert not twins.flat.shadow.any()


@both
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1])
def test_a_non_finite_gradient_changes_no_bit(implementation: str, bad: float, where: int) -> None:
    twins = Twins(implementation, step={"clip": 1.0})
    twins.step()
    before = twins.everything()
    twins.gradients[where].view(-1)[-1] = bad
    twins.fused.step()
    assert same_bits(twins.everything(), before)
    assert not math.isfinite(float(twins.fused.norm))
    assert int(twins.fused.skipped) == 1


@both
def test_a_non_finite_scale_changes_no_bit(implementation: str) -> None:
    twins = Twins(implementation)
    twins.step()
    before = twins.everything()
    twins.fused.step(1 / torch.zeros((), device=DEVICE))
    assert same_bits(twins.everything(), before)
    assert int(twins.fused.skipped) == 1


@both
def test_training_goes_on_after_a_skipped_step_as_if_it_had_not_been(implementation: str) -> None:
    twins = Twins(implementation)
    for step in range(6):
        if step in (0, 3):
            twins.gradients[0].fill_(math.nan)
            twins.fused.step()
        twins.step()
    assert_twins_equal(twins)
    assert int(twins.fused.skipped) == 2
    assert twins.flat.steps.tolist() == [6.0] * 5


@both
def test_without_the_gate_a_nan_reaches_the_weights_as_in_torch(implementation: str) -> None:
    twins = Twins(implementation, step={"gate": False})
    twins.new_gradients()
    twins.gradients[1][0] = math.nan
    twins.fused.step()
    assert twins.ours[1].isnan().tolist() == [True, False, False]
    assert int(twins.fused.skipped) == 0
    assert twins.flat.steps.tolist() == [1.0] * 5
    assert math.isnan(float(twins.fused.norm))  # nobody asked for it


@both
def test_step_counts_are_each_parameters_own(implementation: str) -> None:
    twins = Twins(implementation)
    for optimizer, ps in ((twins.optimizer, twins.ours), (twins.reference, twins.plain)):
        for i, p in enumerate(ps):
            fresh = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.ones_like(p),
            }
            state = optimizer.state.setdefault(p, fresh)
            state["step"].fill_(float(i * i))
            state["exp_avg_sq"].fill_(0.5)
    for _ in range(3):
        twins.step()
    assert_twins_equal(twins)
    assert twins.flat.steps.tolist() == [3.0, 4.0, 7.0, 12.0, 19.0]


@both
def test_changed_hyper_parameters_count_from_the_next_refresh(implementation: str) -> None:
    twins = Twins(implementation)
    twins.step()
    for optimizer in (twins.optimizer, twins.reference):
        optimizer.param_groups[0].update(betas=(0.8, 0.95), eps=1e-5, weight_decay=0.3)
        optimizer.param_groups[1].update(lr=0.0)
    twins.step()
    assert_twins_equal(twins)
    before = twins.everything()
    twins.set_lr(1.0, 1.0)
    twins.new_gradients()
    twins.fused.step()  # no refresh: the second group still has lr 0
    slot = twins.flat.layout.slots[3]
    assert torch.equal(slot.view(before[0]), slot.view(twins.flat.master))


@both
def test_tensor_learning_rates_are_read_where_they_are(implementation: str) -> None:
    twins = Twins(implementation)
    lr = torch.tensor([0.01], device=DEVICE)
    twins.optimizer.param_groups[0]["lr"] = lr
    for step in range(6):
        lr.fill_(cosine(step, 6))
        twins.reference.param_groups[0]["lr"] = float(lr)
        twins.step()
    assert_twins_equal(twins)
    twins.set_lr(0.0, 0.0)  # numbers again
    twins.step()
    assert_twins_equal(twins)


@both
def test_a_scheduler_drives_the_learning_rate(implementation: str) -> None:
    twins = Twins(implementation)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in (twins.optimizer, twins.reference)
    ]
    twins.optimizer.step()  # torch warns of a scheduler whose optimizer never stepped
    twins.reference.step()
    for _ in range(10):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_twins_equal(twins)


@both
def test_checkpoints_go_both_ways_between_ours_and_plain_torch(implementation: str) -> None:
    first, second = Twins(implementation), Twins(implementation)
    for _ in range(3):
        first.step()
    ours, plain = copy.deepcopy(first.optimizer.state_dict()), copy.deepcopy(first.reference.state_dict())
    second.optimizer.load_state_dict(plain)
    second.reference.load_state_dict(ours)
    with torch.no_grad():
        for mine, other, source in zip(second.ours, second.plain, first.plain, strict=True):
            mine.copy_(source)
            other.copy_(source)
    second.flat.refresh_shadow()
    for _ in range(3):
        second.step()
    assert_twins_equal(second)
    assert second.flat.steps.tolist() == [6.0] * 5


@both
def test_another_set_of_gradients_is_read_after_use(implementation: str) -> None:
    twins = Twins(implementation)
    others = [torch.zeros_like(g) for g in twins.gradients]
    second = twins.fused.set_gradients(others)
    for step in range(6):
        table, gradients = [(twins.table, twins.gradients), (second, others)][step % 2]
        twins.new_gradients()
        for g, value in zip(gradients, [g.clone() for g in twins.gradients], strict=True):
            g.copy_(value)
        for g in others if gradients is twins.gradients else twins.gradients:
            g.fill_(math.nan)
        twins.fused.use(table)
        twins.reference.step()
        twins.fused.step()
    assert_twins_equal(twins)
    assert int(twins.fused.skipped) == 0


@both
def test_tied_parameters_step_once(implementation: str) -> None:
    layer = nn.Linear(4, 4, bias=False).to(DEVICE)
    twin = copy.deepcopy(layer).weight
    flat = FlatParameters(torch.optim.AdamW(nn.ModuleList([layer, layer]).parameters()), [layer.weight])
    fused = FusedAdamW(flat, implementation=implementation, launch=SMALL)
    fused.set_gradients([torch.ones(4, 4, device=DEVICE, dtype=torch.bfloat16)])
    twin.grad = torch.ones(4, 4, device=DEVICE)
    torch.optim.AdamW([twin]).step()
    fused.step()
    assert error(layer.weight, twin) < 1e-6


@both
def test_implementations_report_themselves(implementation: str) -> None:
    twins = Twins(implementation)
    assert (twins.fused.implementation, twins.fused.reason) == (implementation, "asked for")


def test_auto_says_why_it_chose() -> None:
    fused = FusedAdamW(Twins().flat)
    if DEVICE == "cpu":
        assert (fused.implementation, fused.reason) == ("torch", "parameters are on the CPU")
    else:
        assert fused.implementation == "triton"


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton runs here")
def test_triton_without_gpu_or_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptimizerError, match="implementation='auto' or 'torch'"):
        FusedAdamW(Twins().flat, implementation="triton")


def test_bad_arguments_are_refused() -> None:
    flat = Twins().flat
    with pytest.raises(ValueError, match="'auto', 'triton' or 'torch'"):
        FusedAdamW(flat, implementation="cuda")
    for clip in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="clip"):
            FusedAdamW(flat, clip=clip)
    for sizes in (
        {"block": 100},
        {"block": 0},
        {"chunk": 1000},
        {"vector": 3},
        {"warps": 0},
        {"warps": 3},
        {"chunk": 64, "block": 64},
        {"programs": -1},
    ):
        with pytest.raises(ValueError, match=r"Launch|block|chunk|vector"):
            Launch(**sizes)


def test_unreadable_gradients_are_refused_by_name() -> None:
    twins = Twins()
    good = list(twins.gradients)

    def refused(index: int, gradient: Any, message: str) -> None:
        with pytest.raises(OptimizerError, match=message) as caught:
            twins.fused.set_gradients([gradient if i == index else g for i, g in enumerate(good)])
        assert caught.value.subject == f"weight{index}"
        assert isinstance(caught.value, GraphError)

    refused(3, None, "no gradient.*freeze")
    refused(0, good[0].double(), "float64.*bf16 or fp32")
    refused(0, torch.eye(7, device=DEVICE)[:, :5].to_sparse(), "sparse")
    refused(0, torch.zeros(5, 7, device=DEVICE).t(), "contiguous")
    refused(1, torch.zeros(4, device=DEVICE)[1:], "16-byte aligned")
    refused(1, torch.zeros(4, device=DEVICE), r"\[4\].*\[3\]")
    refused(1, torch.zeros(3, device="meta"), "meta")
    refused(0, good[0].float(), "was torch.bfloat16 and is torch.float32")
    with pytest.raises(OptimizerError, match="4 for 5 parameters"):
        twins.fused.set_gradients(good[:-1])


def test_a_step_without_gradients_is_refused() -> None:
    with pytest.raises(OptimizerError, match="set_gradients before step"):
        FusedAdamW(Twins().flat).step()


def test_a_table_of_another_optimizer_is_refused() -> None:
    twins, other = Twins(), Twins()
    with pytest.raises(OptimizerError, match="another optimizer"):
        twins.fused.use(other.table)


def test_a_group_added_later_is_refused() -> None:
    twins = Twins()
    twins.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=DEVICE))]})
    with pytest.raises(OptimizerError, match="add_param_group"):
        twins.fused.refresh_hyper()


def test_unchanged_hyper_parameters_cost_no_device_work() -> None:
    twins = Twins()
    twins.fused.refresh_hyper()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        twins.fused.refresh_hyper()
    assert not [e.name for e in profile.events() if e.name.startswith("aten::")]


@both
def test_state_and_results_stay_at_their_addresses(implementation: str) -> None:
    twins = Twins(implementation, step={"clip": 1.0})
    f = twins.flat
    held = [f.master, f.exp_avg, f.exp_avg_sq, f.shadow, f.steps, twins.fused.norm, twins.fused.skipped]
    before = [t.data_ptr() for t in held]
    twins.step()
    now = [f.master, f.exp_avg, f.exp_avg_sq, f.shadow, f.steps, twins.fused.norm, twins.fused.skipped]
    assert [t.data_ptr() for t in now] == before
    f.verify_addresses()
