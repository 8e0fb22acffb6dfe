"""Gradients in planned places: the same bits as without, never two in one place, nothing left."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lf_memory.gradients import GradientArena, PlanError, predict, verify
from lf_memory.gradients._policy import MODES

IDS = torch.arange(64).view(2, 32) * 7 % 512


def plain_gradients(model, *batches):
    for batch in batches:
        model(batch).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class Collect:
    """Copies what it gets, then spoils it: whoever reads a gradient later than that is found out."""

    def __init__(self):
        self.found, self.missing, self.buckets = {}, set(), []

    def __call__(self, bucket):
        self.buckets.append(list(bucket.parameters))
        self.missing |= bucket.missing
        self.found |= {name: p.grad.clone() for name, p in bucket.parameters.items()}
        if bucket.flat is not None:
            in_flat = bucket.flat.double().abs().sum()
            one_by_one = sum(p.grad.double().abs().sum() for p in bucket.parameters.values())
            assert torch.isclose(in_flat, one_by_one)
            bucket.flat.fill_(torch.nan)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["fused", "bucket"])
def test_gradients_given_up_are_bitwise_those_of_a_plain_pass(gpt, mode, tied):
    model = gpt(tied=tied)
    expected = plain_gradients(model, IDS)
    plan = predict(model, IDS, mode=mode, bucket_bytes=100_000)
    for _ in range(2):  # the second pass finds the first one's bytes
        collect = Collect()
        with GradientArena(plan, model, collect) as arena:
            model(IDS).backward()
            assert arena.stats().live_bytes <= 100_000
            arena.flush()
            assert arena.stats().live_bytes == 0
        assert collect.found.keys() == expected.keys()
        assert all(torch.equal(collect.found[name], expected[name]) for name in expected)
        assert all(p.grad is None for p in model.parameters())


def test_one_arena_serves_many_passes(gpt):
    model = gpt()
    expected = plain_gradients(model, IDS)
    collect = Collect()
    with GradientArena(predict(model, IDS, mode="bucket", bucket_bytes=50_000), model, collect) as arena:
        for _ in range(3):
            model(IDS).backward()
            arena.flush()
            assert all(torch.equal(collect.found[name], expected[name]) for name in expected)
        stats = arena.stats()
    assert stats.copies == 3 * len(expected)
    assert stats.buckets == len(collect.buckets) == 3 * len({tuple(b) for b in collect.buckets})
    assert stats.bytes <= 1.02 * stats.bound_bytes
    assert stats.peak_bytes <= stats.bytes < stats.gradient_bytes


def test_kept_gradients_are_one_tensor_and_add_up(gpt):
    model = gpt()
    batches = [IDS, IDS.flip(1), IDS + 1]
    expected = plain_gradients(model, *batches)
    with GradientArena(predict(model, IDS, mode="all-alive"), model) as arena:
        for step in range(2):
            for batch in batches:
                model(batch).backward()
                arena.flush()
            assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
            norm = torch.stack([g.norm() for g in expected.values()]).norm()
            assert torch.isclose(arena.flat.norm(), norm)
            assert arena.stats().copies == (step + 1) * len(expected)  # later batches are added in place
            assert arena.stats().live_bytes == sum(g.nbytes for g in expected.values())
            arena.flat.mul_(0.5)
            assert torch.equal(model.head.weight.grad, expected["head.weight"] * 0.5)
            model.zero_grad(set_to_none=True)
            assert arena.stats().live_bytes == 0


def test_what_has_no_gradient_is_zero_in_the_flat_tensor(gpt):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    x = torch.ones(2, 8)
    plan = predict(lambda x: model["b"](model["a"](x)).sum(), x, model=model, mode="all-alive")
    with GradientArena(plan, model) as arena:
        model["b"](model["a"](x)).sum().backward()
        model.zero_grad()
        model["a"](x).sum().backward()
        total = sum(p.grad.sum() for p in model["a"].parameters())
        assert torch.equal(arena.flat.sum(), total)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_step_in_each_bucket_equals_the_ordinary_step(gpt, mode):
    plain, ours = gpt(), gpt()
    ours.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plan = predict(ours, IDS, mode=mode, bucket_bytes=50_000)

    def step(bucket):
        with torch.no_grad():
            for parameter in bucket.parameters.values():
                parameter.sub_(parameter.grad, alpha=0.1)

    with GradientArena(plan, ours, step) as arena:
        for _ in range(3):
            plain(IDS).backward()
            optimizer.step()
            optimizer.zero_grad()
            ours(IDS).backward()
            if mode == "all-alive":
                for parameter in ours.parameters():
                    parameter.data.sub_(parameter.grad, alpha=0.1)
                ours.zero_grad()
            arena.flush()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_parameters_without_a_gradient_get_zeros_at_the_flush(gpt):
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    x = torch.ones(2, 64)
    plan = predict(lambda x: model["b"](model["a"](x)).sum(), x, model=model, mode="bucket")
    collect = Collect()
    with GradientArena(plan, model, collect) as arena:
        for _ in range(2):
            model["a"](x).sum().backward()
            assert not collect.buckets
            arena.flush()
            assert collect.missing == {"b.weight", "b.bias"}
            assert not collect.found["b.weight"].any()
            assert collect.found["a.weight"].any()
            collect.buckets.clear()


def test_strides_and_dtypes_are_the_parameters_own():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3).bfloat16())
    model.to(memory_format=torch.channels_last)
    x = torch.linspace(-1, 1, 4 * 64).view(1, 4, 8, 8)

    def loss(x):
        return model[2](model[1](model[0](x)).bfloat16()).float().square().sum()

    loss(x).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with GradientArena(predict(loss, x, model=model, mode="all-alive"), model) as arena:
        loss(x).backward()
        for name, p in model.named_parameters():
            assert p.grad.dtype == p.dtype
            assert p.grad.stride() == p.stride()
            assert torch.equal(p.grad, expected[name])
        with pytest.raises(PlanError, match="differ in dtype"):
            arena.flat  # noqa: B018
    collect = Collect()
    with GradientArena(predict(loss, x, model=model, mode="bucket"), model, collect) as arena:
        loss(x).backward()
        arena.flush()
    assert all(torch.equal(collect.found[name], grad) for name, grad in expected.items())


def test_the_arena_is_all_the_gradient_memory_there_is_between_passes(gpt):
    """Measured by the allocator: what a pass takes with an arena is what it takes without."""
    model = gpt()
    plan = predict(model, IDS, mode="fused")
    free = verify(plan, model, IDS).measured
    with GradientArena(plan, model, lambda bucket: None) as arena:
        from lf_memory.gradients._measure import measure

        found = measure(lambda: model(IDS), lambda loss: loss.backward(), torch.device("cpu"))
        assert found.gradient_peak_bytes <= free.gradient_peak_bytes * 1.001
        assert arena.stats().bytes == max(p.nbytes for p in model.parameters())


class TestRefusals:
    """Each names the cause and the fix."""

    def test_gradients_in_another_order(self):
        """Planned a after b after c; the loss now uses them the other way round."""
        model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "abcd"})
        x = torch.ones(2, 64)

        def loss(x, order):
            for name in order:
                x = model[name](x)
            return x.sum()

        plan = predict(loss, x, "abcd", model=model, mode="bucket", bucket_bytes=20_000)
        with GradientArena(plan, model, Collect()) as arena:
            with pytest.raises(PlanError, match=r"planned at the same place.*plan anew"):
                loss(x, "cabd").backward()
            with pytest.raises(PlanError, match="reset"):
                loss(x, "abcd").backward()
            arena.reset()
            loss(x, "abcd").backward()
            arena.flush()
            assert arena.stats().live_bytes == 0

    def test_a_second_pass_without_flush(self, gpt):
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        x = torch.ones(2, 4)
        plan = predict(lambda x: model["b"](model["a"](x)).sum(), x, model=model, mode="bucket")
        with GradientArena(plan, model, Collect()):
            model["a"](x).sum().backward()
            with pytest.raises(PlanError, match=r"flush\(\) after each"):
                model["a"](x).sum().backward()

    def test_a_consumer_that_fails_leaves_a_state_that_says_so(self, gpt):
        model, calls = gpt(), []

        def fail(bucket):
            calls.append(bucket)
            if len(calls) == 3:
                raise RuntimeError("no link")

        with GradientArena(predict(model, IDS), model, fail) as arena:
            with pytest.raises(RuntimeError, match="no link"):
                model(IDS).backward()
            assert arena.stats().live_bytes > 0
            with pytest.raises(PlanError, match="reset"):
                model(IDS).backward()
            arena.reset()
            model(IDS).backward()
            assert arena.stats().live_bytes == 0
        assert all(p.grad is None for p in model.parameters())

    def test_modes_that_give_up_need_a_consumer(self, gpt):
        with pytest.raises(PlanError, match="consume="):
            GradientArena(predict(gpt(), IDS), gpt())
        with GradientArena(predict(gpt(), IDS, accumulation=2), gpt()):
            pass

    def test_another_model(self, gpt):
        with pytest.raises(PlanError, match="no parameter"):
            GradientArena(predict(gpt(layers=3), IDS, mode="all-alive"), gpt())
        with pytest.raises(PlanError, match="planned gradient"):
            GradientArena(predict(gpt(width=32), IDS, mode="all-alive"), gpt())

    def test_a_layout_that_predict_does_not_make(self, gpt):
        plan = predict(gpt(), IDS, mode="all-alive")
        for moved in (
            [*plan.placements[:-1], replace(plan.placements[-1], offset=plan.placements[-1].offset + 128)],
            [replace(one, offset=one.offset + 4) for one in plan.placements],
        ):
            with pytest.raises(PlanError, match="next to its bucket"):
                GradientArena(replace(plan, placements=tuple(moved)), gpt())

    def test_gradients_that_were_given_up_are_not_one_tensor(self, gpt):
        model = gpt()
        with (
            GradientArena(predict(model, IDS), model, Collect()) as arena,
            pytest.raises(PlanError, match="use the buckets"),
        ):
            arena.flat  # noqa: B018


def test_closing_removes_hooks_and_frees_the_storage(gpt):
    model = gpt()
    arena = GradientArena(predict(model, IDS, mode="all-alive"), model)
    model(IDS).backward()
    arena.close()
    arena.close()
    assert all(p.grad is None for p in model.parameters())
    model(IDS).backward()
    assert arena.stats().live_bytes == 0
    assert arena.stats().copies == len(list(model.parameters()))
