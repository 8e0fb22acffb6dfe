"""Samples of many fields: every value as lf-format reads it, whatever the engine and the codec."""

import numpy as np
import pytest
import transform_cases

import lf_format as lff
from lf_iouring import DataError, Joined, LoaderError, LoongDataLoader, SampleBatch
from lf_memory import PoolError

ENGINES = ("auto", "pread", "python")
FIELDS = [
    lff.Field.image("camera", (6, 5, 3)),
    lff.Field.tensor("state", "float32", (7,)),
    lff.Field.bits("action_mask", (4, 3)),
    lff.Field.tensor("points", "float16", (-1, 3)),
    lff.Field.bits("visible", (-1,)),
    lff.Field.tensor("index", "int64", ()),
    lff.Field.bytes("task"),
]
EPISODES = (1, 2, 9, 30, 58)


def sample(rng, number):
    points = rng.normal(size=(int(rng.integers(0, 9)), 3)).astype(np.float16)
    return {
        "camera": rng.integers(0, 256, (6, 5, 3), np.uint8),
        "state": rng.normal(size=7).astype(np.float32),
        "action_mask": rng.integers(0, 2, (4, 3)).astype(bool),
        "points": points,
        "visible": rng.integers(0, 2, int(rng.integers(0, 20))).astype(bool),
        "index": number,
        "task": f"task {number % 3}".encode(),
    }


