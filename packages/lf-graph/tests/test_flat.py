"""The flat layout as data, and FlatParameters behind a model and its optimizer."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from adamw_cases import DEVICE, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lf_graph import AddressError, GraphError
from lf_graph._flat import ALIGNMENT, FlatParameters, OptimizerError, Request, cut_chunks, plan_layout

shapes = st.lists(st.integers(0, 400), max_size=3).map(tuple)
requests = st.lists(st.builds(Request, st.text(), st.integers(0, 3), shapes, st.booleans()), max_size=12)


@given(requests)
@settings(max_examples=60, deadline=None)
def test_slots_follow_each_other_aligned_and_apart(wanted: list[Request]) -> None:
    layout = plan_layout(wanted)
    end = shadow_end = 0
    for request, slot in zip(wanted, layout.slots, strict=True):
        assert (slot.name, slot.group, slot.shape) == (request.name, request.group, request.shape)
        assert slot.offset * 4 % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot.numel
        assert (slot.shadow_offset >= 0) == request.shadowed
        if request.shadowed:
            assert slot.shadow_offset * 2 % ALIGNMENT == 0
            assert slot.shadow_offset >= shadow_end
            shadow_end = slot.shadow_offset + slot.numel
    assert end <= layout.elements < end + ALIGNMENT // 4 * (1 + len(wanted))
    assert shadow_end <= layout.shadow_elements


@given(requests, st.sampled_from([128, 256, 1024]))
@settings(max_examples=60, deadline=None)
def test_chunks_cover_every_element_of_the_chosen_tensors_once(wanted: list[Request], length: int) -> None:
    layout = plan_layout([Request(r.name, r.group, r.shape[:2], r.shadowed) for r in wanted])
    chosen = list(range(0, len(wanted), 2))
    seen: dict[int, list[int]] = {i: [] for i in chosen}
    for tensor, start, offset, shadow, count in cut_chunks(layout, chosen, length).tolist():
        slot = layout.slots[tensor]
        assert offset == slot.offset + start
        assert shadow == (slot.shadow_offset + start if slot.shadow_offset >= 0 else -1)
        assert 0 < count <= length
        seen[tensor] += [start, count]
    for i in chosen:
        starts, counts = seen[i][::2], seen[i][1::2]
        assert starts == [sum(counts[:k]) for k in range(len(counts))]
        assert sum(counts) == layout.slots[i].numel


def test_offsets_pass_32_bits() -> None:
    layout = plan_layout([Request("big", 0, (70_000, 40_000), True), Request("next", 0, (3,), True)])
    rows = cut_chunks(layout, [0, 1], 1 << 20)
    assert rows.dtype == np.int64
    assert rows[-1].tolist() == [1, 0, 2_800_000_000, 2_800_000_000, 3]


@pytest.mark.parametrize("length", [0, 64, 100, -128])
def test_chunks_that_would_lose_alignment_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        cut_chunks(plan_layout([]), [], length)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).to(DEVICE)


def train(m: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        m(torch.full((2, 5), 0.3 + i, device=DEVICE)).square().sum().backward()
        optimizer.step()


def flatten(m: nn.Module, optimizer: torch.optim.Optimizer) -> FlatParameters:
    weights = [p for p in m.parameters() if p.dim() == 2]
    return FlatParameters(optimizer, weights, names=m.named_parameters())


def adamw(m: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(m.parameters(), lr=1e-2)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"]
    return [torch.as_tensor(v).cpu() for i in sorted(states) for _, v in sorted(states[i].items())]


def test_parameters_keep_identity_shape_and_values_and_become_views() -> None:
    m = model()
    before = [(p, p.detach().clone()) for p in m.parameters()]
    flat = flatten(m, adamw(m))
    for (p, value), now, slot in zip(before, m.parameters(), flat.layout.slots, strict=True):
        assert now is p
        assert torch.equal(p, value)
        assert p.is_contiguous()
        assert p.requires_grad
        assert p.data_ptr() == flat.master.data_ptr() + 4 * slot.offset
    assert [s.name for s in flat.layout.slots] == [n for n, _ in m.named_parameters()]


def test_gaps_between_parameters_are_zero() -> None:
    m = model()
    flat = flatten(m, adamw(m))
    for slot in flat.layout.slots:
        slot.view(flat.master).zero_()
    assert not flat.master.any()


def test_shadows_are_bf16_copies_of_the_chosen_parameters_only() -> None:
    m = model()
    flat = flatten(m, adamw(m))
    for p in m.parameters():
        assert flat.has_shadow(p) == (p.dim() == 2)
    assert torch.equal(flat.shadow_of(m[0].weight), m[0].weight.detach().bfloat16())
    assert flat.shadow_of(m[0].weight).shape == (7, 5)
    with pytest.raises(KeyError):
        flat.shadow_of(m[0].bias)


def test_tied_weights_have_one_place() -> None:
    m = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(DEVICE)
    m[1].weight = m[0].weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([m[0].weight, m[1].weight])
    flat = FlatParameters(optimizer, [m[0].weight, m[1].weight])
    assert len(flat.parameters) == 1
    assert m[1].weight.data_ptr() == m[0].weight.data_ptr() == flat.master.data_ptr()


def test_frozen_parameters_are_left_alone() -> None:
    m = model()
    m[0].weight.requires_grad_(False)
    address = m[0].weight.data_ptr()
    optimizer = adamw(m)
    flat = FlatParameters(optimizer)
    assert m[0].weight.data_ptr() == address
    assert len(flat.parameters) == 4
    assert m[0].weight not in optimizer.state


def test_parameters_in_other_memory_formats_become_contiguous() -> None:
    conv = nn.Conv2d(3, 4, 2).to(DEVICE).to(memory_format=torch.channels_last)
    value = conv.weight.detach().clone()
    FlatParameters(adamw(conv))
    assert conv.weight.is_contiguous()
    assert torch.equal(conv.weight, value)


def test_state_of_a_trained_optimizer_is_carried_over() -> None:
    m = model()
    optimizer = adamw(m)
    train(m, optimizer)
    before = [t.clone() for t in tensors_of(optimizer)]
    flat = flatten(m, optimizer)
    assert same_bits(tensors_of(optimizer), before)
    assert flat.steps.tolist() == [2.0] * 5
    assert optimizer.state[m[0].weight]["exp_avg"].data_ptr() == flat.exp_avg.data_ptr()


def test_a_new_optimizer_gets_zero_state() -> None:
    m = model()
    optimizer = adamw(m)
    flatten(m, optimizer)
    assert set(optimizer.state[m[0].bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(t.any() for t in tensors_of(optimizer))


def test_torch_trains_on_the_views_as_before_and_the_shadow_follows() -> None:
    a, b = model(), model()
    oa, ob = adamw(a), adamw(b)
    flat = flatten(a, oa)
    train(a, oa, 3)
    train(b, ob, 3)
    assert same_bits([p.detach() for p in a.parameters()], [p.detach() for p in b.parameters()])
    assert same_bits(tensors_of(oa), tensors_of(ob))
    assert torch.equal(flat.shadow_of(a[2].weight), a[2].weight.detach().bfloat16())
    flat.verify_addresses()


def test_loading_a_plain_checkpoint_flows_into_the_buffers() -> None:
    a, b = model(), model()
    oa, ob = adamw(a), adamw(b)
    train(b, ob, 3)
    flat = flatten(a, oa)
    a.load_state_dict(b.state_dict())
    oa.load_state_dict(copy.deepcopy(ob.state_dict()))
    flat.verify_addresses()
    assert same_bits(tensors_of(oa), tensors_of(ob))
    assert flat.steps.tolist() == [3.0] * 5
    for p, slot in zip(a.parameters(), flat.layout.slots, strict=True):
        assert torch.equal(slot.view(flat.exp_avg), oa.state[p]["exp_avg"])
    assert torch.equal(flat.shadow_of(a[0].weight), b[0].weight.detach().bfloat16())


def test_loading_empty_state_resets() -> None:
    m = model()
    optimizer = adamw(m)
    fresh = copy.deepcopy(optimizer.state_dict())
    train(m, optimizer)
    flat = flatten(m, optimizer)
    optimizer.load_state_dict(fresh)
    assert not flat.exp_avg.any()
    assert not flat.steps.any()
    flat.verify_addresses()


def test_plain_torch_reads_our_checkpoint_from_a_file() -> None:
    a, b = model(), model()
    oa, ob = adamw(a), adamw(b)
    flatten(a, oa)
    train(a, oa, 2)
    file = io.BytesIO()
    torch.save((a.state_dict(), oa.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    b.load_state_dict(weights)
    ob.load_state_dict(state)
    train(a, oa, 2)
    train(b, ob, 2)
    assert same_bits([p.detach() for p in a.parameters()], [p.detach() for p in b.parameters()])
    assert same_bits(tensors_of(oa), tensors_of(ob))


def test_refresh_shadow_follows_a_loaded_model() -> None:
    m = model()
    flat = flatten(m, adamw(m))
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})
    assert not torch.equal(flat.shadow_of(m[0].weight), m[0].weight.detach().bfloat16())
    flat.refresh_shadow()
    assert torch.equal(flat.shadow_of(m[0].weight), m[0].weight.detach().bfloat16())


def test_state_of_other_shapes_is_refused_by_name() -> None:
    m = model()
    optimizer = adamw(m)
    train(m, optimizer)
    optimizer.state[m[0].bias]["exp_avg"] = torch.zeros(1, device=DEVICE)
    with pytest.raises(OptimizerError, match=r"exp_avg of 0\.bias.*\[1\].*\[7\]"):
        flatten(m, optimizer)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_unsupported_options_are_refused(option: str) -> None:
    m = model()
    with pytest.raises(OptimizerError, match=f"{option}=False") as caught:
        FlatParameters(torch.optim.AdamW(m.parameters(), **{option: True}))
    assert isinstance(caught.value, GraphError)
    assert caught.value.subject == option


def test_options_are_checked_again_after_loading() -> None:
    m = model()
    optimizer = adamw(m)
    other = torch.optim.AdamW(model().parameters(), amsgrad=True)
    flatten(m, optimizer)
    with pytest.raises(OptimizerError, match="amsgrad"):
        optimizer.load_state_dict(other.state_dict())


class _Own(torch.optim.AdamW):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Another rule."""


