"""GraphPool: a budget that counts shared memory once, and poison for what must not be read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from metered import MeteredBackend
from torch import Tensor, nn

from lf_graph import BudgetError, Chain, Eager, GraphPool, Piece, capture

# -- budget -----------------------------------------------------------------------------------------------------


class Owner:
    """Something that captures."""


def take(pool: GraphPool, backend: MeteredBackend, needs: int, keeps: int) -> Owner:
    owner, backend.needs, backend.keeps = Owner(), needs, keeps
    pool.check_budget("it", needs)
    with pool.counting(owner):
        backend.capture(lambda: None, pool.handle)
    return owner


def test_memory_used_in_passing_is_counted_once() -> None:
    backend = MeteredBackend()
    pool = GraphPool(backend, max_bytes=1000)
    kept = [take(pool, backend, needs=900, keeps=100) for _ in range(2)]
    assert (pool.bytes, len(kept)) == (1000, 2)
    with pytest.raises(BudgetError, match=r"about 900 bytes.*1000 of 1000 are used, 800 of them shared"):
        take(pool, backend, needs=900, keeps=100)


def test_what_stays_in_use_is_not_shared() -> None:
    backend = MeteredBackend()
    pool = GraphPool(backend, max_bytes=1000)
    first = take(pool, backend, needs=600, keeps=600)
    with pytest.raises(BudgetError):
        take(pool, backend, needs=500, keeps=0)
    pool.release(first)
    backend.in_use = backend.reserved = 0
    take(pool, backend, needs=1000, keeps=0)
    assert pool.bytes == 1000


def test_a_pool_without_graphs_is_empty() -> None:
    backend = MeteredBackend()
    pool = GraphPool(backend)
    owner = take(pool, backend, 300, 100)
    pool.release(owner)
    pool.release(owner)
    assert pool.bytes == 0


def test_an_empty_pool_gets_a_new_handle_and_a_used_one_keeps_its_own() -> None:
    backend = MeteredBackend()
    backend.new_pool = object  # type: ignore[method-assign,assignment]
    pool = GraphPool(backend)
    first = take(pool, backend, 100, 10)
    handle = pool.handle
    second = take(pool, backend, 100, 10)
    assert pool.handle is handle
    pool.release(first)
    third = take(pool, backend, 100, 10)
    assert pool.handle is handle
    for owner in (second, third):
        pool.release(owner)
    take(pool, backend, 100, 10)
    assert pool.handle is not handle


def test_a_closed_chain_releases_its_memory() -> None:
    backend = MeteredBackend(keeps=50)
    backend.needs = 300
    pool = GraphPool(backend, max_bytes=300)
    for _ in range(3):
        capture(lambda x: x * x, torch.ones(2), pool=pool).close()
        backend.reserved = 0
    assert pool.bytes == 0


def test_a_pool_is_made_for_a_device_by_name() -> None:
    assert GraphPool("cpu").backend.name == "recorder"
    assert GraphPool(torch.device("cpu")).backend is GraphPool("cpu").backend


# -- poison ----------------------------------------------------------------------------------------------------


def poisoned() -> GraphPool:
    return GraphPool("cpu", poison=True)


def all_nan(t: Tensor) -> bool:
    return bool(t.isnan().all())


def test_outputs_in_graph_memory_are_spoiled_after_the_backward() -> None:
    model = nn.Linear(4, 4)
    graphed = capture(model, torch.randn(2, 4), pool=poisoned(), copy_outputs=False)
    for _ in range(2):
        out = graphed(torch.randn(2, 4))
        view = out.detach()
        assert out.isfinite().all()
        out.sum().backward()
        assert all_nan(view)


def test_copied_outputs_and_plain_pools_are_not_spoiled() -> None:
    model = nn.Linear(4, 4)
    for options in ({"pool": poisoned()}, {"pool": GraphPool("cpu"), "copy_outputs": False}):
        out = capture(model, torch.randn(2, 4), **options)(torch.randn(2, 4))  # type: ignore[arg-type]
        view = out.detach()
        out.sum().backward()
        assert view.isfinite().all()


def test_the_environment_switches_poison_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not GraphPool("cpu").poison
    monkeypatch.setenv("LOONGFORGE_DEBUG_GRAPH", "1")
    assert GraphPool("cpu").poison


def test_a_stale_edge_read_by_eager_code_shows() -> None:
    """Row 16, Megatron#5966: a consumer that runs after the buffer was given back."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach())
        return x * 2

    pieces = [nn.Linear(4, 4), nn.Linear(4, 4)]
    chain = Chain([Piece(pieces[0]), Eager(keep), Piece(pieces[1])], pool=poisoned()).capture(
        torch.randn(2, 4)
    )
    kept.clear()
    chain(torch.randn(2, 4)).sum().backward()
    assert all_nan(kept[0])


def test_gradients_of_edges_are_spoiled_by_the_next_forward() -> None:
    chain = Chain([Piece(nn.Linear(4, 4)), Piece(nn.Linear(4, 4))], pool=poisoned())
    chain.capture(torch.randn(2, 4))
    segment = chain._stages[0].captured()
    (edge,) = [g for n, g in segment.grads.items() if n not in segment.seeds]
    chain(torch.randn(2, 4)).sum().backward()
    assert edge.isfinite().all()
    chain(torch.randn(2, 4))
    assert all_nan(edge)


class Stateful(nn.Module):
    """Returns its input, a parameter and a buffer besides something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.count = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.count.add_(1)
        return x, self.weight, self.count, x * self.weight


def test_inputs_parameters_and_buffers_are_never_spoiled() -> None:
    model = Stateful()
    graphed = capture(model, torch.ones(3), pool=poisoned(), copy_outputs=False)
    for n in range(1, 4):
        *lasting, product = graphed(torch.full((3,), 2.0))
        view = product.detach()
        product.sum().backward()
        assert [t.detach().tolist() for t in lasting] == [[2.0] * 3, [1.0] * 3, [float(n)] * 3]
        assert all_nan(view)
    assert model.weight.tolist() == [1.0] * 3
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("checkpoint", [False, True])
def test_correct_programs_have_the_same_numbers_in_a_poisoned_pool(checkpoint: bool) -> None:
    results: list[list[Any]] = []
    for pool in (poisoned(), GraphPool("cpu")):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
        elements = [
            Piece(parts[0], ("x",), ("a",), checkpoint=checkpoint),
            Piece(parts[1], ("a",), ("b",), checkpoint=checkpoint),
            Eager(lambda b: b.relu(), ("b",), ("c",)),
            Piece(lambda a, c: a * c, ("a", "c"), ("d",)),
            Piece(parts[2], ("d",), ("y",), checkpoint=checkpoint),
        ]
        chain = Chain(elements, ("x",), pool=pool).capture(torch.randn(2, 4, requires_grad=True))
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            out = chain(x)
            out.square().sum().backward()
            found += [out.detach(), x.grad]
        results.append(found + [p.grad for m in parts for p in m.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert math.isfinite(a.sum())
