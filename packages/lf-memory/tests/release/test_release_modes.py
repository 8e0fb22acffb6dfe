"""Each mode computes what it says: the ordinary loop's bits, or the mathematics of its docstring."""

import pytest
import torch
from release_cases import (
    assert_close,
    assert_same,
    assert_same_state,
    batches,
    closure,
    groups,
    net,
    train,
    train_released,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lf_memory.gradients import ReleaseError, release

OPTIMIZERS = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2),
    "adamw foreach": lambda ps: AdamW(ps, lr=1e-2, foreach=True),
    "adamw fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "adamw amsgrad": lambda ps: AdamW(ps, lr=1e-2, amsgrad=True),
    "adamw lr tensor": lambda ps: AdamW(ps, lr=torch.tensor(1e-2), foreach=False),
    "adam decay maximize": lambda ps: Adam(ps, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd": lambda ps: SGD(ps, lr=1e-2),
    "sgd momentum": lambda ps: SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1, dampening=0.1),
    "sgd nesterov": lambda ps: SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda ps: RMSprop(ps, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda ps: Adagrad(ps, lr=1e-2),
    "nadam": lambda ps: NAdam(ps, lr=1e-2),
    "radam": lambda ps: RAdam(ps, lr=1e-2),
    "adafactor": lambda ps: Adafactor(ps, lr=1e-2),
}
EQUAL_MODES = {
    "fused": ("fused", {}, None),
    "fused alone": ("fused", {"chunk_bytes": 1}, None),
    "fused, some together": ("fused", {"chunk_bytes": 9000}, None),
    "fused buffer": ("fused", {"accumulation": 3, "accumulate": "buffer"}, None),
    "exact": ("exact", {}, None),
    "exact clip": ("exact", {"clip": 0.5, "accumulation": 3}, 0.5),
    "exact gate": ("exact", {"clip": 0.5, "gate": True}, 0.5),
    "two_pass": ("two_pass", {"clip": 0.5}, 0.5),
    "two_pass alone": ("two_pass", {"clip": 0.5, "chunk_bytes": 1}, 0.5),
    "two_pass gate": ("two_pass", {"gate": True}, None),
    "fused gate": ("fused", {"gate": True}, None),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("case", EQUAL_MODES.values(), ids=EQUAL_MODES)
def test_parameters_and_optimizer_state_have_the_bits_of_the_ordinary_loop(make, case):
    mode, options, clip = case
    theirs, ours = net(), net()
    plain, released = make(groups(theirs)), make(groups(ours))
    data = batches(12)
    expected = train(theirs, plain, data, options.get("accumulation", 1), clip)
    losses, handle = train_released(ours, released, data, mode, **options)
    assert losses == expected
    assert_same(ours, theirs)
    assert_same_state(released, plain)
    assert all(p.grad is None for p in ours.parameters())
    assert handle.stats().live_bytes == 0


@pytest.mark.parametrize("mode", ["fused", "exact", "two_pass"])
@pytest.mark.parametrize("make_schedule", [
    lambda o: CosineAnnealingLR(o, 8),
    lambda o: OneCycleLR(o, [0.02, 0.01], total_steps=10),  # moves betas too
])  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_schedulers_act_as_before_and_do_not_warn(mode, make_schedule):
    theirs, ours = net(), net()
    plain, released = AdamW(groups(theirs), lr=1e-2), AdamW(groups(ours), lr=1e-2)
    train(theirs, plain, batches(8), schedule=make_schedule(plain))
    train_released(ours, released, batches(8), mode, schedule=make_schedule(released))
    assert_same(ours, theirs)


def test_exact_with_four_micro_batches_and_global_clip_is_the_ordinary_loop():
    theirs, ours = net(width=64), net(width=64)
    train(theirs, AdamW(theirs.parameters(), lr=1e-2), batches(40), accumulation=4, clip=1.0)
    _, handle = train_released(
        ours, AdamW(ours.parameters(), lr=1e-2), batches(40), "exact", accumulation=4, clip=1.0
    )
    assert_close(ours, theirs, atol=1e-6)
    assert handle.norm > 0


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 30])
def test_exact_gives_the_same_bits_whatever_the_chunk(chunk_bytes):
    theirs, ours = net(), net()
    train(theirs, AdamW(groups(theirs), lr=1e-2), batches(4), clip=0.5)
    train_released(ours, AdamW(groups(ours), lr=1e-2), batches(4), "exact", clip=0.5, chunk_bytes=chunk_bytes)
    assert_same(ours, theirs)


