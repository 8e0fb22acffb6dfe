"""The twin path: torch's own DataLoader gives the same batches."""

import pickle

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import Collate, Joined, MapDataset, PlanSampler, collate, plan_of


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


FIELDS = {
    "robot": [
        lff.Field.image("camera", (4, 3, 3)),
        lff.Field.bits("done", (2,)),
        lff.Field.tensor("points", "float32", (-1, 3)),
    ],
    "words": [lff.Field.tokens("words"), lff.Field.tensor("state", "float32", (2,)), lff.Field.bytes("task")],
}


@pytest.fixture(params=sorted(FIELDS))
def samples(request, tmp_path):
    """50 samples of several fields, without ids and with them."""
    rng = np.random.default_rng(3)
    options = {"vocab_size": 300, "tokenizer": lff.TokenizerInfo("test", "00"), "buckets": (8, 16)}
    path = tmp_path / "s.lfg"
    with lff.Writer(
        path, fields=FIELDS[request.param], **(options if request.param == "words" else {})
    ) as writer:
        for number in range(50):
            writer.append(
                {
                    "camera": rng.integers(0, 256, (4, 3, 3), np.uint8),
                    "done": rng.integers(0, 2, 2).astype(bool),
                    "points": rng.normal(size=(number % 4, 3)).astype(np.float32),
                }
                if request.param == "robot"
                else {
                    "words": rng.integers(0, 300, 1 + number % 16),
                    "state": rng.normal(size=2).astype(np.float32),
                    "task": b"go" * (number % 3),
                }
            )
    with lff.open_dataset(path) as dataset:
        yield dataset


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_any_fields_come_as_the_loader_gives_them(samples, loader_of, workers):
    data_module = pytest.importorskip("torch.utils.data")
    plan = plan_of(samples, global_batch=8, seed=7)
    theirs = data_module.DataLoader(
        MapDataset(samples),
        batch_sampler=PlanSampler(plan, end_step=plan.steps_per_epoch),
        collate_fn=Collate("numpy"),
        num_workers=workers,
    )
    ours = loader_of(samples, global_batch=8, epochs=1)
    for found, expected in zip(theirs, ours, strict=True):
        assert set(found) == {"ids", *expected}
        assert np.array_equal(found["ids"], expected.ids)
        for name in expected:
            pairs = [(found[name], expected[name])]
            if isinstance(expected[name], Joined):
                pairs = list(zip(found[name], expected[name], strict=True))
            for a, b in pairs:
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