class _Renamed(torch.optim.AdamW):
    """The same rule."""


def test_only_the_update_rules_of_adam_and_adamw_are_taken() -> None:
    with pytest.raises(OptimizerError, match=r"SGD.*not that of"):
        FlatParameters(torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="_Own"):
        FlatParameters(_Own(model().parameters()))
    FlatParameters(_Renamed(model().parameters()))
    FlatParameters(torch.optim.Adam(model().parameters()))


def test_a_bf16_model_is_refused_with_the_way_out() -> None:
    m = model().bfloat16()
    with pytest.raises(OptimizerError, match=r"0\.weight: it is torch.bfloat16.*model\.float\(\)"):
        flatten(m, adamw(m))


def test_odd_parameters_are_refused_by_name() -> None:
    sparse = nn.Parameter(torch.eye(3, device=DEVICE).to_sparse())
    with pytest.raises(OptimizerError, match=r"group 0 parameter 0.*sparse"):
        FlatParameters(torch.optim.AdamW([sparse]))
    with pytest.raises(OptimizerError, match="meta"):
        FlatParameters(torch.optim.AdamW([nn.Parameter(torch.zeros(3, device="meta"))]))
    with pytest.raises(OptimizerError, match="no trainable"):
        FlatParameters(torch.optim.AdamW([nn.Parameter(torch.zeros(3), requires_grad=False)]))
    values = torch.zeros(3, device=DEVICE)
    pair = [("a", nn.Parameter(values)), ("b", nn.Parameter(values))]
    with pytest.raises(OptimizerError, match="b: it shares its memory with a"):
        FlatParameters(torch.optim.AdamW(pair))


