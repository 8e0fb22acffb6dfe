"""check: values and shapes that the host reads, copies and constants, and what a report tells of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from check_cases import GPT, TOKENS, X, kinds, only
from marks import marks_of

from lf_graph import GraphCaptureError
from lf_graph._check import check

at = marks_of(__file__)


def item(x):
    return x * x.sum().item()  # at: item


def as_bool(x):
    if x.sum() > 0:  # at: bool
        x = x + 1
    return x


def as_int(x):
    return x[:, : int(x[0, 0])]  # at: int


def as_float(x):
    return x * float(x.max())  # at: float


def as_index(x):
    return x, len(range(x.long()[0, 0]))  # at: index


def tolist(x):
    return x + x.tolist()[0][0]  # at: tolist


def numpy(x):
    return x + float(x.numpy()[0, 0])  # at: numpy


def array(x):
    return x + float(np.asarray(x)[0, 0])  # at: array


def equal(x):
    return x if torch.equal(x, x) else -x  # at: equal


def allclose(x):
    return x if torch.allclose(x, x) else -x  # at: allclose


def formatted(x):
    return x, f"{x.sum():.3f}"  # at: format


def printed(x):
    return x, repr(x)  # at: repr


def contains(x):
    return x + 1 if 3.0 in x else x  # at: contains


def inverse(x):
    return torch.linalg.inv(x[:, :2])  # at: inverse


def one_hot(x):
    return F.one_hot(x.long().clamp(min=0)).sum()  # at: one_hot


@pytest.mark.parametrize(
    ("fn", "mark", "op", "fix"),
    [
        (item, "item", "aten._local_scalar_dense", "keep the value in a tensor"),
        (as_bool, "bool", "aten._local_scalar_dense", "torch.where"),
        (as_int, "int", "aten._local_scalar_dense", "capacity"),
        (as_float, "float", "aten._local_scalar_dense", "keep the value in a tensor"),
        (as_index, "index", "aten._local_scalar_dense", "capacity"),
        (tolist, "tolist", "Tensor.tolist", "torch.gather"),
        (numpy, "numpy", "Tensor.numpy", "compute with torch"),
        (array, "array", "Tensor.__array__", "compute with torch"),
        (equal, "equal", "aten.equal", "(a == b).all()"),
        (allclose, "allclose", "aten.allclose", "torch.isclose"),
        (formatted, "format", "aten._local_scalar_dense", "print it after the replay"),
        (contains, "contains", "aten._local_scalar_dense", ".any()"),
        (inverse, "inverse", "aten._linalg_check_errors", "inv_ex"),
        (one_hot, "one_hot", "aten._local_scalar_dense", "num_classes"),
    ],
)
def test_a_value_read_by_python_is_an_error_with_its_line(fn, mark, op, fix):
    finding = only(check(fn, X), "host_read")
    assert (finding.op, finding.where, finding.severity) == (op, at(mark), "error")
    assert fix in finding.fix


def nonzero(x):
    return x, x.nonzero()  # at: nonzero


def argwhere(x):
    return x, torch.argwhere(x > 0)  # at: argwhere


def where(x):
    return x, torch.where(x > 0)  # at: where


def masked_select(x):
    return x.masked_select(x > 0)  # at: masked_select


def mask_index(x):
    return x[x > 0]  # at: mask_index


def mask_write(x):
    y = x.clone()
    y[x > 0] = torch.ones(4)  # at: mask_write
    return y


def unique(x):
    return x, x.unique()  # at: unique


def unique_consecutive(x):
    return x, torch.unique_consecutive(x.flatten())  # at: unique_consecutive


def bincount(x):
    return x, torch.bincount(x.abs().long().flatten())  # at: bincount


def sparse(x):
    return x, x.to_sparse()  # at: sparse


def repeat(x):
    return torch.repeat_interleave(x, x[:, 0].abs().long(), dim=0)  # at: repeat


@pytest.mark.parametrize(
    ("fn", "mark", "op", "fix"),
    [
        (nonzero, "nonzero", "aten.nonzero", "nonzero_static"),
        (argwhere, "argwhere", "aten.nonzero", "nonzero_static"),
        (where, "where", "aten.nonzero", "three-argument"),
        (masked_select, "masked_select", "aten.masked_select", "torch.where(mask, x, 0)"),
        (mask_index, "mask_index", "aten.index", "torch.where(mask, x, 0)"),
        (mask_write, "mask_write", "aten.index_put_", "torch.where(mask, values, x)"),
        (unique, "unique", "aten._unique2", "sort"),
        (unique_consecutive, "unique_consecutive", "aten.unique_consecutive", "sort"),
        (bincount, "bincount", "aten.bincount", "scatter_add_"),
        (sparse, "sparse", "aten._to_sparse", "capacity"),
        (repeat, "repeat", "aten.repeat_interleave", "output_size"),
    ],
)
def test_a_shape_that_follows_values_is_an_error_with_its_line(fn, mark, op, fix):
    finding = only(check(fn, X), "data_dependent_shape")
    assert (finding.op, finding.where, finding.severity) == (op, at(mark), "error")
    assert fix in finding.fix


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.where(x > 0, x, 0),
        lambda x: x.masked_fill(x > 0, 2.0),
        lambda x: torch.repeat_interleave(x, torch.ones_like(x[:, 0]).long(), dim=0, output_size=2),
        lambda x: torch.repeat_interleave(x, 3, dim=0),
        lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
        lambda x: F.one_hot(x.long().clamp(0, 4), 5).float() + x[..., None],
        lambda x: torch.nonzero_static(x, size=6).float(),
        lambda x: x[:, x.argmax(1)],
        lambda x: x.sort().values.topk(2).values.cumsum(0),
        lambda x: torch.full((), 2.0, device=x.device) * x,
        lambda x: x.to("cpu").to(torch.bfloat16),
        lambda x: torch.as_tensor(x) + torch.tensor([]).sum(),
    ],
)
def test_what_keeps_shapes_and_values_on_the_device_is_no_finding(fn):
    assert kinds(check(fn, X)) == []


# copies and constants


def constant(x):
    return x * torch.tensor(2.0)  # at: constant


def new_constant(x):
    return x * x.new_tensor([1.0, 2.0, 3.0])  # at: new_tensor


def from_numpy(x):
    return x * torch.from_numpy(np.ones(3, np.float32))  # at: from_numpy


def list_index(x):
    return x[:, [0, 2]]  # at: list_index


@pytest.mark.parametrize(
    ("fn", "mark"),
    [
        (constant, "constant"),
        (new_constant, "new_tensor"),
        (from_numpy, "from_numpy"),
        (list_index, "list_index"),
    ],
)
def test_a_tensor_made_from_python_data_is_a_copy_from_the_host(fn, mark):
    finding = only(check(fn, X), "host_to_device")
    assert finding.where == at(mark)
    assert "buffer" in finding.fix


def to_host(x):
    return x.cpu()  # at: cpu


def test_a_copy_to_the_host_is_an_error():
    finding = only(check(to_host, X), "device_to_host")
    assert (finding.op, finding.where) == ("Tensor.cpu", at("cpu"))


def upload(x, host):
    return x + host.to("meta")  # at: upload


def mixed(x, host):
    return x + host  # at: mixed


def test_an_unpinned_copy_to_the_device_is_an_error():
    finding = only(check(upload, torch.ones(3, device="meta"), torch.ones(3)), "host_to_device")
    assert (finding.op, finding.where) == ("aten._to_copy", at("upload"))


def test_a_host_scalar_among_device_operands_is_a_warning_because_its_value_is_frozen():
    finding = only(check(mixed, torch.ones(3, device="meta"), torch.tensor(2.0)), "cpu_tensor")
    assert (finding.op, finding.where, finding.severity) == ("aten.add", at("mixed"), "warning")


def test_reading_a_host_tensor_in_work_for_a_device_is_a_warning():
    report = check(lambda x, n: x * n.item(), torch.ones(3, device="meta"), torch.tensor(2.0))
    assert only(report, "host_read").severity == "warning"
    assert report.ok


# the report


def test_a_report_is_a_table_and_json_with_a_version():
    report = check(as_bool, X)
    text = str(report)
    assert text.startswith("1 error, 0 warnings in ")
    assert "severity" in text
    assert "host_read" in text
    assert "fix: choose on the device with torch.where" in text
    data = json.loads(report.to_json())
    assert data["version"] == 1
    assert data["ok"] is False
    assert data["findings"][0]["where"] == at("bool")
    assert data["parameters"] == {"used": [], "unused": []}


def test_errors_of_a_report_are_raised_as_capture_errors():
    with pytest.raises(GraphCaptureError) as raised:
        check(item, X).raise_errors()
    assert raised.value.op == "aten._local_scalar_dense"
    assert raised.value.where == at("item")
    check(GPT(), TOKENS).raise_errors()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_a_clean_model_is_clean_on_the_device(self):
        assert check(GPT().cuda().train(), TOKENS.cuda()).findings == ()

    @pytest.mark.parametrize(
        ("fn", "mark"), [(item, "item"), (as_bool, "bool"), (mask_index, "mask_index"), (nonzero, "nonzero")]
    )
    def test_waits_are_found_once_with_their_line(self, fn, mark):
        assert [f.where for f in check(fn, X.cuda()).findings] == [at(mark)]

    def test_copies_between_host_and_device_are_judged_by_pinning(self):
        host, x = torch.ones(3), X.cuda()
        assert kinds(check(lambda x: x + host.to(x.device), x)) == ["host_to_device"]
        pinned = host.pin_memory()
        assert kinds(check(lambda x: x + pinned.to(x.device, non_blocking=True), x)) == []
        assert kinds(check(lambda x: x.cpu(), x)) == ["device_to_host"]

    def test_the_devices_generator_is_put_back(self):
        x = X.cuda()
        before = torch.cuda.get_rng_state()
        assert check(lambda x: F.dropout(x), x).random
        assert torch.equal(torch.cuda.get_rng_state(), before)

    def test_the_debug_mode_of_the_caller_stays(self):
        before = torch.cuda.get_sync_debug_mode()
        check(item, X.cuda())
        assert torch.cuda.get_sync_debug_mode() == before
