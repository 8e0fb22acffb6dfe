"""The pure judges: one operator and its arguments in, a verdict or None out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lf_graph._rules import (
    CPU_OPERAND,
    CPU_SCALAR,
    CPU_VALUE,
    DEVICE_TO_HOST,
    EARLY_HOST_COPY,
    GENERATOR,
    HOST_CONSTANT,
    HOST_TO_DEVICE,
    classify,
    classify_call,
    transfer,
)
from lf_graph._schema import is_view, op_name, writes

aten = torch.ops.aten
DEVICE = torch.ones(3, device="meta")  # stands for a device tensor: the judges look at types only
HOST = torch.ones(3)
MASK = torch.ones(3, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("source", "to", "non_blocking", "pinned", "pinned_end", "verdict"),
    [
        ("cpu", "cuda", False, False, True, HOST_TO_DEVICE),
        ("cpu", "cuda", True, False, True, HOST_TO_DEVICE),
        ("cpu", "cuda", False, True, True, HOST_TO_DEVICE),
        ("cpu", "cuda", True, True, True, None),
        ("cuda", "cpu", False, False, True, DEVICE_TO_HOST),
        ("cuda", "cpu", True, False, False, DEVICE_TO_HOST),
        ("cuda", "cpu", True, False, True, EARLY_HOST_COPY),
        ("cuda", "cuda", False, False, True, None),
        ("cpu", "cpu", False, False, True, None),
        ("cuda", "meta", False, False, True, None),
    ],
)
def test_copies_are_judged_by_direction_pinning_and_waiting(
    source, to, non_blocking, pinned, pinned_end, verdict
):
    assert transfer(source, to, non_blocking, pinned, pinned_end) is verdict


@given(st.sampled_from(["cpu", "cuda", "npu"]), st.sampled_from(["cpu", "cuda", "npu"]), *[st.booleans()] * 3)
def test_only_a_copy_with_one_end_on_the_host_can_be_wrong(source, to, non_blocking, pinned, pinned_end):
    verdict = transfer(source, to, non_blocking, pinned, pinned_end)
    one_end = (source == "cpu") != (to == "cpu")
    assert verdict is None or one_end
    if one_end and not non_blocking:
        assert verdict is not None
        assert verdict.severity == "error"


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "verdict"),
    [
        (aten._to_copy.default, (HOST,), {"device": torch.device("meta")}, HOST_TO_DEVICE),
        (aten._to_copy.default, (DEVICE,), {"device": torch.device("cpu")}, DEVICE_TO_HOST),
        (aten._to_copy.default, (DEVICE,), {"device": "cpu", "non_blocking": True}, EARLY_HOST_COPY),
        (aten._to_copy.default, (DEVICE,), {"dtype": torch.bfloat16}, None),
        (aten.copy_.default, (DEVICE, HOST), {}, HOST_TO_DEVICE),
        (aten.copy_.default, (HOST, DEVICE, True), {}, DEVICE_TO_HOST),
        (aten.copy_.default, (DEVICE, DEVICE), {}, None),
        (aten.add.Tensor, (DEVICE, HOST), {}, CPU_OPERAND),
        (aten.add.Tensor, (DEVICE, torch.tensor(1.0)), {}, CPU_SCALAR),
        (aten.add.Tensor, (HOST, HOST), {}, None),
        (aten.index.Tensor, (DEVICE, [torch.tensor([0, 1])]), {}, CPU_OPERAND),
        (aten._local_scalar_dense.default, (torch.tensor(1.0),), {}, CPU_VALUE),
        (aten.rand.generator, ([2],), {"generator": torch.Generator()}, GENERATOR),
        (aten.rand.generator, ([2],), {"generator": torch.default_generator}, None),
        (aten.rand.generator, ([2],), {"generator": None}, None),
    ],
)
def test_operators_are_judged_by_where_their_operands_lie(func, args, kwargs, verdict):
    assert classify(func, args, kwargs) is verdict


def test_seeds_of_fused_attention_may_lie_on_the_host():
    args = (*[DEVICE] * 6, None, None, 8, 8, 0.0, False, torch.tensor(0), torch.tensor(0))
    assert classify(aten._scaled_dot_product_flash_attention_backward.default, args, {}) is None


@pytest.mark.parametrize(
    ("args", "dynamic"),
    [
        ((DEVICE, [MASK], DEVICE), True),
        ((DEVICE, [MASK.to(torch.uint8)], DEVICE), True),
        ((DEVICE, [MASK], DEVICE[0]), False),
        ((DEVICE, [MASK], DEVICE[0], True), True),
        ((DEVICE[:, None], [MASK, torch.zeros(1, dtype=torch.long, device="meta")], DEVICE[0]), True),
        ((DEVICE[None], [None, MASK], DEVICE[0]), False),
        ((DEVICE, [torch.zeros(2, dtype=torch.long, device="meta")], DEVICE[:2]), False),
    ],
)
def test_writes_through_a_mask_are_fine_only_where_torch_fills_by_one_value(args, dynamic):
    verdict = classify(aten.index_put_.default, args, {})
    assert (verdict is not None and verdict.kind == "data_dependent_shape") == dynamic


@pytest.mark.parametrize("output_size", [None, 3])
def test_repeat_interleave_is_fine_with_its_size(output_size):
    verdict = classify(aten.repeat_interleave.Tensor, (DEVICE,), {"output_size": output_size})
    assert (verdict is None) == (output_size == 3)


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (aten._local_scalar_dense.default, "host_read"),
        (aten.equal.default, "host_read"),
        (aten.nonzero.default, "data_dependent_shape"),
        (aten.masked_select.default, "data_dependent_shape"),
        (aten._unique2.default, "data_dependent_shape"),
        (aten.unique_dim.default, "data_dependent_shape"),
        (aten.unique_consecutive.default, "data_dependent_shape"),
        (aten.bincount.default, "data_dependent_shape"),
    ],
)
def test_tagged_operators_are_found_and_every_verdict_says_what_to_do(func, kind):
    verdict = classify(func, (DEVICE, DEVICE), {})
    assert verdict is not None
    assert verdict.kind == kind
    assert verdict.severity == "error"
    assert len(verdict.why) > 20
    assert len(verdict.fix) > 10


@pytest.mark.parametrize(
    ("call", "fix"),
    [("__bool__", "torch.where"), ("__int__", "capacity"), ("", "keep the value in a tensor")],
)
def test_the_fix_of_a_read_follows_the_python_call(call, fix):
    verdict = classify(aten._local_scalar_dense.default, (DEVICE,), {}, call)
    assert verdict is not None
    assert fix in verdict.fix


@pytest.mark.parametrize(
    ("name", "args", "result", "target", "verdict"),
    [
        ("tensor", (1.0,), torch.tensor(1.0), "cpu", HOST_CONSTANT),
        ("tensor", (1.0,), torch.tensor(1.0), "cuda", None),
        ("tensor", ([],), torch.tensor([]), "cpu", None),
        ("as_tensor", (HOST,), HOST, "cpu", None),
        ("new_tensor", (HOST, [1.0]), HOST, "cpu", HOST_CONSTANT),
        ("__getitem__", (HOST, [0, 1]), HOST, "cpu", HOST_CONSTANT),
        ("__getitem__", (HOST, (slice(None), 0, None)), HOST, "cpu", None),
        ("__getitem__", (HOST, [0, 1]), HOST, "cuda", None),
        ("cpu", (DEVICE,), None, "meta", DEVICE_TO_HOST),
        ("cpu", (HOST,), None, "cuda", None),
        ("tolist", (HOST,), None, "cuda", CPU_VALUE),
        ("add", (HOST, HOST), HOST, "cpu", None),
    ],
)
def test_calls_are_judged_by_what_they_take_and_give(name, args, result, target, verdict):
    assert classify_call(name, args, result, target) is verdict


def test_names_of_operators_leave_the_overload_out():
    assert op_name(aten.add.Tensor) == "aten.add"
    assert op_name(aten.index_put_.default) == "aten.index_put_"


def test_the_schema_tells_views_and_writes():
    assert is_view(aten.t.default)
    assert is_view(aten.split.Tensor)
    assert not is_view(aten.mul.Tensor)
    assert not is_view(aten.add_.Tensor)
    assert list(writes(aten.add_.Tensor, (HOST, DEVICE), {})) == [HOST]
    assert list(writes(aten._foreach_add_.Scalar, ([HOST, HOST], 1), {})) == [HOST, HOST]
    assert list(writes(aten.add.out, (DEVICE, DEVICE), {"out": HOST})) == [HOST]
    assert list(writes(aten.add.Tensor, (HOST, HOST), {})) == []
