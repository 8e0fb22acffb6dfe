"""check: what modules keep, hooks and wrappers; and that everything is put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from check_cases import X, kinds, only
from marks import marks_of
from torch import nn

from lf_graph._check import check

at = marks_of(__file__)


# modules: state, hooks, wrappers


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.calls = 0
        self.log = []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        return self.inner(x)


class Counts(Counter):
    def forward(self, x):
        self.calls += 1  # at: counts
        return self.inner(x)


class Logs(Counter):
    def forward(self, x):  # at: logs
        self.log.append(len(self.log))
        return self.inner(x)


class Keeps(Counter):
    def forward(self, x):
        self.last = self.inner(x)  # at: keeps
        return self.last


class Replaces(Counter):
    def forward(self, x):
        self.total = self.total + x.detach().sum()  # at: replaces
        return self.inner(x)


class Swaps(Counter):
    def forward(self, x):  # at: swaps
        self.inner.weight.data = self.inner.weight.data.clone()
        return self.inner(x)


@pytest.mark.parametrize(
    ("cls", "kind", "mark", "op", "severity"),
    [
        (Counts, "attribute_write", "counts", "Counts.calls", "error"),
        (Logs, "attribute_write", "logs", "Logs.log", "error"),
        (Keeps, "attribute_write", "keeps", "Keeps.last", "warning"),
        (Replaces, "buffer_replaced", "replaces", "Replaces.total", "error"),
    ],
)
def test_state_that_a_forward_writes_is_named_with_its_line_and_put_back(cls, kind, mark, op, severity):
    model = nn.Sequential(cls(), nn.ReLU())
    before = dict(vars(model[0]))
    finding = only(check(model, X), kind)
    assert (finding.where, finding.op, finding.severity) == (at(mark), op, severity)
    assert finding.module == "0"
    assert vars(model[0]) == before
    assert model[0].log == []
    assert model[0].total.item() == 0


def test_a_parameter_that_gets_other_memory_is_an_error_and_is_put_back():
    model = Swaps()
    address = model.inner.weight.data_ptr()
    finding = only(check(model, X), "parameter_replaced")
    assert (finding.op, finding.module) == ("inner.weight", "inner")
    assert model.inner.weight.data_ptr() == address


def test_buffers_written_in_place_are_no_finding():
    class Running(Counter):
        def forward(self, x):
            self.total.add_(x.detach().sum())
            return self.inner(x)

    assert kinds(check(nn.Sequential(Running(), nn.BatchNorm1d(3)), X)) == []


def test_an_attribute_written_with_the_same_value_is_no_finding():
    class Same(Counter):
        def forward(self, x):
            self.scale = 1 / float(x.shape[-1]) ** 0.5
            self.shape = tuple(x.shape)
            return self.inner(x) * self.scale

    assert kinds(check(Same(), X)) == []


def noisy(*args):  # at: hook
    return None


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m[0].register_forward_hook(noisy),
        lambda m: m[0].register_forward_pre_hook(noisy),
        lambda m: m[0].register_full_backward_hook(noisy),
        lambda m: m[0].register_full_backward_pre_hook(noisy),
        lambda m: m[0].weight.register_post_accumulate_grad_hook(noisy),
        lambda m: m[0].weight.register_hook(noisy),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_every_hook_is_an_error_that_names_the_hooks_definition_and_its_module(register):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    register(model)
    finding = only(check(model, X), "hook")
    assert (finding.where, finding.module, finding.severity) == (at("hook"), "0", "error")


def test_hooks_of_torchs_own_parametrizations_are_arithmetic_and_no_finding():
    model = nn.utils.spectral_norm(nn.Linear(3, 3))
    assert kinds(check(model, X)) == []


def test_a_post_accumulate_hook_does_not_run_in_a_check():
    model, ran = nn.Linear(3, 3), []
    model.weight.register_post_accumulate_grad_hook(ran.append)
    check(model, X)
    assert ran == []
    assert model.weight.grad is None


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel_is_named_and_its_module_is_checked(one_rank):
    ddp = nn.parallel.DistributedDataParallel(Counts())
    report = check(ddp, X)
    assert kinds(report) == ["wrapped", "attribute_write"]
    assert "ddp.module" in report.findings[0].fix
    assert report.operations > 0


def test_data_parallel_inside_a_function_is_named_and_not_run(one_rank):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    report = check(lambda x: ddp(x).sum(), X)
    assert only(report, "wrapped").op == "DistributedDataParallel"
    assert report.operations == 0


def test_fully_sharded_modules_are_named(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    report = check(model, X)
    assert {(f.kind, f.module) for f in report.findings} == {("wrapped", "0")}
    assert "sharded" in report.findings[0].why
    assert report.operations == 0


def test_tensor_parallel_parameters_are_named(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    found = [f for f in check(model, X).findings if f.op.startswith("DTensor")]
    assert {f.op for f in found} == {"DTensor 0.weight", "DTensor 0.bias"}
    assert all(f.module == "0" for f in found)


def test_a_pipeline_stage_is_named(one_rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1)
    found = check(schedule.step, X).findings
    assert "ScheduleGPipe" in {f.op for f in found}
    assert all(f.kind == "wrapped" for f in found)


# nothing stays changed


def test_a_check_changes_nothing_bit_for_bit():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), Counts())
    model[0].weight.grad = torch.full((3, 3), 7.0)
    model[1].eval()
    kept = model[0].weight.grad
    x = X.clone()

    def dirty(x):
        model.train()
        with torch.no_grad():
            model[0].weight.mul_(1.5)
            model[0].weight.grad.add_(1)
            x.add_(1)
        model[0].bias.requires_grad_(False)
        random.random()
        np.random.rand()
        return model(x)

    state = {k: v.clone() for k, v in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    versions = [p._version for p in model[3].parameters()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    check(dirty, x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [p._version for p in model[3].parameters()] == versions
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.full((3, 3), 7.0))
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * (len(pointers) - 1)
    assert all(p.requires_grad for p in model.parameters())
    assert [m.training for m in model] == [True, False, True, True]
    assert model[3].calls == 0
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2][1])


def test_a_check_of_a_model_that_fails_puts_everything_back():
    model = Counts()

    def fails(x):
        model(x)
        raise KeyError("user")

    with pytest.raises(KeyError):
        check(fails, X)
    assert model.calls == 0
