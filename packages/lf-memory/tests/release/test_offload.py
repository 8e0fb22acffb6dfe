"""Saved activations in a host pool: the same bits, the device memory given back, leases that end with the graph."""

import gc
import threading

import pytest
import torch
from release_cases import batches, net
from release_late_streams import LateDevice
from release_peaks import peak_bytes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lf_memory import HostPool, PoolError, VariablePool
from lf_memory.gradients import _offload, offload

KIB = 1024


@pytest.fixture
def pool():
    with VariablePool(32 << 20, initial_bytes=0, grow_bytes=1 << 20, hugepages="off", safety=True) as made:
        yield made
        gc.collect()
        assert made.stats().live == 0, "a lease outlived its graph"


@pytest.fixture(params=["direct", "late"])
def device(request, monkeypatch):
    """Copies that are done at once, and copies that are done when they must be."""
    if request.param == "direct":
        return None
    late = LateDevice()
    copies = late.copies()
    monkeypatch.setattr(_offload, "copies_for", lambda device: copies)
    return late


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x)), inplace=True)).square().mean()


class Attention(nn.Module):
    """A joint q, k, v that is split by views, and dropout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v)), 0.3)
        return (x.sin() * x.mT.contiguous().mT).square().mean()


CASES = {
    "mlp": (lambda: net(dropout=0.2), lambda: batches(1)[0]),
    "attention": (Attention, lambda: torch.randn(4, 16, 32)),
    "convolution": (Convolution, lambda: torch.randn(2, 3, 12, 12)),
    "lstm": (lambda: Summed(nn.LSTM(8, 16, 2)), lambda: torch.randn(10, 3, 8)),
}


class Summed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0].square().sum()


def gradients(model, x, block):
    model.zero_grad()
    torch.manual_seed(7)
    with block as session:
        loss = model(x)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], session


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.usefixtures("device")
def test_losses_and_gradients_have_the_same_bits(pool, case, ahead):
    make, batch = case
    torch.manual_seed(0)
    model, x = make(), batch()
    expected, grads, _ = gradients(model, x, torch.enable_grad())
    expected_grads = [g.clone() for g in grads if g is not None]
    for _ in range(3):
        loss, grads, session = gradients(model, x, offload(pool, min_bytes=1, ahead=ahead))
        assert torch.equal(loss, expected)
        grads = [g for g in grads if g is not None]
        assert all(map(torch.equal, grads, expected_grads))
        assert session.stats().stored > 2
        assert session.stats().fetched == session.stats().stored


def test_what_is_stored_leaves_the_device_between_forward_and_backward(pool):
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))),
        torch.randn(512, 64),
    )
    activation = x.nbytes

    def held(block):
        gc.collect()
        losses = []

        def forward():
            with block:
                losses.append(model(x).sum())

        level = _growth(forward)
        losses[0].backward()
        return level

    assert held(torch.enable_grad()) >= 8 * activation
    assert held(offload(pool, min_bytes=KIB)) <= activation


def _growth(fn):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fn()
    return sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


def test_the_peak_of_forward_and_backward_is_lower(pool):
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))),
        torch.randn(2048, 64),
    )

    def step(block):
        with block:
            loss = model(x).sum()
        loss.backward()

    plain = peak_bytes(lambda: step(torch.enable_grad()))
    assert peak_bytes(lambda: step(offload(pool, min_bytes=KIB, ahead=1))) < 0.6 * plain


def test_one_storage_is_stored_once_however_often_and_in_whatever_shape_it_is_saved(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB) as session:
        y = x * 2.0
        z = (y * y).sum() + y.view(-1).sin().sum() + (y[:, :32] * y[:, 32:]).sum() + y.t().exp().sum()
    stats = session.stats()
    assert stats.stored == 2  # y, and the result of exp
    assert stats.shared == 4
    z.backward()
    expected = torch.autograd.grad(_again(x), x)[0]
    assert torch.equal(x.grad, expected)


def _again(x):
    y = x * 2.0
    return (y * y).sum() + y.view(-1).sin().sum() + (y[:, :32] * y[:, 32:]).sum() + y.t().exp().sum()


def test_a_new_tensor_at_the_address_of_a_dead_one_is_stored_for_itself(pool):
    losses, inputs = [], [torch.full((64, 64), float(i), requires_grad=True) for i in range(8)]
    with offload(pool, min_bytes=KIB) as session:
        for x in inputs:
            y = x + 1.0
            losses.append((y * y).sum())
            del y  # its memory serves the next
    assert session.stats().stored == 8
    for i, (loss, x) in enumerate(zip(losses, inputs, strict=True)):
        loss.backward()
        assert torch.equal(x.grad, torch.full((64, 64), 2.0 * (i + 1)))


def test_parameters_their_views_and_what_keep_names_stay(pool):
    model = nn.Linear(64, 64)
    model.register_buffer("table", torch.randn(64, 64))
    constant = torch.randn(64, 64)
    for keep, kept in ((model, 1), ([model.table, constant], 2)):
        x = torch.randn(32, 64, requires_grad=True)
        with offload(pool, min_bytes=KIB, keep=keep) as session:
            y = F.linear(x, model.weight * 1.0) + F.linear(x, model.weight.t()[:64])
            loss = (y @ model.table).sum() + (y @ constant[:, :32]).sum() + (model.weight.view(-1) ** 2).sum()
        loss.backward()
        assert session.stats().kept["parameter"] == 4 + kept  # x, two of weight, its square


def test_small_odd_and_partial_tensors_stay(pool):
    large = torch.randn(256, 256, requires_grad=True)
    with offload(pool, min_bytes=KIB) as session:
        y = large * 1.0
        part = y[:32] * y[:32]
        small = y[:1, :4] * y[:1, :4]
        turned = torch.view_as_complex(torch.randn(64, 64, 2)).conj() * torch.complex(
            y[:64, :64], y[:64, :64]
        )
        loss = part.sum() + small.sum() + turned.abs().sum()
    loss.backward()
    kept = session.stats().kept
    assert kept["part"] >= 2
    assert kept["small"] >= 2
    assert kept["kind"] >= 1
    sparse = torch.randn(64, 64).relu().to_sparse()
    with offload(pool, min_bytes=KIB) as session:
        torch.sparse.mm(sparse, large[:64]).sum().backward()
    assert session.stats().kept["kind"] >= 1
    assert session.stats().kept_bytes["kind"] == 0


@pytest.mark.parametrize("make", [
    lambda: HostPool(64 * KIB, 2, hugepages="off"), lambda: HostPool(KIB, 64, hugepages="off"),
    lambda: VariablePool(130 * KIB, hugepages="off"), lambda: VariablePool(4 * KIB, hugepages="off"),
])  # fmt: skip
@pytest.mark.usefixtures("device")
def test_what_finds_no_room_stays_and_nothing_waits(make):
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(6))), torch.randn(128, 128, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    with make() as small:
        for _ in range(3):
            with offload(small, min_bytes=KIB) as session:
                loss = model(x).sum()
            loss.backward()
            assert torch.equal(x.grad, expected)
            x.grad = None
            stats = session.stats()
            assert stats.kept["pool"] + stats.stored == 6
            assert stats.kept_bytes["pool"] == stats.kept["pool"] * x.nbytes
            del loss
        assert small.stats().live == 0


def test_a_closed_pool_is_an_error(pool):
    other = VariablePool(KIB * 64, hugepages="off")
    other.close()
    with pytest.raises(PoolError, match="closed"), offload(other, min_bytes=1):
        torch.randn(4, requires_grad=True).exp()


@pytest.mark.usefixtures("device")
def test_a_retained_graph_reads_again(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB):
        loss = (x.sin() * x.cos()).exp().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)


@pytest.mark.usefixtures("device")
def test_double_backward_has_the_same_bits(pool):
    x = torch.randn(64, 64, requires_grad=True)

    def second(block):
        with block:
            (grad,) = torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
            loss = grad.square().sum()
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(second(offload(pool, min_bytes=KIB)), second(torch.enable_grad()))


@pytest.mark.usefixtures("device")
def test_a_graph_that_is_dropped_gives_its_leases_back(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB) as session:
        loss = x.exp().cos().sum()
    assert pool.stats().live == session.stats().stored == 1
    del loss
    assert pool.stats().live == 0


@pytest.mark.usefixtures("device")
def test_part_of_a_graph_that_no_backward_reads_is_given_back_with_it(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB, ahead=3):
        used, unused = x.sin().cos().sum(), x.exp().tanh().sum()
    used.backward()
    del used, unused
    assert pool.stats().live == 0


def test_a_tensor_changed_in_place_is_an_error_as_without(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB):
        y = x.exp()
        loss = y.sum()
    y.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_changed_in_place_between_two_savings_is_stored_twice(pool):
    x, scratch = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64)
    with offload(pool, min_bytes=KIB) as session:
        before = (x * scratch).sum()
        scratch.add_(1.0)
        after = (x * scratch).sum()
    assert session.stats().stored == 2
    after.backward()
    assert torch.equal(x.grad, torch.full((64, 64), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("alias", [False, True], ids=["the tensor", "its alias"])
@pytest.mark.parametrize("way", ["compared", "on a device, unshared"])
def test_a_change_that_no_version_tells_of_is_seen_by_the_next_saving(pool, monkeypatch, way, alias):
    """`.data` has a version counter of its own; a second saving once got the bytes of the first."""
    options = {}
    if way != "compared":
        copies = LateDevice().copies()
        monkeypatch.setattr(_offload, "copies_for", lambda device: copies)
        options = {"share": False}
    x, scratch = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64)
    with offload(pool, min_bytes=KIB, **options) as session:
        before = (x * scratch).sum()
        scratch.data.add_(1.0)
        after = (x * (scratch.data if alias else scratch)).sum()
    assert session.stats().stored == 2
    after.backward()
    assert torch.equal(x.grad, torch.full((64, 64), 2.0))
    x.grad = None
    before.backward()
    if way == "compared":  # on a device the copy may come behind the change
        assert torch.equal(x.grad, torch.ones(64, 64))


def test_without_sharing_each_saving_has_a_copy(pool):
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB, share=False) as session:
        z = _again(x)
    assert session.stats().shared == 0
    assert session.stats().stored == 6
    z.backward()
    assert torch.equal(x.grad, torch.autograd.grad(_again(x), x)[0])


def test_an_error_in_the_block_leaves_hooks_and_leases_behind_it(pool):
    x = torch.randn(64, 64, requires_grad=True)

    def fail():
        y = x.exp()
        raise KeyError(y.shape)

    with pytest.raises(KeyError), offload(pool, min_bytes=KIB):
        fail()
    gc.collect()
    assert pool.stats().live == 0
    x.sin().sum().backward()


def test_blocks_in_threads_do_not_meet(pool):
    results = {}

    def work(seed):
        x = torch.full((64, 64), float(seed), requires_grad=True)
        for _ in range(20):
            x.grad = None
            with offload(pool, min_bytes=KIB):
                loss = (x * x).exp().sin().sum()
            loss.backward()
        results[seed] = x.grad[0, 0].item()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        x = torch.full((64, 64), float(seed), requires_grad=True)
        (x * x).exp().sin().sum().backward()
        assert results[seed] == x.grad[0, 0].item()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_work_inside(pool, reentrant):
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64, requires_grad=True)

    def run(block):
        x.grad = None
        with block:
            loss = checkpoint(layer, x.exp(), use_reentrant=reentrant).square().sum()
        loss.backward()
        return x.grad

    assert torch.equal(run(offload(pool, min_bytes=KIB)), run(torch.enable_grad()))


def test_a_compiled_function_saves_to_the_pool(pool):
    x = torch.randn(64, 64, requires_grad=True)
    function = torch.compile(lambda x: (x.sin() * x.exp()).sum(), backend="aot_eager", fullgraph=True)
    function(x).backward()
    expected, x.grad = x.grad, None
    with offload(pool, min_bytes=KIB):
        loss = function(x)
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_statistics_count_bytes_and_early_fetches(pool, monkeypatch):
    copies = LateDevice().copies()
    monkeypatch.setattr(_offload, "copies_for", lambda device: copies)
    x = torch.randn(64, 64, requires_grad=True)
    with offload(pool, min_bytes=KIB, ahead=2) as session:
        loss = x.exp().cos().exp().tanh().sum()
    loss.backward()
    stats = session.stats()
    assert stats.stored == stats.fetched == 3  # exp, which cos reads too, exp and tanh
    assert stats.stored_bytes == stats.fetched_bytes == 3 * x.nbytes
    assert stats.ahead == 2
    assert '"stored": 3' in stats.to_json()


@pytest.mark.parametrize("options", [{"min_bytes": 0}, {"ahead": -1}])
def test_arguments_out_of_range_are_refused(pool, options):
    with pytest.raises(ValueError, match="at least"), offload(pool, **options):
        pass


class TestLateCopies:
    """The order of copies and waits on a device, with copies that run as late as they may."""

    def test_device_memory_is_held_until_its_copy_is_behind_the_caller(self, pool):
        late = LateDevice()
        copies = late.copies()
        slots = [torch.empty(64, dtype=torch.uint8) for _ in range(7)]
        for i, slot in enumerate(slots):
            copies.out(torch.full((64,), i, dtype=torch.uint8), slot)
        assert late.sides[0].done == 3  # four are in flight
        copies.settle()
        assert [int(slot[0]) for slot in slots] == list(range(7))

    def test_memory_of_an_early_fetch_that_nobody_reads_is_held_for_its_copy(self, pool, monkeypatch):
        late = LateDevice()
        copies = late.copies()
        monkeypatch.setattr(_offload, "copies_for", lambda device: copies)
        x = torch.randn(64, 64, requires_grad=True)
        with offload(pool, min_bytes=KIB, ahead=3):
            unused, used = x.exp().cos().sum(), x.exp().sum()
        used.backward()
        assert late.held == []
        del unused
        assert late.held == [(x.nbytes, late.sides[0])]

    def test_a_lease_is_not_leased_again_before_its_copy_has_passed(self, monkeypatch):
        late = LateDevice()
        copies = late.copies()
        monkeypatch.setattr(_offload, "copies_for", lambda device: copies)
        x = torch.randn(64, 64, requires_grad=True)
        with HostPool(x.nbytes, 1, hugepages="off") as one:
            with offload(one, min_bytes=KIB):
                loss = x.exp().sum()
                copies._flying.clear()  # as if the device were far behind
            del loss
            assert one.stats().fenced == 1
            assert one.try_acquire() is None
            late.sides[0].run(1)
            one.acquire(timeout=1.0).release()
