"""What surrounds the steps: refusals, interrupted backwards, the gate, scalers, and the life of a handle."""

import copy
import gc
import weakref

import pytest
import torch
from release_cases import (
    Net,
    assert_close,
    assert_same,
    assert_same_state,
    batches,
    groups,
    net,
    train,
    train_released,
)
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.checkpoint import checkpoint

from lf_memory.gradients import ReleaseError, release


def sgd(model):
    return SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("mode", "options", "message"), [
    ("fast", {}, "one of 'fused'"),
    ("fused", {"accumulation": 2}, "accumulate='buffer'"),
    ("local_clip", {"clip": 1.0, "accumulation": 2}, "accumulate='buffer'"),
    ("fused", {"clip": 1.0}, "local_clip, exact or two_pass"),
    ("local_clip", {}, "needs clip="),
    ("exact", {"clip": -1.0}, "above 0"),
    ("exact", {"clip": float("nan")}, "above 0"),
    ("exact", {"clip_by": "running", "clip": 1.0}, "local_clip"),
    ("local_clip", {"clip_by": "layer", "clip": 1.0}, "one of 'parameter'"),
    ("exact", {"accumulation": 0}, "at least 1"),
    ("exact", {"accumulation": 1.5}, "at least 1"),
    ("exact", {"accumulate": "state"}, "belongs to mode 'fused'"),
    ("exact", {"accumulate": "disk"}, "one of None"),
    ("two_pass", {"accumulation": 2}, "mode 'exact'"),
    ("two_pass", {"accumulate": "buffer"}, "mode 'exact'"),
    ("fused", {"keep": torch.bfloat16}, "mode 'exact'"),
    ("exact", {"keep": torch.bfloat16, "accumulation": 2}, "one micro-batch"),
    ("exact", {"keep": torch.int8}, "torch.bfloat16"),
    ("exact", {"chunk_bytes": 0}, "at least 1"),
    ("fused", {"accumulate": "state", "gate": True}, "take back"),
    ("fused", {"accumulate": "state"}, "momentum"),
])  # fmt: skip
def test_combinations_that_cannot_do_what_they_say_are_refused(mode, options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        release(model, sgd(model), mode, **options)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(("make", "message"), [
    (lambda ps: LBFGS(ps), "LBFGS"),
    (lambda ps: AdamW(ps, differentiable=True), "differentiable"),
])  # fmt: skip
def test_optimizers_whose_step_cannot_be_split_are_refused(make, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        release(model, make(list(model.parameters())), "fused")


@pytest.mark.parametrize(("make", "message"), [
    (lambda ps: AdamW(ps, amsgrad=True), "amsgrad"),
    (lambda ps: torch.optim.Adam(ps, weight_decay=0.1), "coupled"),
    (lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
    (lambda ps: torch.optim.RMSprop(ps), "knows Adam, AdamW, SGD"),
])  # fmt: skip
def test_accumulation_in_state_refuses_mathematics_it_cannot_split(make, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        release(model, make(list(model.parameters())), "fused", accumulate="state")


class GroupCounter(SGD):
    """Counts steps in its param group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class OwnCounter(SGD):
    """Counts steps in an attribute."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


@pytest.mark.parametrize(("kind", "what"), [(GroupCounter, "'count'"), (OwnCounter, "attribute 'count'")])
def test_an_optimizer_that_counts_its_steps_beside_the_parameters_is_an_error(kind, what):
    model = net()
    handle = release(model, kind(model.parameters(), lr=0.1), "fused", chunk_bytes=1)
    with pytest.raises(ValueError, match=what):
        model(batches(1)[0]).backward()
    assert handle.broken


def test_an_optimizer_with_private_notes_keeps_them():
    class Warner(SGD):
        def step(self, closure=None):
            self._warned = True
            return super().step(closure)

    model = net()
    optimizer = Warner(model.parameters(), lr=0.1)
    train_released(model, optimizer, batches(1), "fused")
    assert optimizer._warned


def test_parameters_are_released_once_and_without_pending_gradients():
    model = net()
    optimizer = sgd(model)
    handle = release(model, optimizer, "fused")
    with pytest.raises(ValueError, match="unused is released already"):
        release(model, sgd(model), "exact")
    handle.close()
    model(batches(1)[0]).backward()
    with pytest.raises(ValueError, match="zero_grad"):
        release(model, optimizer, "exact")
    optimizer.zero_grad()
    release(model, optimizer, "exact").close()
    with pytest.raises(ValueError, match="nothing to release"):
        release(model, SGD([model.frozen], lr=0.1), "exact")


def test_a_direct_optimizer_step_is_an_error_that_says_what_to_call():
    model = net()
    optimizer = sgd(model)
    with release(model, optimizer, "exact", clip=1.0) as handle:
        model(batches(1)[0]).backward()
        with pytest.raises(ReleaseError, match=r"handle\.step\(\)"):
            optimizer.step()
        handle.step()
    optimizer.step()


def test_step_hooks_of_the_optimizer_run_once_a_step():
    model, calls = net(), []
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train_released(model, optimizer, batches(2), "fused")
    assert calls == ["pre", "post"] * 2


@pytest.mark.parametrize("mode", ["fused", "local_clip"])
def test_a_second_backward_before_the_step_is_an_error(mode):
    model = net()
    handle = release(model, sgd(model), mode, **({"clip": 1.0} if mode == "local_clip" else {}))
    first, second = batches(2)
    model(first).backward()
    with pytest.raises(ReleaseError, match="accumulation=1 before"):
        model(second).backward()
    with pytest.raises(ReleaseError, match="stopped in the middle"):
        handle.step()


def test_a_retained_graph_cannot_be_used_again_after_its_parameters_moved():
    model = net()
    handle = release(model, sgd(model), "fused")
    loss = model(batches(1)[0])
    loss.backward(retain_graph=True)
    handle.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_retained_graph_accumulates_in_exact():
    theirs, ours = net(), net()
    handle = release(ours, sgd(ours), "exact", clip=0.5, accumulation=2)
    plain = sgd(theirs)
    for model in (theirs, ours):
        loss = model(batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    plain.step()
    handle.step()
    assert_same(ours, theirs)


class Fuse(torch.autograd.Function):
    """The identity; its backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fuse.armed:
            raise MemoryError("in the middle of backward")
        return grad


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.above = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.above(Fuse.apply(self.below(x))).square().mean()


@pytest.fixture
def blown():
    Fuse.armed = True
    yield
    Fuse.armed = False


@pytest.mark.parametrize("mode", ["fused", "exact"])
@pytest.mark.usefixtures("blown")
def test_an_error_in_the_middle_of_backward_breaks_the_handle_until_reset(mode):
    theirs, ours = Chain(), Chain()
    handle = release(ours, sgd(ours), mode, chunk_bytes=1)
    x = torch.ones(2, 8)
    with pytest.raises(MemoryError):
        ours(x).backward()
    assert handle.broken
    expected = "2 of 4 parameters were updated" if mode == "fused" else "no parameter was updated"
    with pytest.raises(ReleaseError, match=expected):
        handle.step()
    handle.reset()
    assert not handle.broken
    assert all(p.grad is None for p in ours.parameters())
    Fuse.armed = False
    ours.load_state_dict(Chain().state_dict())
    ours(x).backward()
    handle.step()
    plain = sgd(theirs)
    theirs(x).backward()
    plain.step()
    assert_same(ours, theirs)


@pytest.mark.usefixtures("blown")
def test_a_reset_leaves_out_updates_that_waited_for_others():
    model = Chain()
    handle = release(model, sgd(model), "fused")
    with pytest.raises(MemoryError):
        model(torch.ones(2, 8)).backward()
    handle.reset()
    handle.step()
    assert_same(model, Chain())


@pytest.mark.usefixtures("blown")
def test_a_reset_forgets_the_running_norm_of_the_step_that_failed():
    theirs, ours = Chain(), Chain()
    options = {"clip": 1e-3, "clip_by": "running"}
    handle = release(ours, sgd(ours), "local_clip", **options)
    with pytest.raises(MemoryError):
        (ours(torch.ones(2, 8)) * 1e6).backward()
    handle.reset()
    Fuse.armed = False
    ours.load_state_dict(theirs.state_dict())
    fresh = release(theirs, sgd(theirs), "local_clip", **options)
    for model, stepper in ((ours, handle), (theirs, fresh)):
        model(torch.ones(2, 8)).backward()
        stepper.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("first", [True, False])
def test_accumulation_in_state_that_is_reset_leaves_no_mark_in_the_state(first):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    handle = release(model, optimizer, "fused", accumulation=2, accumulate="state")
    for _ in range(0 if first else 2):
        model(batches(1)[0]).backward()
    handle.step()
    model(batches(1)[0]).backward()
    handle.reset()
    assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}


@pytest.mark.usefixtures("blown")
def test_an_error_in_a_closure_or_in_the_optimizer_breaks_the_handle():
    model = Chain()
    handle = release(model, sgd(model), "two_pass", clip=1.0)
    with pytest.raises(MemoryError):
        handle.step(lambda: model(torch.ones(1, 8)).backward())
    assert handle.broken
    handle.reset()
    Fuse.armed = False
    handle.step(lambda: model(torch.ones(1, 8)).backward())
    handle.close()
    optimizer = sgd(model)
    with release(model, optimizer, "exact") as handle:
        model(torch.ones(1, 8)).backward()
        optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(TypeError):
            handle.step()
        assert handle.broken


@pytest.mark.parametrize(("make", "message"), [
    (lambda p: torch.nn.functional.embedding(torch.tensor([1, 2]), p, sparse=True).sum().backward(), "sparse=False"),
    (lambda p: (p**3).sum().backward(create_graph=True), "create_graph"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_cannot_be_freed_are_an_error(make, message):
    model = nn.Linear(4, 4, bias=False)
    handle = release(model, sgd(model), "fused")
    with pytest.raises(ReleaseError, match=message):
        make(model.weight)
    assert handle.broken
    model.weight.grad = None


def test_a_gradient_that_no_backward_announced_is_an_error():
    model = net()
    handle = release(model, sgd(model), "exact")
    model.unused.grad = torch.ones_like(model.unused)
    with pytest.raises(ReleaseError, match="unused has a gradient that no backward announced"):
        handle.step()
    handle.reset()
    model.frozen.requires_grad_(True)
    model(batches(1)[0]).backward()
    with pytest.raises(ReleaseError, match="frozen at release"):
        handle.step()


@pytest.mark.parametrize("mode", ["fused", "exact"])
def test_a_gradient_that_something_still_holds_is_named(mode):
    model, held = net(), []
    model.second.weight.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.view(-1)))
    handle = release(model, sgd(model), mode)
    model(batches(1)[0]).backward()
    with pytest.raises(ReleaseError, match=r"the gradients of second\.weight \(0\.0 MiB\)"):
        handle.step()
    held.clear()
    assert not handle.broken
    assert handle.stats().steps == 1


def test_a_param_group_added_later_is_an_error():
    model = net()
    optimizer = SGD(model.first.parameters(), lr=0.1)
    handle = release(model, optimizer, "fused")
    optimizer.add_param_group({"params": list(model.second.parameters())})
    model(batches(1)[0]).backward()
    with pytest.raises(ReleaseError, match=r"release\(\) again"):
        handle.step()


@pytest.mark.parametrize("mode", ["fused", "exact", "two_pass"])
def test_optimizer_states_are_exchanged_with_an_ordinary_loop_both_ways(mode):
    theirs, ours = net(), net()
    plain, released = AdamW(groups(theirs), lr=1e-2), AdamW(groups(ours), lr=1e-2)
    data = batches(9)
    train(theirs, plain, data)
    train(ours, released, data[:3])
    second = AdamW(groups(ours), lr=0.5)
    ours.zero_grad()
    with release(ours, second, "fused") as handle:
        second.load_state_dict(copy.deepcopy(released.state_dict()))  # while it is released
        for ids in data[3:5]:
            ours(ids).backward()
            handle.step()
    train_released(ours, second, data[5:6], mode)
    third = AdamW(groups(ours), lr=0.5)
    third.load_state_dict(second.state_dict())
    train(ours, third, data[6:])
    assert_same(ours, theirs)
    assert_same_state(third, plain)


class TestGate:
    @pytest.mark.parametrize("mode", ["exact", "two_pass"])
    @pytest.mark.parametrize("make", [
        lambda ps: AdamW(ps, lr=1e-2), lambda ps: SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.NAdam(ps, lr=1e-2), lambda ps: SGD(ps, lr=0.1),
    ])  # fmt: skip
    @pytest.mark.parametrize("bad", [(0,), (1,), (3,), (0, 1), (0, 2, 3)])
    def test_a_step_with_a_gradient_that_is_not_finite_leaves_everything_as_it_was(self, mode, make, bad):
        theirs, ours = net(), net()
        plain, released = make(groups(theirs)), make(groups(ours))
        train(theirs, plain, [ids for i, ids in enumerate(batches(5)) if i not in bad], clip=0.5)
        handle = release(ours, released, mode, clip=0.5, gate=True)
        for i, ids in enumerate(batches(5)):
            factor = float("inf") if i in bad else 1.0
            if mode == "exact":
                (ours(ids) * factor).backward()
                handle.step()
            else:
                handle.step(lambda ids=ids, factor=factor: (ours(ids) * factor).backward())
        assert handle.skipped == len(bad)
        assert_same(ours, theirs)
        if 0 not in bad:
            assert_same_state(released, plain)

    def test_fused_leaves_out_the_parameter_alone(self):
        model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        handle = release(model, AdamW(model.parameters(), lr=1e-2), "fused", gate=True)
        x = torch.ones(2, 4)
        for first in (1.0, float("nan"), 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            (model[0](x).sum() * first + model[1](x).sum()).backward()
            handle.step()
            moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
            assert moved == [first == 1.0] * 2 + [True] * 2
        assert handle.skipped == 2

    @pytest.mark.parametrize("clip_by", ["parameter", "running"])
    def test_local_clip_goes_on_after_a_bad_gradient(self, clip_by):
        model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        handle = release(model, sgd(model), "local_clip", clip=0.1, clip_by=clip_by, gate=True)
        x = torch.ones(2, 4)
        for factor in (float("inf"), 1.0, 1.0):
            before = model[0].weight.detach().clone()
            (model[0](x).sum() * factor + model[1](x).sum()).backward()
            handle.step()
        assert handle.skipped == 2
        assert handle.norm.isfinite()
        assert not torch.equal(model[0].weight, before)
        assert model[0].weight.isfinite().all()

    def test_once_state_exists_the_flag_is_not_read_on_the_host(self):
        model = net()
        handle = release(model, AdamW(model.parameters(), lr=1e-2), "exact", clip=0.5, gate=True)
        model(batches(1)[0]).backward()
        handle.step()
        model(batches(1)[0]).backward()
        with NoReading():
            handle.step()

    def test_numbers_on_the_host_cannot_be_gated(self):
        class HostCounter(SGD):
            def step(self, closure=None):
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        self.state[p]["n"] = self.state[p].get("n", 0) + 1
                return super().step(closure)

        model = net()
        handle = release(model, HostCounter(model.parameters(), lr=0.1), "exact", gate=True)
        model(batches(1)[0]).backward()
        handle.step()
        model(batches(1)[0]).backward()
        with pytest.raises(ReleaseError, match=r"state\['n'\]"):
            handle.step()


class NoReading(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses operators that read a bool or float value on the host; AdamW's own count of steps lies there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            assert args[0].dtype == torch.float32, "the flag was read"
            assert args[0].numel() == 1
            assert args[0] == args[0].round(), "only a count of steps is read"
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*scheduler")
def test_gradscaler_works_in_exact_and_is_refused_on_the_optimizer():
    theirs, ours = net(), net()
    plain, released = sgd(theirs), sgd(ours)
    handle = release(ours, released, "exact", clip=0.5, gate=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2)]
    for ids in batches(4):
        scalers[0].scale(theirs(ids)).backward()
        scalers[0].unscale_(plain)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scalers[0].step(plain)
        scalers[0].update()
        plain.zero_grad()
        scalers[1].scale(ours(ids)).backward()
        scalers[1].unscale_(released)
        handle.step()
        scalers[1].update()
    assert_same(ours, theirs)
    scalers[1].scale(ours(batches(1)[0])).backward()
    with pytest.raises(ReleaseError, match="GradScaler"):
        scalers[1].step(released)


@pytest.mark.parametrize("mode", ["fused", "exact"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_harmless(mode, set_to_none):
    theirs, ours = net(), net()
    train(theirs, sgd(theirs), batches(3))
    optimizer = sgd(ours)
    handle = release(ours, optimizer, mode)
    for ids in batches(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        ours(ids).backward()
        handle.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert_same(ours, theirs)


def test_zero_grad_in_the_middle_of_exact_drops_what_came_before():
    theirs, ours = net(), net()
    first, second = batches(2)
    plain, optimizer = sgd(theirs), sgd(ours)
    train(theirs, plain, [second], clip=0.5)
    handle = release(ours, optimizer, "exact", clip=0.5)
    ours(first).backward()
    optimizer.zero_grad()
    ours(second).backward()
    handle.step()
    assert_same(ours, theirs)


class Checkpointed(Net):
    """Runs its middle under activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__(dropout=0.2)
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.embed(ids) + self.frozen
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.norm(x) @ self.embed.weight.t(), ids.roll(1))

    def middle(self, x):
        return x + self.dropout(self.second(nn.functional.gelu(self.first(x))))


@pytest.mark.parametrize("mode", ["fused", "exact", "two_pass"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_with_dropout_gives_the_bits_of_the_ordinary_loop(mode, reentrant):
    torch.manual_seed(0)
    theirs = Checkpointed(reentrant)
    ours = copy.deepcopy(theirs)
    torch.manual_seed(3)
    train(theirs, AdamW(theirs.parameters(), lr=1e-2), batches(4))
    torch.manual_seed(3)
    train_released(ours, AdamW(ours.parameters(), lr=1e-2), batches(4), mode)
    assert_same(ours, theirs)


def test_reentrant_checkpoints_of_one_parameter_used_twice_are_an_error():
    layer = nn.Linear(4, 4)
    handle = release(layer, sgd(layer), "fused")
    x = torch.ones(1, 4, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(ReleaseError, match="use_reentrant=False"):
        y.sum().backward()
    assert handle.broken


@pytest.mark.parametrize("mode", ["fused", "exact"])
def test_a_dropped_handle_leaves_ordinary_training(mode):
    theirs, ours = net(), net()
    train(theirs, sgd(theirs), batches(2))
    optimizer = sgd(ours)
    handle = release(ours, optimizer, mode)
    ours(batches(2)[0]).backward()
    handle.step()
    alive = weakref.ref(handle)
    del handle
    assert alive() is None
    train(ours, optimizer, batches(2)[1:])
    assert_same(ours, theirs)


def test_a_closed_handle_says_so_and_closes_twice():
    model = net()
    with release(model, sgd(model), "fused") as handle:
        pass
    handle.close()
    with pytest.raises(ReleaseError, match="closed"):
        handle.step()


def test_the_model_and_its_gradients_go_with_their_last_reference():
    model = net()
    handle = release(model, sgd(model), "exact", clip=1.0)
    model(batches(1)[0]).backward()
    alive = [weakref.ref(model), weakref.ref(model.first.weight)]
    del model, handle
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_statistics_say_what_was_planned_and_seen():
    model = net()
    _, handle = train_released(model, sgd(model), batches(2), "fused", chunk_bytes=1)
    stats = handle.stats()
    assert (stats.parameters, stats.steps, stats.in_backward, stats.at_step) == (8, 2, 7, 0)
    assert stats.planned_bytes == stats.peak_bytes == max(p.nbytes for p in model.parameters())
    assert '"mode": "fused"' in stats.to_json()
    _, handle = train_released(model, sgd(model), batches(2), "exact")
    used = sum(p.nbytes for p in model.parameters()) - model.unused.nbytes - model.frozen.nbytes
    assert handle.stats().peak_bytes == used
    assert handle.stats().planned_bytes == used + model.unused.nbytes
    assert_close(model, model, atol=0)