@pytest.fixture(scope="module", params=["raw", "zstd"])
def samples(request, tmp_path_factory):
    """100 samples of seven fields in five episodes, in two files."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("samples")
    number, paths = 0, [folder / "a.lfg", folder / "b.lfg"]
    for path, episodes in zip(paths, (EPISODES[:3], EPISODES[3:]), strict=True):
        with lff.Writer(path, fields=FIELDS, codec=request.param, block_bytes=900) as writer:
            for length in episodes:
                for step in range(length):
                    writer.append(sample(rng, number), None, step == 0, step == length - 1)
                    number += 1
    with lff.open_dataset(paths) as dataset:
        yield dataset


@pytest.fixture
def load():
    """load(dataset, **options) -> loader of numpy batches of 8."""
    made = []

    def make(dataset, **options):
        settings = {"global_batch": 8, "return_type": "numpy", "epochs": 1} | options
        made.append(LoongDataLoader(dataset, **settings))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def value_of(batch, name, row):
    """One row of a field, whatever its form."""
    values = batch[name]
    if isinstance(values, Joined):
        return values.values[int(values.offsets[row]) : int(values.offsets[row + 1])]
    return values[row]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_value_is_that_of_the_record(samples, load, engine, shuffle):
    seen = []
    for batch in load(samples, engine=engine, shuffle=shuffle, prefetch_factor=2):
        assert isinstance(batch, SampleBatch)
        assert batch.keys() == [*(f.name for f in FIELDS if not f.ragged), "points", "visible", "task"]
        assert batch.tokens is None
        assert batch.loss_mask is None
        for row, number in enumerate(batch.ids.tolist()):
            if number < 0:
                assert not batch["camera"][row].any()
                assert len(value_of(batch, "points", row)) == 0
                continue
            record = samples.record(number)
            seen.append(number)
            for field in FIELDS:
                value = value_of(batch, field.name, row)
                assert value.dtype == field.numpy_dtype
                assert np.array_equal(value, record[field.name])
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_left_out_are_still_hashed(samples, load, engine):
    for batch in load(samples, engine=engine, fields=["state", "task"]):
        assert batch.keys() == ["state", "task"]
        assert "camera" not in batch
        with pytest.raises(KeyError, match="camera"):
            batch["camera"]
        row = int(np.argmax(batch.ids))
        assert np.array_equal(batch["state"][row], samples.record(int(batch.ids[row]))["state"])
    assert load(samples, fields=["index"]).info().slot_bytes <= 4096
    full = load(samples, engine=engine).stats()
    assert full.bytes >= 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flip_in_a_field_left_out_is_found(tmp_path, load, engine):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.lfg"
    with lff.Writer(path, fields=FIELDS) as writer:
        for number in range(20):
            writer.append(sample(rng, number))
    with lff.open_dataset(path) as dataset:
        at = int(dataset.readers[0].extents([11], "camera").offset[0]) + 3
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(DataError, match="record hash") as caught:
            list(load(dataset, engine=engine, fields=["state"]))
        assert caught.value.record == 11
        assert len(list(load(dataset, engine=engine, fields=["state"], verify=False))) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_deltas_stay_inside_the_episode(samples, load, engine):
    borders = np.cumsum((0, *EPISODES))
    deltas = {"camera": [-1, 0], "points": [-2, 1], "state": [2]}
    for batch in load(samples, engine=engine, deltas=deltas):
        assert batch["camera"].shape == (8, 2, 6, 5, 3)
        assert batch["state"].shape == (8, 1, 7)
        assert batch["index"].shape == (8,)
        for row, number in enumerate(batch.ids.tolist()):
            if number < 0:
                continue
            episode = int(np.searchsorted(borders, number, "right")) - 1

            def near(step, low=borders[episode], high=borders[episode + 1] - 1, number=number):
                return samples.record(int(np.clip(number + step, low, high)))

            assert batch["index"][row] == number
            assert np.array_equal(batch["camera"][row, 0], near(-1)["camera"])
            assert np.array_equal(batch["camera"][row, 1], near(0)["camera"])
            assert np.array_equal(batch["state"][row, 0], near(2)["state"])
            for k, step in enumerate((-2, 1)):
                assert np.array_equal(value_of(batch, "points", 2 * row + k), near(step)["points"])


def test_a_file_is_not_followed_into_another(samples, load):
    first_of_second = len(samples.readers[0])
    batch = next(load(samples, deltas={"index": [-1, 0]}, shuffle=False, global_batch=100))
    assert batch["index"][first_of_second].tolist() == [first_of_second, first_of_second]


def test_ids_are_padded_and_masks_follow_them(tmp_path, load):
    fields = [
        lff.Field.tokens("input_ids", "int32"),
        lff.Field.bits("labels_mask", (-1,), "loss_mask"),
        lff.Field.tokens("extra", "uint16"),
        lff.Field.tensor("state", "float64", (2,)),
    ]
    rng = np.random.default_rng(2)
    path = tmp_path / "a.lfg"
    with lff.Writer(path, fields=fields, vocab_size=1000, buckets=(8, 32)) as writer:
        for number in range(60):
            ids = rng.integers(0, 1000, int(rng.integers(1, 33)))
            mask = rng.integers(0, 2, len(ids)).astype(bool)
            writer.append(
                {"input_ids": ids, "labels_mask": mask, "extra": ids[:2], "state": np.full(2, number)}
            )
    with lff.open_dataset(path) as dataset:
        for batch in load(dataset):
            assert batch.tokens is batch["input_ids"]
            assert batch.tokens.shape == batch.loss_mask.shape == (8, batch.edge)
            assert batch.loss_mask.dtype == np.uint8
            for row, number in enumerate(batch.ids.tolist()):
                record = dataset.record(number) if number >= 0 else None
                length = int(batch.lengths[row])
                assert not batch.tokens[row, length:].any()
                assert not batch.loss_mask[row, length:].any()
                if record is not None:
                    assert np.array_equal(batch.tokens[row, :length], record["input_ids"])
                    assert np.array_equal(batch.loss_mask[row, :length], record["labels_mask"])
                    assert np.array_equal(value_of(batch, "extra", row), record["extra"])


def test_tensors_share_the_slot_and_keep_it(samples, load):
    torch = pytest.importorskip("torch")
    loader = load(samples, return_type="torch", epochs=None, prefetch_factor=1)
    batch = next(loader)
    camera, ids = batch["camera"], batch.ids.tolist()
    assert camera.dtype == torch.uint8
    assert batch["action_mask"].dtype == torch.bool
    assert isinstance(batch["points"].values, torch.Tensor)
    for _ in range(20):
        next(loader).release()
    for row, number in enumerate(ids):
        assert np.array_equal(camera[row].numpy(), samples.record(number)["camera"])
    batch.release()
    with pytest.raises(KeyError, match="released"):
        batch["state"]


def test_batches_do_not_depend_on_threads_and_resume(samples, load):
    def run(loader):
        return [(b.step, b.ids.tolist(), b["camera"].tobytes(), b["points"].values.tobytes()) for b in loader]

    whole = run(load(samples, num_workers=1))
    assert run(load(samples, num_workers=3)) == whole
    loader = load(samples)
    head = [next(loader).ids.tolist() for _ in range(4)]
    rest = load(samples, num_workers=2)
    rest.load_state_dict(loader.state_dict())
    assert head == [item[1] for item in whole[:4]]
    assert run(rest) == whole[4:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["nothing"]}, "nothing"),
        ({"fields": "state"}, "list of names"),
        ({"fields": []}, "list of names"),
        ({"deltas": {"nothing": [0]}}, "nothing"),
        ({"fields": ["state"], "deltas": {"camera": [0]}}, "camera"),
        ({"deltas": {"camera": []}}, "ascending"),
        ({"deltas": {"camera": [0, -1]}}, "ascending"),
        ({"deltas": {"camera": [0.5]}}, "ascending"),
        ({"deltas": {"camera": [-(10**30)]}}, "ascending"),
        ({"deltas": ["camera"]}, "mapping"),
        ({"seed": "a"}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"global_batch": True}, "global_batch"),
        ({"global_batch": 8.0}, "global_batch"),
        ({"deltas": {"camera": 5}}, "ascending"),
        ({"pack": 64}, "pack="),
        ({"cache_bytes": -1}, "cache_bytes"),
    ],
)
def test_wrong_options_are_refused(samples, options, message):
    with pytest.raises(LoaderError, match=message):
        LoongDataLoader(samples, **{"global_batch": 8} | options)


def test_an_outlier_that_needs_more_memory_than_there_is_names_its_field(tmp_path):
    path = tmp_path / "a.lfg"
    with lff.Writer(
        path, fields=[lff.Field.tensor("points", "float32", (-1, 3)), lff.Field.bytes("task")]
    ) as writer:
        writer.append({"points": np.zeros((1 << 16, 3)), "task": b""})
    with lff.open_dataset(path) as dataset:
        with pytest.raises(PoolError, match=r"longest value of 'points', 786432 bytes: .*fields="):
            LoongDataLoader(dataset, global_batch=1 << 22)
        with pytest.raises(PoolError, match="hugepages='x'") as caught:
            LoongDataLoader(dataset, global_batch=1, hugepages="x")
    assert "points" not in str(caught.value)


def test_deltas_need_the_order_of_time(tmp_path, write):
    with (
        lff.open_dataset(write(tmp_path / "a.loongbin", 20, (8, 64), mask=True)) as dataset,
        pytest.raises(LoaderError, match="length buckets"),
    ):
        LoongDataLoader(dataset, global_batch=4, deltas={"loss_mask": [-1, 0]})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_gets_every_field(samples, load, workers):
    plain = load(samples, fields=["camera", "points"], return_type="numpy")
    changed = load(
        samples, fields=["camera", "points"], return_type="numpy", transform=transform_cases.invert,
        transform_workers=workers,
    )  # fmt: skip
    for batch, expected in zip(changed, plain, strict=True):
        assert set(batch) == {"camera", "points", "points.offsets", "lengths"}
        assert np.array_equal(batch["camera"], expected["camera"] ^ 255)
        points, ends = expected["points"]
        counts = np.repeat(np.diff(ends), np.diff(ends))
        assert np.array_equal(batch["points.offsets"], ends)
        assert np.array_equal(batch["points"], points + counts[:, None].astype(np.float16))


def test_ids_of_one_length_keep_it_whatever_the_bucket(tmp_path, load):
    path = tmp_path / "a.lfg"
    fields = [lff.Field.tokens("tokens", "uint16", length=5)]
    with lff.Writer(path, fields=fields, vocab_size=100, buckets=(8,)) as writer:
        for number in range(10):
            writer.append({"tokens": np.full(5, number)})
    with lff.open_dataset(path) as dataset:
        batch = next(load(dataset, shuffle=False))
        assert batch.edge == 8
        assert batch.tokens.tolist() == [[number] * 5 for number in range(8)]


def test_one_field_of_a_token_file_can_be_had(tmp_path, write, load):
    with lff.open_dataset(write(tmp_path / "a.loongbin", 20, (64,), mask=True)) as dataset:
        batch = next(load(dataset, fields=["tokens"]))
        assert batch.loss_mask is None
        assert batch.tokens.shape == (8, 64)
        with pytest.raises(LoaderError, match="pack="):
            load(dataset, fields=["tokens"], pack=64)
        batch = next(load(dataset, fields=["loss_mask"]))
        assert batch.tokens is None
        assert batch["loss_mask"].shape == (8, 64)
