"""check: every kind of finding, with the line it is on, and none where a capture would be right."""

from __future__ import annotations

import functools
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lf_graph import GraphCaptureError, GraphError
from lf_graph._check import check

SOURCE = Path(__file__)


def at(mark: str) -> str:
    """``file:line`` of the line of this file that ends in ``# at: mark``."""
    lines = SOURCE.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# at: {mark}")]
    return f"{SOURCE}:{number}"


def kinds(report) -> list[str]:
    return [f.kind for f in report.findings]


def only(report, kind: str):
    """The one finding of the report, which is of this kind."""
    assert kinds(report) == [kind], str(report)
    return report.findings[0]


# values and shapes that the host reads

X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])


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


# random numbers


def own_generator(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))  # at: generator


def python_random(x):
    return x * random.random()  # at: random


def python_randint(x):
    return x if random.randint(0, 3) < 9 else -x  # at: randint


def numpy_random(x):
    return x + 0 * np.random.rand()  # at: np_random


def test_a_generator_of_ones_own_has_to_be_registered():
    report = check(own_generator, X)
    finding = only(report, "generator")
    assert finding.where == at("generator")
    assert "register" in finding.fix
    assert report.random


def test_the_default_generator_may_be_named():
    report = check(lambda x: x + torch.rand(3, generator=torch.default_generator), X)
    assert report.findings == ()
    assert report.random


@pytest.mark.parametrize(
    ("fn", "mark"), [(python_random, "random"), (python_randint, "randint"), (numpy_random, "np_random")]
)
def test_random_numbers_of_the_host_are_an_error_where_they_are_drawn(fn, mark):
    found = [f for f in check(fn, X).findings if f.kind == "host_random"]
    assert [f.where for f in found] == [at(mark)]


def test_random_numbers_of_the_host_that_reach_an_operator_are_told_as_a_change_too():
    report = check(python_random, X)
    assert kinds(report) == ["host_random", "changes_between_calls"]
    assert report.findings[1].where == at("random")


def test_a_private_generator_of_python_is_found_and_put_back():
    mine = random.Random(7)
    expected = random.Random(7).random()
    assert "host_random" in kinds(check(lambda x: x * mine.random(), X))
    assert mine.random() == expected


def test_host_random_numbers_are_found_under_another_profiler_too():
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    try:
        report = check(lambda x: (random.random(), x)[1], X)
    finally:
        profile.disable()
    assert kinds(report) == ["host_random"]


def test_random_tells_whether_torchs_generators_are_used():
    assert check(lambda x: F.dropout(x), X).random
    assert not check(lambda x: F.dropout(x, training=False), X).random


# what changes between calls


class Clock:
    def __init__(self):
        self.ticks = 0

    def scaled(self, x):
        self.ticks += 1
        return x * self.ticks  # at: scaled

    def branch(self, x):
        self.ticks += 1
        return x.exp() if self.ticks % 2 else x.log()  # at: branch

    def longer(self, x):
        self.ticks += 1
        return torch.zeros(self.ticks) + x.sum()  # at: longer


@pytest.mark.parametrize(
    ("method", "op", "old", "new"),
    [
        ("scaled", "aten.mul", "2", "3"),
        ("branch", "aten.exp", "aten.log", "aten.exp"),
        ("longer", "aten.zeros", "2", "3"),
    ],
)
def test_what_follows_python_state_is_named_with_old_and_new(method, op, old, new):
    finding = only(check(getattr(Clock(), method), X), "changes_between_calls")
    assert (finding.op, finding.where) == (op, at(method))
    assert f"{old} -> {new}" in finding.why


def test_random_numbers_of_torch_are_the_same_in_every_run_of_a_check():
    report = check(lambda x: x.sum() * torch.ones(1000)[torch.rand(1000) > 0.5], X)
    assert kinds(report) == ["data_dependent_shape"]  # and no change of that shape


def test_time_in_the_operands_is_a_change():
    assert kinds(check(lambda x: x * time.perf_counter(), X)) == ["changes_between_calls"]