def test_exact_norm_follows_changes_made_to_gradients_after_the_backward():
    theirs, ours = net(), net()
    plain, released = SGD(theirs.parameters(), lr=1.0), SGD(ours.parameters(), lr=1.0)
    handle = release(ours, released, "exact", clip=1e-3)
    for model in (theirs, ours):
        model(batches(1)[0]).backward()
        model.first.weight.grad.mul_(100.0)  # in place: same tensor
        model.second.weight.grad = model.second.weight.grad * 100.0  # another tensor
        model.norm.weight.grad = None
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
    plain.step()
    handle.step()
    assert_same(ours, theirs)


def test_exact_norm_of_bfloat16_gradients_is_summed_in_float32():
    model = net(dtype=torch.bfloat16, width=64)
    handle = release(model, SGD(model.parameters(), lr=0.1), "exact", clip=1.0)
    model(batches(1)[0]).backward()
    exact = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    handle.step()
    assert handle.norm.dtype == torch.float32
    torch.testing.assert_close(handle.norm.double(), exact, rtol=1e-6, atol=0)


def test_kept_bfloat16_gradients_lose_nothing_under_autocast_of_single_uses():
    def autocast_net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    theirs, ours = autocast_net(), autocast_net()
    plain, released = AdamW(theirs.parameters(), lr=1e-2), AdamW(ours.parameters(), lr=1e-2)
    handle = release(ours, released, "exact", keep=torch.bfloat16)
    for x in torch.randn(5, 16, 32, generator=torch.Generator().manual_seed(1)):
        for model in (theirs, ours):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        plain.step()
        plain.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
        handle.step()
    assert_same(ours, theirs)
    total = sum(p.nbytes for p in ours.parameters())
    assert handle.stats().peak_bytes < 0.8 * total  # half, and the one that is being narrowed


