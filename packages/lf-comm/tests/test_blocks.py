"""Choosing blocks: pure arithmetic, the same on every machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lf_comm._blocks import BLOCK, Cut, choose, energies


@given(st.integers(0, 1 << 50), st.sampled_from([1.5, 2, 4, 4.0, 100]))
def test_never_more_than_its_share_of_blocks_is_kept(count: int, ratio: float) -> None:
    cut = Cut.of(count, ratio)
    assert cut.whole == (cut.kept == 0)
    assert cut.kept * ratio <= cut.blocks <= count // BLOCK
    assert cut.whole or cut.kept < cut.blocks


@pytest.mark.parametrize("count", [(1 << 31) + 7, (1 << 33) - 1, 1 << 40])
def test_gradients_above_2_to_the_31_elements_are_cut_exactly(count: int) -> None:
    cut = Cut.of(count, 4)
    assert (cut.blocks, cut.kept) == (count // 256, count // 256 // 4)
    flat = torch.empty(count, device="meta")
    assert energies(flat, cut.blocks).shape == (cut.blocks,)
    rows = flat[: cut.blocks * BLOCK].view(-1, BLOCK)
    assert rows.index_select(0, torch.empty(cut.kept, dtype=torch.int64, device="meta")).shape == (
        cut.kept,
        BLOCK,
    )


@given(
    st.lists(st.floats(0, 2.0**99, width=32), min_size=2, max_size=60), st.integers(1, 20), st.floats(0, 1)
)
def test_the_strongest_are_chosen_the_first_of_equals_none_without_energy(
    values: list[float], kept: int, threshold: float
) -> None:
    kept = min(kept, len(values) - 1)
    (free,) = choose([torch.tensor(values)], [kept], 0.0)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:kept]
    wanted = sorted(i for i in order if values[i] > 0)
    assert free.ids is not None
    assert free.ids.tolist() == wanted
    share = sum(values[i] for i in order) / sum(values) if sum(values) else 1.0
    assert free.concentration == pytest.approx(share, abs=1e-6)
    (bound,) = choose([torch.tensor(values)], [kept], threshold)
    assert (bound.ids is None) == (bound.concentration < threshold)


@given(st.permutations(list(range(12))))
def test_a_share_of_energy_does_not_depend_on_the_order_of_blocks(order: list[int]) -> None:
    values = torch.rand(12, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(12)
    (straight,) = choose([values], [4], 0.5)
    (mixed,) = choose([values[order]], [4], 0.5)
    assert mixed.concentration == straight.concentration


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_energy_that_is_not_finite_sends_all(bad: float) -> None:
    first, second = choose([torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 3.0, 2.0])], [1, 1], 0.0)
    assert first.ids is None
    assert not first.finite
    assert second.ids is not None
    assert second.ids.tolist() == [1]


def test_nothing_to_choose_from() -> None:
    assert choose([], [], 0.5) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_energies_are_sums_of_squares(dtype: torch.dtype) -> None:
    flat = torch.randn(5 * BLOCK + 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = flat[: 5 * BLOCK].view(5, BLOCK).double().square().sum(1)
    assert energies(flat, 5).dtype is torch.float32
    assert torch.allclose(energies(flat, 5).double(), wanted, rtol=1e-5)