def test_a_cache_made_by_the_first_call_is_no_finding():
    class Rope(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(3.0).cos()
            return x * self.table

    model = Rope()
    assert kinds(check(model, X)) == []
    assert "table" not in vars(model)


def slice_by_length(x, lengths):
    longest = max(lengths)
    return x[:, :longest] * 2  # at: again


def test_a_second_set_of_arguments_shows_what_follows_the_data():
    report = check(slice_by_length, X, [1, 1], again=(X, [1, 2]))
    finding = only(report, "changes_between_calls")
    assert (finding.where, finding.op) == (at("again"), "aten.slice")
    assert "1 -> 2" in finding.why


def test_arguments_of_another_shape_are_told_with_old_and_new_and_lead_to_buckets():
    finding = only(check(lambda x: x * 2, X, again=(torch.ones(5, 3),)), "changes_between_calls")
    assert "float32[2, 3] -> float32[5, 3]" in finding.why
    assert "Buckets" in finding.fix


def test_other_data_of_the_same_shape_is_no_finding():
    assert kinds(check(lambda x: x * x.sum(), X, again=(X + 1,))) == []


def with_number(x, n):  # at: number
    return x[:, :n]


def test_a_python_number_as_argument_is_a_warning_unless_again_shows_that_it_stays():
    finding = only(check(with_number, X, 2), "frozen_argument")
    assert (finding.op, finding.where, finding.severity) == ("args[1]", at("number"), "warning")
    assert kinds(check(with_number, X, 2, again=(X, 2))) == []
    assert kinds(check(functools.partial(with_number, n=2), X)) == []


def test_flags_are_no_numbers():
    assert kinds(check(lambda x, flip=False: -x if flip else x, X, flip=True)) == []


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


# calls that a capture forbids


def synchronize(x):
    torch.cuda.synchronize()  # at: synchronize
    return x


def renamed(x):
    from torch.cuda import synchronize as wait

    wait()  # at: renamed
    return x


def rng_state(x):
    state = torch.cuda.get_rng_state()  # at: rng_state
    return x, state


def reseeded(x):
    torch.manual_seed(3)  # at: manual_seed
    return x


def waits_for_event(x):
    torch.cuda.Event.synchronize(None)  # at: event
    return x


def asks_event(x):
    torch.cuda.Event.query(None)  # at: query
    return x


def waits_for_stream(x):
    torch.cuda.Stream.synchronize(None)  # at: stream_wait
    return x


def empties_cache(x):
    torch.cuda.empty_cache()  # at: empty_cache
    return x


def forks(x):
    with torch.random.fork_rng():  # at: fork
        return x + torch.rand(3)


def side_stream(x):
    side = torch.cuda.Stream()  # at: stream
    with torch.cuda.stream(side):
        return x + 1


@pytest.mark.parametrize(
    ("fn", "kind", "op", "mark"),
    [
        (synchronize, "synchronize", "torch.cuda.synchronize", "synchronize"),
        (renamed, "synchronize", "torch.cuda.synchronize", "renamed"),
        (rng_state, "rng_state", "torch.cuda.get_rng_state", "rng_state"),
        (reseeded, "rng_state", "torch.manual_seed", "manual_seed"),
        (waits_for_event, "synchronize", "torch.cuda.Event.synchronize", "event"),
        (asks_event, "synchronize", "torch.cuda.Event.query", "query"),
        (waits_for_stream, "synchronize", "torch.cuda.Stream.synchronize", "stream_wait"),
        (empties_cache, "synchronize", "torch.cuda.empty_cache", "empty_cache"),
        (forks, "rng_state", "torch.random.fork_rng", "fork"),
        (side_stream, "side_stream", "torch.cuda.Stream", "stream"),
    ],
)
def test_calls_that_a_capture_forbids_are_named_also_without_a_device(fn, kind, op, mark):
    finding = check(fn, X).findings[0]
    assert (finding.kind, finding.op, finding.where) == (kind, op, at(mark))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the call works where there is a device")
def test_a_run_that_ends_at_a_finding_says_so():
    report = check(synchronize, X)
    assert kinds(report) == ["synchronize", "stopped"]
    assert "was not seen" in report.findings[1].fix


def test_an_error_of_the_function_that_no_finding_explains_is_raised():
    with pytest.raises(KeyError, match="mine"):
        check(lambda x: {}["mine"], X)


@pytest.mark.parametrize("options", [{"devices": []}, {"enabled": False}])
def test_forking_the_hosts_generator_alone_is_no_finding(options):
    def fn(x):
        with torch.random.fork_rng(**options):
            return x + torch.rand(3)

    assert kinds(check(fn, X)) == []


def checkpointed(x):
    return checkpoint(F.gelu, x, use_reentrant=False)  # at: checkpoint


def test_checkpointing_with_generator_states_is_an_error_and_without_them_none():
    x = X.clone().requires_grad_()
    finding = only(check(checkpointed, x), "rng_state")
    assert finding.where == at("checkpoint")
    assert "preserve_rng_state=False" in finding.fix
    assert (
        kinds(check(lambda x: checkpoint(F.gelu, x, use_reentrant=False, preserve_rng_state=False), x)) == []
    )


def penalty(x):
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)  # at: create_graph
    return g.pow(2).sum()


