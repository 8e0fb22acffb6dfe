"""The shuffle for coded blocks: a permutation of every epoch that keeps neighbours together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_iouring import LoongDataLoader, Mixture, PackPlan, Plan, PlanError
from lf_iouring._block_order import MIX, RUNS, BlockOrder


def plan_of(sizes, batch, block, seed=0):
    buckets = np.repeat(np.arange(len(sizes)), sizes)
    edges = tuple(10 * (i + 1) for i in range(len(sizes)))
    return Plan(None, buckets, edges, batch, seed, shuffle_block_size=block)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(any),
    st.integers(1, 9),
    st.integers(0, 60),
    st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_every_record_comes_once_an_epoch_in_its_bucket(sizes, batch, extra, seed):
    plan = plan_of(sizes, batch, batch + extra, seed)
    borders = np.cumsum([0, *sizes])
    for epoch in range(2):
        window = plan.window(epoch * plan.steps_per_epoch, plan.steps_per_epoch)
        assert sorted(window.ids[window.ids >= 0].tolist()) == list(range(sum(sizes)))
        edges = 10 * np.searchsorted(borders, window.ids, "right")  # 0 for the places of ids that are none
        assert edges.max(axis=1).tolist() == window.edge.tolist()


def test_windows_and_single_batches_agree_and_epochs_differ():
    plan = plan_of([500, 300], 4, 40)
    window = plan.window(0, 2 * plan.steps_per_epoch)
    for step in range(2 * plan.steps_per_epoch):
        assert plan.batch(step).ids.tolist() == window.ids[step].tolist()
    first, second = np.split(window.ids, 2)
    assert first.tolist() != second.tolist()
    assert plan_of([500, 300], 4, 40, seed=1).window(0, 50).ids.tolist() != window.ids[:50].tolist()


def test_few_blocks_are_in_use_at_a_time():
    records, block, per_block = 1 << 16, 512, 64
    plan = plan_of([records], 8, block)
    ids = plan.window(0, plan.steps_per_epoch).ids.reshape(-1)
    span = MIX * block  # records drawn before the next chunks begin
    for start in range(0, records, span):
        used = np.unique(ids[start : start + span] // per_block)
        assert len(used) <= MIX * (block // per_block + RUNS)  # a run begins inside a block
    # the rows of a batch come from everywhere
    assert np.median(np.ptp(ids.reshape(-1, 8), axis=1)) > records // 2


def test_the_chunks_have_other_borders_in_every_epoch():
    order = BlockOrder(np.array([1000]), 1, 100, 3)
    sets = [frozenset(order.records(0, np.arange(100), epoch).tolist()) for epoch in range(6)]
    assert len(set(sets)) == 6


def test_a_block_must_hold_a_batch():
    with pytest.raises(PlanError, match="shuffle_block_size=3"):
        plan_of([100], 4, 3)


def test_packed_draws_follow_the_same_order():
    lengths = np.full(4096, 10)
    plan = PackPlan([lengths], Mixture([1]), 100, 8, 0, window=1024, blocks=[64])
    seen = []
    for window in range(plan.windows_per_epoch):
        ids = plan.packed(window).ids
        assert len(np.unique(ids // 8)) <= 1024 // 8 + 2 * MIX * RUNS
        seen += ids.tolist()
    assert sorted(seen) == list(range(4096))


def test_a_large_coded_data_set_is_shuffled_in_blocks_and_decoded_once(tmp_path, write, monkeypatch):
    monkeypatch.setattr("lf_iouring._sources._CHUNK_BYTES", 1 << 14)
    path = write(tmp_path / "z.loongbin", 6000, (64,), codec="zstd", top=9)
    with lff.open_dataset(path) as dataset:
        with LoongDataLoader(dataset, global_batch=8, epochs=1, cache_bytes=1 << 20) as loader:
            size = loader.plan.shuffle_block_size
            assert 8 <= size < 1000
            seen = [i for batch in loader for i in batch.ids.tolist() if i >= 0]
            assert sorted(seen) == list(range(6000))
            blocks = len(dataset.readers[0].opened.index.block_codec)
            assert loader.stats().decoded_blocks <= 3 * blocks
            state = loader.state_dict()
        with LoongDataLoader(dataset, global_batch=8, shuffle_block_size=0) as loader:
            assert loader.plan.shuffle_block_size == 0
            with pytest.raises(Exception, match="shuffle_block_size"):
                loader.load_state_dict(state)