def test_kept_gradients_are_rounded_to_their_type_and_clipped_by_their_norm():
    theirs, ours = net(), net()
    plain, released = SGD(theirs.parameters(), lr=1.0), SGD(ours.parameters(), lr=1.0)
    handle = release(ours, released, "exact", keep=torch.bfloat16, clip=0.1)
    for model in (theirs, ours):
        model(batches(1)[0]).backward()
    for p in theirs.parameters():
        if p.grad is not None:
            p.grad = p.grad.bfloat16().float()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    plain.step()
    handle.step()
    assert_close(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("mode", ["fused", "exact"])
def test_buffers_sum_bfloat16_gradients_in_float32(mode):
    model = net(dtype=torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad and n != "unused"}
    sums = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    data = batches(6)
    for ids in data:
        for name, g in zip(trainable, torch.autograd.grad(model(ids), list(trainable.values())), strict=True):
            sums[name] += g
    handle = release(model, SGD(model.parameters(), lr=0.5), mode, accumulation=6, accumulate="buffer")
    for ids in data:
        model(ids).backward()
    handle.step()
    for name, p in model.named_parameters():
        expected = before[name].add(sums[name].bfloat16(), alpha=-0.5)
        assert torch.equal(p, expected if name in trainable else before[name])


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_an_unfinished_window_of_micro_batches_is_stepped_like_the_ordinary_loop(rounds):
    theirs, ours = net(), net()
    plain = AdamW(theirs.parameters(), lr=1e-2)
    train(theirs, plain, batches(rounds), accumulation=8)
    released = AdamW(ours.parameters(), lr=1e-2)
    handle = release(ours, released, "fused", accumulation=8, accumulate="buffer")
    for ids in batches(rounds):
        (ours(ids) / 8).backward()
    handle.step()
    assert_same(ours, theirs)
    assert handle.stats().at_step > 0


class TestTwoPass:
    def test_dropout_and_running_statistics_are_those_of_one_pass(self):
        theirs, ours = net(dropout=0.3, batch_norm=True), net(dropout=0.3, batch_norm=True)
        torch.manual_seed(5)
        expected = train(theirs, AdamW(theirs.parameters(), lr=1e-2), batches(6), clip=0.5)
        torch.manual_seed(5)
        losses, handle = train_released(
            ours, AdamW(ours.parameters(), lr=1e-2), batches(6), "two_pass", clip=0.5
        )
        assert losses == expected
        assert_same(ours, theirs)
        assert handle.drift == 0

    def test_drift_shows_a_forward_that_does_not_repeat(self):
        model, data = net(), iter(batches(2))
        handle = release(model, SGD(model.parameters(), lr=0.1), "two_pass", clip=1.0)

        def other_batch_each_time():
            loss = model(next(data))
            loss.backward()
            return loss

        handle.step(other_batch_each_time)
        assert handle.drift > 1e-4

    def test_buffers_that_a_forward_replaces_move_once_a_step(self):
        class Counter(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls = self.calls + 1
                return super().forward(x)

        model = Counter()
        handle = release(model, SGD(model.parameters(), lr=0.1), "two_pass", clip=1.0)
        for _ in range(3):
            handle.step(lambda: model(torch.ones(2, 4)).sum().backward())
        assert model.calls == 3

    def test_needs_its_closure_and_one_backward_in_it(self):
        model = net()
        handle = release(model, SGD(model.parameters(), lr=0.1), "two_pass", clip=1.0)
        with pytest.raises(ReleaseError, match=r"handle\.step\(closure\)"):
            model(batches(1)[0]).backward()
        handle.reset()
        with pytest.raises(ValueError, match="twice"):
            handle.step()
        handle.reset()

        def two_backwards():
            for ids in batches(2):
                model(ids).backward()

        with pytest.raises(ReleaseError, match="two gradients in one pass"):
            handle.step(two_backwards)

    @pytest.mark.parametrize("first", [True, False])
    def test_passes_that_use_different_parameters_are_an_error(self, first):
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        model, calls = nn.ModuleList([a, b]), []
        handle = release(model, SGD(model.parameters(), lr=0.1), "two_pass", clip=1.0)

        def work():
            calls.append(1)
            x = a(torch.ones(1, 4))
            (b(x) if (len(calls) == 1) == first else x).sum().backward()

        with pytest.raises(ReleaseError, match="same work both times"):
            handle.step(work)
        assert handle.broken

    def test_a_closure_without_backward_changes_nothing(self):
        model = net()
        before = net()
        handle = release(model, AdamW(model.parameters()), "two_pass", clip=1.0)
        assert handle.step(lambda: torch.zeros(())) is None
        assert_same(model, before)


class TestLocalClip:
    def test_by_parameter_is_clipping_of_each_alone(self):
        theirs, ours = net(), net()
        plain = AdamW(theirs.parameters(), lr=1e-2)
        for ids in batches(5):
            plain.zero_grad()
            theirs(ids).backward()
            for p in theirs.parameters():
                torch.nn.utils.clip_grad_norm_([p], 0.05)
            plain.step()
        train_released(ours, AdamW(ours.parameters(), lr=1e-2), batches(5), "local_clip", clip=0.05)
        assert_same(ours, theirs)

    def test_running_takes_the_larger_of_the_norm_so_far_and_the_last_step(self):
        theirs, ours = net(), net()
        order = []
        hooks = [
            p.register_post_accumulate_grad_hook(order.append) for p in theirs.parameters() if p.requires_grad
        ]
        plain, last = SGD(theirs.parameters(), lr=0.1), 0.0
        for ids in batches(5):
            plain.zero_grad()
            order.clear()
            theirs(ids).backward()
            squares = 0.0
            for p in order:
                squares += p.grad.norm() ** 2
                p.grad.mul_(torch.clamp(0.2 / (max(squares**0.5, last) + 1e-6), max=1.0))
            last = squares**0.5
            plain.step()
        for hook in hooks:
            hook.remove()
        _, handle = train_released(
            ours, SGD(ours.parameters(), lr=0.1), batches(5), "local_clip", clip=0.2, clip_by="running"
        )
        assert_close(ours, theirs, atol=1e-6)
        torch.testing.assert_close(handle.norm, last)

    def test_running_norm_is_saved_and_loaded(self):
        whole, halves = net(), net()
        options = {"clip": 0.2, "clip_by": "running"}
        train_released(whole, SGD(whole.parameters(), lr=0.1), batches(4), "local_clip", **options)
        _, handle = train_released(
            halves, SGD(halves.parameters(), lr=0.1), batches(4)[:2], "local_clip", **options
        )
        saved = handle.state_dict()
        with release(halves, SGD(halves.parameters(), lr=0.1), "local_clip", **options) as handle:
            handle.load_state_dict(saved)
            for ids in batches(4)[2:]:
                halves(ids).backward()
                handle.step()
        assert_same(halves, whole)

    def test_buffer_clips_the_sum_of_the_micro_batches(self):
        theirs, ours = net(), net()
        plain = SGD(theirs.parameters(), lr=0.1)
        for ids in batches(3):
            (theirs(ids) / 3).backward()
        for p in theirs.parameters():
            torch.nn.utils.clip_grad_norm_([p], 0.05)
        plain.step()
        train_released(
            ours,
            SGD(ours.parameters(), lr=0.1),
            batches(3),
            "local_clip",
            clip=0.05,
            accumulation=3,
            accumulate="buffer",
        )
        assert_same(ours, theirs)


class TestStateAccumulation:
    def test_adamw_is_adam_accumulation(self):
        """m of the sum, v of the sum of squares, in float64."""
        model = net(dtype=torch.float64)
        reference = net(dtype=torch.float64)
        params = [p for p in reference.parameters() if p.requires_grad]
        m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
        data = batches(12)
        for step in range(1, 4):
            parts = [
                torch.autograd.grad(reference(ids) / 4, params, allow_unused=True)
                for ids in data[4 * step - 4 : 4 * step]
            ]
            with torch.no_grad():
                for i, p in enumerate(params):
                    grads = [part[i] for part in parts if part[i] is not None]
                    if not grads:
                        continue
                    m[i] = 0.9 * m[i] + 0.1 * sum(grads)
                    v[i] = 0.99 * v[i] + 0.01 * sum(g * g for g in grads)
                    p.mul_(1 - 1e-2 * 0.1)
                    p -= 1e-2 * (m[i] / (1 - 0.9**step)) / ((v[i] / (1 - 0.99**step)).sqrt() + 1e-8)
        optimizer = AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        _, handle = train_released(model, optimizer, data, "fused", accumulation=4, accumulate="state")
        assert_close(model, reference, atol=1e-12)
        largest = max(p.nbytes for p in params)
        assert handle.stats().peak_bytes == handle.stats().planned_bytes == largest

    @pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(1e-2)}])
    def test_one_micro_batch_is_plain_adamw_and_its_state_goes_on_in_it(self, options):
        theirs, ours = net(), net()
        options = {"lr": 1e-2, **options}
        if isinstance(options["lr"], torch.Tensor):
            options["foreach"] = False
        plain, released = AdamW(groups(theirs), **options), AdamW(groups(ours), **options)
        train(theirs, plain, batches(6))
        train_released(ours, released, batches(6)[:3], "fused", accumulate="state")
        after = AdamW(groups(ours), **options)
        after.load_state_dict(released.state_dict())
        train(ours, after, batches(6)[3:])
        assert_close(ours, theirs, atol=1e-6)

    @pytest.mark.parametrize("dampening", [0.0, 0.3])
    def test_momentum_is_the_ordinary_loop(self, dampening):
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": dampening}
        theirs, ours = net(dtype=torch.float64), net(dtype=torch.float64)
        plain, released = SGD(theirs.parameters(), **options), SGD(ours.parameters(), **options)
        train(theirs, plain, batches(12), accumulation=4)
        train_released(ours, released, batches(12), "fused", accumulation=4, accumulate="state")
        assert_close(ours, theirs, atol=1e-12)
        keys = [[state.keys() for state in o.state_dict()["state"].values()] for o in (released, plain)]
        assert keys[0] == keys[1]

    def test_parameters_seen_in_fewer_micro_batches_are_updated_at_the_step(self):
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.ModuleList([a, b])
        handle = release(
            model, SGD(model.parameters(), lr=0.1, momentum=0.9), "fused", accumulation=2, accumulate="state"
        )
        before = b.weight.detach().clone()
        a(torch.ones(1, 4)).sum().backward()
        b(a(torch.ones(1, 4))).sum().backward()
        handle.step()
        assert handle.stats().in_backward == 2
        assert handle.stats().at_step == 2
        assert not torch.equal(b.weight, before)