def test_functional_gradients_of_torch_func_are_no_double_backward():
    assert kinds(check(lambda x: torch.func.grad(lambda r: r.sin().sum())(x), X)) == []
    assert kinds(check(lambda x: torch.func.vmap(lambda r: r.sin().sum())(x), X)) == []


def test_double_backward_is_an_error():
    finding = only(check(penalty, X.clone().requires_grad_()), "double_backward")
    assert finding.where == at("create_graph")


# backward


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.tolist()
        return grad * grad.sum().item()  # at: backward


def test_a_read_in_a_users_backward_is_on_its_own_line():
    report = check(lambda x: Reading.apply(x), X.clone().requires_grad_())
    assert kinds(report) == ["host_read", "host_read"]
    assert report.findings[1].where == at("backward")
    assert kinds(check(lambda x: Reading.apply(x), X.clone().requires_grad_(), backward=False)) == []


def test_an_operator_of_the_backward_is_told_at_the_line_of_its_forward():
    from lf_graph._dry_run import DryRun
    from lf_graph._names import names_behind
    from lf_graph._preserve import preserved

    model = nn.Sequential(nn.Linear(3, 3), Gelu())
    names = names_behind(model)
    with preserved(names) as state:
        run = DryRun(model, {}, names, state, "cpu", True).run((X,))
    (backward,) = [s for s in run.steps if s.op == "aten.gelu_backward"]
    assert (backward.where, backward.module) == (at("gelu"), "1")


class Gelu(nn.Module):
    def forward(self, x):
        return F.gelu(x)  # at: gelu


def test_parameters_with_and_without_a_gradient_are_told_by_name():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["c"].requires_grad_(False)
    report = check(lambda x: model["c"](model["a"](x)), X)
    assert report.parameters.used == ("a.weight", "a.bias")
    assert report.parameters.unused == ("b.weight", "b.bias")


def test_a_function_that_runs_its_own_backward_and_optimizer_is_left_to_it():
    model, spare = nn.Linear(3, 3), nn.Linear(3, 3)
    both = nn.ModuleList([model, spare])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in both.parameters()]

    def step(x):
        optimizer.zero_grad()
        loss = both[0](x).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    report = check(step, X)
    assert report.ok, str(report)
    assert report.parameters.used == ("0.weight", "0.bias")
    assert report.parameters.unused == ("1.weight", "1.bias")
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), before, strict=True))
    assert all(p.grad is None for p in both.parameters())
    assert not optimizer.state


def test_a_learning_rate_that_a_scheduler_changes_is_named():
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()  # at: lr
        scheduler.step()

    found = [f for f in check(step, X).findings if f.kind == "changes_between_calls"]
    assert [f.where for f in found] == [at("lr")]
    assert "-0.05 -> -0.025" in found[0].why
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


# clean models


class Block(nn.Module):
    """A transformer block with dropout and fused attention."""

    def __init__(self, d=16, heads=2):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied embeddings, two blocks, cross entropy."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


