"""The twin path: torch's own DataLoader gives the same batches."""

import pickle

import numpy as np
import pytest

from lf_iouring import Collate, MapDataset, PlanSampler, collate, plan_of


def test_samples_and_collate_without_torch_loader(masked, loader_of, digest):
    data, plan = MapDataset(masked), plan_of(masked, global_batch=24, seed=7)
    sampler = PlanSampler(plan, end_step=2 * plan.steps_per_epoch)
    batches = [collate(data.__getitems__(ids), return_type="numpy") for ids in sampler]
    assert digest(batches) == digest(loader_of(epochs=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_data_loader_gives_the_same_batches(masked, loader_of, digest, workers):
    data_module = pytest.importorskip("torch.utils.data")
    plan = plan_of(masked, global_batch=24, seed=7)
    loader = data_module.DataLoader(
        MapDataset(masked),
        batch_sampler=PlanSampler(plan, rank=1, world=3, start_step=5, end_step=30),
        collate_fn=Collate("torch"),
        num_workers=workers,
    )
    ours = loader_of(rank=1, world_size=3, return_type="torch")
    ours.set_step(5)
    assert digest(loader) == digest([next(ours) for _ in range(25)])


def test_the_map_data_set_pickles(masked):
    copy = pickle.loads(pickle.dumps(MapDataset(masked)))
    assert len(copy) == 1000
    assert np.array_equal(copy[17].tokens, masked.record(17).tokens)
    copy.dataset.close()


def test_plain_ids_pad_to_the_longest_sample(masked):
    data = MapDataset(masked)
    samples = data.__getitems__([3, 5, 9])
    batch = collate(samples, return_type="numpy")
    assert batch.tokens.shape == (3, max(len(s.tokens) for s in samples))
    assert collate(samples, 256, "numpy").tokens.shape == (3, 256)


def test_an_empty_row_and_bad_ids(masked):
    data = MapDataset(masked)
    assert len(data[-1].tokens) == 0
    for bad in (-2, 1000):
        with pytest.raises(IndexError):
            data[bad]