def test_a_closure_works_in_every_mode():
    for mode in ("fused", "exact"):
        theirs, ours = net(), net()
        train(theirs, AdamW(theirs.parameters(), lr=1e-2), batches(3))
        handle = release(ours, AdamW(ours.parameters(), lr=1e-2), mode)
        for ids in batches(3):
            with torch.no_grad():
                loss = handle.step(closure(ours, ids))
            assert loss > 0
        assert_same(ours, theirs)


def test_two_optimizers_of_one_model_are_released_side_by_side():
    theirs, ours = net(), net()
    for model, make in ((theirs, None), (ours, release)):
        split = [list(model.first.parameters()), [model.embed.weight, *model.second.parameters()]]
        optimizers = [AdamW(split[0], lr=1e-2), SGD(split[1], lr=1e-1)]
        handles = [make(model, o, "fused") for o in optimizers] if make else optimizers
        for ids in batches(4):
            model(ids).backward()
            for handle in handles:
                handle.step()
            model.zero_grad()
    assert_same(ours, theirs)


def test_released_steps_under_autocast_and_compile_have_the_bits_of_the_ordinary_loop():
    theirs, ours = net(), net()
    plain, released = AdamW(theirs.parameters(), lr=1e-2), AdamW(ours.parameters(), lr=1e-2)
    handle = release(ours, released, "fused", chunk_bytes=1)
    ours_forward, theirs_forward = (
        torch.compile(m, backend="aot_eager", fullgraph=True) for m in (ours, theirs)
    )
    for ids in batches(3):
        for forward in (ours_forward, theirs_forward):
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(ids)
            loss.backward()
        plain.step()
        plain.zero_grad()
        handle.step()
        assert handle.stats().in_backward > 0
    assert_same(ours, theirs)


def test_empty_parameters_and_scalars_are_steppable():
    model = nn.ParameterList([nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(2.0))])
    handle = release(model, SGD(model.parameters(), lr=0.5), "exact", clip=10.0)
    (model[0].sum() + model[1].square()).backward()
    handle.step()
    assert model[1] == 0.0
    assert F.relu(model[1]) == 0.0