TOKENS = torch.arange(12).view(2, 6)


def test_a_clean_model_has_no_finding_and_uses_every_parameter():
    model = GPT().train()
    report = check(model, TOKENS)
    assert report.findings == ()
    assert report.ok
    assert report.random
    assert report.operations > 100
    assert report.parameters.used == tuple(n for n, _ in model.named_parameters(remove_duplicate=False))
    assert report.parameters.unused == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_clean_outside_and_inside_of_the_function(dtype):
    model = GPT().train()
    with torch.autocast("cpu", dtype):
        assert check(model, TOKENS).findings == ()

    def inside(tokens):
        with torch.autocast("cpu", dtype):
            return model(tokens)

    assert check(inside, TOKENS).findings == ()


def test_a_gradient_scaler_reads_the_device_and_scaling_by_hand_does_not():
    model = nn.Linear(3, 3)
    scale = torch.full((), 1024.0)
    assert check(lambda x: model(x).sum() * scale, X).findings == ()


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_every_attention_backend_is_clean(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        assert check(Block().eval(), torch.randn(2, 4, 16)).findings == ()


SEQUENCE = torch.randn(2, 4, 16)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (SEQUENCE,)),
        (nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), (SEQUENCE, SEQUENCE)),
        (nn.LSTM(16, 8, batch_first=True), (SEQUENCE,)),
        (nn.Conv1d(4, 3, 3), (SEQUENCE,)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(16, 3)), (SEQUENCE,)),
        (
            nn.Sequential(nn.GroupNorm(2, 4), nn.Dropout1d(), nn.InstanceNorm1d(4, track_running_stats=True)),
            (SEQUENCE,),
        ),
    ],
)
def test_torchs_own_layers_are_clean(model, inputs):
    assert check(model.train(), *inputs).findings == ()


def test_a_compiled_module_is_looked_into():
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), Scaled()), backend="eager")
    report = check(model, X)
    assert kinds(report) == ["host_read"]
    assert report.findings[0].where == at("scaled_by_item")


class Scaled(nn.Module):
    def forward(self, x):
        return x * x.sum().item()  # at: scaled_by_item


def test_a_lazy_module_has_to_be_run_once_before():
    with pytest.raises(GraphError, match="run the model once"):
        check(nn.LazyLinear(3), X)


def test_inference_mode_is_checked_too():
    with torch.inference_mode():
        assert kinds(check(nn.Linear(3, 3), X.clone())) == []


@pytest.mark.parametrize("cache", [True, False])
def test_hugging_face_llama_is_clean(cache):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(config).train()
    report = check(model, input_ids=TOKENS, labels=TOKENS, use_cache=cache)
    assert report.findings == (), str(report)
    assert report.parameters.unused == ()


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


def test_the_interface_of_torch_and_numpy_is_as_before():
    before = torch.cuda.is_current_stream_capturing, np.random.rand, random.random
    check(python_random, X)
    assert (torch.cuda.is_current_stream_capturing, np.random.rand, random.random) == before


def test_a_check_of_a_model_that_fails_puts_everything_back():
    model = Counts()

    def fails(x):
        model(x)
        raise KeyError("user")

    with pytest.raises(KeyError):
        check(fails, X)
    assert model.calls == 0


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


def test_a_line_that_several_layers_run_is_one_row_and_a_finding_for_each():
    model = nn.Sequential(Scaled(), nn.Linear(3, 3), Scaled(), Scaled())
    report = check(model, X)
    assert [f.module for f in report.findings] == ["0", "2", "3"]
    assert str(report).startswith("1 error, 0 warnings")
    assert "0 and 2 more" in str(report)


def test_a_finding_names_the_submodule_it_is_in():
    class Inner(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"deep": Inner()})["deep"])
    assert check(model, X).findings[0].module == "1"


def test_a_call_from_a_library_inside_torch_is_told_at_the_users_line():
    def sample(x):
        return torch.distributions.Normal(x, x.abs() + 1, validate_args=True).mean  # at: distribution

    assert check(sample, X).findings[0].where == at("distribution")


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