def test_a_refusal_changes_nothing() -> None:
    m = model()
    optimizer = adamw(m)
    addresses = [p.data_ptr() for p in m.parameters()]
    with pytest.raises(OptimizerError, match="1 of them"):
        FlatParameters(optimizer, [nn.Parameter(torch.zeros(2))])
    assert [p.data_ptr() for p in m.parameters()] == addresses
    assert not optimizer.state


def test_replaced_data_is_noticed_by_name() -> None:
    m = model()
    flat = flatten(m, adamw(m))
    flat.verify_addresses()
    m[1].bias.data = m[1].bias.data.clone()
    with pytest.raises(AddressError, match=r"data of 1\.bias was replaced"):
        flat.verify_addresses()


def test_replaced_state_is_noticed_by_name() -> None:
    m = model()
    optimizer = adamw(m)
    flat = flatten(m, optimizer)
    optimizer.state[m[0].weight]["exp_avg_sq"] = torch.zeros(7, 5, device=DEVICE)
    with pytest.raises(AddressError, match=r"exp_avg_sq of 0\.weight"):
        flat.verify_addresses()
    optimizer.state.clear()
    with pytest.raises(AddressError, match=r"step of 0\.weight"):
        flat.verify_addresses()


def test_parameters_added_or_unfrozen_later_are_noticed() -> None:
    m = model()
    m[2].weight.requires_grad_(False)
    optimizer = adamw(m)
    flat = flatten_trainable(m, optimizer)
    m[2].weight.requires_grad_(True)
    with pytest.raises(AddressError, match="group 0 parameter 4 was added"):
        flat.verify_addresses()
    m[2].weight.requires_grad_(False)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=DEVICE))]})
    with pytest.raises(AddressError, match="group 1 parameter 0 was added"):
        flat.verify_addresses()


def flatten_trainable(m: nn.Module, optimizer: torch.optim.Optimizer) -> FlatParameters:
    return FlatParameters(optimizer, [p for p in m.parameters() if p.requires_grad])


def test_close_lets_the_optimizer_go() -> None:
    m = model()
    optimizer = adamw(m)
    flat = flatten(m, optimizer)
    flat.close()
    flat.close()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(AddressError):
        flat.verify_addresses()


def test_empty_parameters_take_no_room() -> None:
    p, q = nn.Parameter(torch.zeros(0, 4, device=DEVICE)), nn.Parameter(torch.ones(2, device=DEVICE))
    flat = FlatParameters(torch.optim.AdamW([p, q]), [p, q])
    assert [s.offset for s in flat.layout.slots] == [0, 0]
    assert p.shape == (0, 4)
    flat.verify_addresses()
