"""check: calls that a capture forbids, backward passes and optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check_cases import X, kinds, only
from marks import marks_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from lf_graph._check import check

at = marks_of(__file__)


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


def reentrant(x):
    return checkpoint(F.gelu, x, use_reentrant=True, preserve_rng_state=False)  # at: reentrant


def test_a_reentrant_checkpoint_is_an_error_at_its_line():
    report = check(reentrant, X.clone().requires_grad_())
    assert kinds(report) == ["reentrant", "stopped"]
    finding = report.findings[0]
    assert finding.where == at("reentrant")
    assert "use_reentrant=False" in finding.fix
    assert check(reentrant, X).ok  # nothing is differentiated through it


def printing(x):
    print(x)  # at: print
    return x


def test_printing_a_tensor_is_a_read():
    finding = only(check(printing, X), "host_read")
    assert (finding.op, finding.where) == ("Tensor.__repr__", at("print"))
    assert "print it after the replay" in finding.fix


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
