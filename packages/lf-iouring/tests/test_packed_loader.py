"""LoongDataLoader with packing and several data sets: exactness, position, what it yields."""

import itertools
import json
import signal
import threading
from collections import Counter

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, LoaderError, LoongDataLoader, PackPlan, PlanError, StateError
from lf_iouring.mixing import Mixture
from lf_iouring.pack_window import WindowPacker

WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def sources(tmp_path_factory, write):
    """Three masked sets of 300, 500 and 200 records, with other buckets each."""
    folder = tmp_path_factory.mktemp("sources")
    made = [
        lff.open_dataset(write(folder / f"{n}.loongbin", count, buckets, mask=True, seed=n))
        for n, (count, buckets) in enumerate([(300, (16, 64)), (500, (32, 128)), (200, (256,))])
    ]
    yield made
    for dataset in made:
        dataset.close()


@pytest.fixture
def mixed(sources):
    """mixed(**arguments): a loader over the three sets, packed to 256 unless told otherwise."""
    made = []

    def make(**arguments):
        defaults = {"datasets": sources, "weights": WEIGHTS, "global_batch": 24, "seed": 7, "pack": 256}
        loader = LoongDataLoader(**defaults | {"return_type": "numpy", "epochs": 2} | arguments)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()


def contents(batch):
    """Everything a batch holds, row by row, so that the rows of ranks can be put together."""
    extra = []
    if hasattr(batch, "segment_ids"):
        extra = [batch.position_ids, batch.segment_ids]
    arrays = [batch.tokens, batch.loss_mask, batch.lengths, *extra]
    return [tuple(np.asarray(array[row]).tobytes() for array in arrays) for row in range(len(batch.tokens))]


def records(sources):
    return [dataset.record(i) for dataset in sources for i in range(len(dataset))]


@pytest.mark.parametrize("pack", [256, None], ids=["packed", "padded"])
def test_resume_on_other_ranks_and_threads_continues_exactly(mixed, pack):
    """Case A5 with three weighted sources and two epochs: 4 x 2, then 3 x automatic, then 8 x 1."""
    shape = {"pack": pack, "pack_window": pack and 100}  # several windows an epoch
    reference = [contents(batch) for batch in mixed(**shape)]
    assert len(reference) > 20

    def run(world, threads, steps, state):
        loaders = [
            mixed(**shape, rank=r, world_size=world, num_workers=threads, prefetch_factor=11)
            for r in range(world)
        ]
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(state))
        parts = [[contents(next(loader)) for _ in range(steps)] for loader in loaders]
        states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
        assert len(states) == 1, "the state differs between ranks"
        assert len(next(iter(states))) < 1024
        assert all(next(loader, None) is None for loader in loaders) == (steps == last)
        for loader in loaders:
            loader.close()
        return [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)], states.pop()

    last = len(reference) - 16
    seen, state = run(4, 2, 7, None)
    for world, threads, steps in ((3, 0, 9), (8, 1, last)):
        more, state = run(world, threads, steps, state)
        seen += more
    assert seen == reference


@pytest.mark.parametrize("engine", ["auto", "pread", "python"])
def test_packed_rows_hold_the_documents_as_written(mixed, sources, engine):
    written = records(sources)
    for batch in mixed(engine=engine, epochs=1):
        flat, mask = batch.tokens.reshape(-1), batch.loss_mask.reshape(-1)
        segment = batch.segment_ids.reshape(-1)
        pieces = [
            (int(a), int(b))
            for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
            if segment[a]
        ]
        assert len(pieces) == len(batch.ids)
        for (low, high), number in zip(pieces, batch.ids.tolist(), strict=True):
            record = written[number]
            assert np.array_equal(flat[low:high], record.tokens)
            expected = record.loss_mask.astype(np.uint8)
            expected[0] = 0
            assert np.array_equal(mask[low:high], expected)
            assert np.array_equal(batch.position_ids.reshape(-1)[low:high], np.arange(high - low))
        assert not flat[segment == 0].any()
        assert not mask[segment == 0].any()
        assert batch.cu_seqlens[-1] == flat.size
        assert np.array_equal(batch.lengths, (batch.segment_ids > 0).sum(axis=1))


def test_a_single_packed_set_gives_every_token_once_an_epoch(mixed, sources):
    dataset = sources[1]
    loader = mixed(dataset=dataset, datasets=None, weights=None, pack=48, pack_window=100)
    seen = [{}, {}]
    for batch in loader:
        segment = batch.segment_ids.reshape(-1)
        cuts = batch.cu_seqlens.tolist()
        lows = [low for low in cuts[:-1] if segment[low]]
        highs = dict(itertools.pairwise(cuts))
        for low, number in zip(lows, batch.ids.tolist(), strict=True):
            seen[batch.epoch].setdefault(number, []).append(batch.tokens.reshape(-1)[low : highs[low]])
    for epoch in seen:
        assert sorted(epoch) == list(range(len(dataset)))
        for number, pieces in epoch.items():
            assert np.array_equal(np.concatenate(pieces), dataset.record(number).tokens)
    assert list(seen[0]) != list(seen[1])


def test_records_are_drawn_by_exact_weights(mixed, sources):
    counts = Counter()
    ends = np.cumsum([len(dataset) for dataset in sources])
    for batch in mixed(epochs=1):
        counts.update(np.searchsorted(ends, batch.ids, side="right").tolist())
    assert [counts[i] for i in range(3)] == [500, 300, 200]  # of 1,000 records, none of them cut


def test_padded_batches_come_from_one_source_by_exact_weights(mixed, sources):
    ends = np.cumsum([len(dataset) for dataset in sources])
    loader = mixed(pack=None, epochs=None, weights=(3, 2, 1))
    counts = Counter()
    for _ in range(60):
        batch = next(loader)
        (source,) = set(np.searchsorted(ends, batch.ids[batch.ids >= 0], side="right").tolist())
        assert batch.tokens.shape[1] in sources[source].buckets
        counts[source] += 1
    assert [counts[i] for i in range(3)] == [30, 20, 10]


def test_the_fill_ratio_is_reported(mixed):
    loader = mixed(epochs=1)
    used = places = 0
    for batch in loader:
        used += int(batch.lengths.sum())
        places += batch.tokens.size
    stats = loader.stats()
    assert stats.fill == used / places > 0.8
    assert stats.tokens == used
    assert stats.segments == 1000


def test_coded_blocks_can_be_packed(mixed, tmp_path, write):
    path = write(tmp_path / "z.loongbin", 200, (64,), mask=True, codec="zstd", top=50)
    with lff.open_dataset(path) as dataset:
        loader = mixed(dataset=dataset, datasets=None, weights=None, pack=128, epochs=1)
        assert sorted(i for batch in loader for i in batch.ids.tolist()) == list(range(200))


@pytest.mark.parametrize("pack", [256, None], ids=["packed", "padded"])
def test_a_changed_source_or_weight_is_another_plan(mixed, sources, pack):
    state = mixed(pack=pack).state_dict()
    for change in (
        {"weights": (0.5, 0.2, 0.3)},
        {"datasets": sources[:2], "weights": None},
        {"datasets": [sources[0], sources[1], sources[1]]},
    ):
        with pytest.raises(StateError, match="fingerprint"):
            mixed(pack=pack, **change).load_state_dict(state)


def test_a_packed_position_belongs_to_its_packing(mixed):
    state = mixed().state_dict()
    for change, name in (({"pack": 128}, "params"), ({"seed": 8}, "seed"), ({"pack_window": 50}, "params")):
        with pytest.raises(StateError, match=name):
            mixed(**change).load_state_dict(state)
    with pytest.raises(StateError):
        mixed(pack=None).load_state_dict(state)
    for change in ({"batch": 10**6}, {"window": -1}, {"batch": "0"}, {"step": -1}):
        with pytest.raises(StateError):
            mixed().load_state_dict(state | change)


def test_far_positions_of_a_packed_plan_resume_without_the_way_there():
    lengths = [np.full(1000, 7, np.uint32)]
    plan = PackPlan(lengths, Mixture([1]), 64, 4, seed=1, window=100)
    whole = PackPlan(lengths, Mixture([1]), 64, 4, seed=1, window=100)
    step = whole.packed(0).batches * 500
    state = whole.state(step)
    assert plan.check_state(state) == step
    assert len(plan._windows) == 1
    for at in (step, step + 3, step - 2, 0):
        assert np.array_equal(plan.batch(at).ids, whole.batch(at).ids)
    assert plan.state(step) == state


def test_set_step_and_finished_loaders_work_as_without_packing(mixed):
    loader = mixed(epochs=1)
    reference = [contents(batch) for batch in loader]
    assert [contents(batch) for batch in loader] == reference
    loader.set_step(5)
    assert contents(next(loader)) == reference[5]
    loader.set_step(1)
    assert contents(next(loader)) == reference[1]


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_forked_child_goes_on_from_the_same_position(mixed, in_fork, engine):
    expected = [contents(batch) for batch in mixed(epochs=1)]
    loader = mixed(engine=engine, epochs=1)
    assert [contents(next(loader)) for _ in range(3)] == expected[:3]

    def child():
        assert [contents(batch) for batch in loader] == expected[3:]
        loader.close()

    assert in_fork(child) == 0
    assert [contents(batch) for batch in loader] == expected[3:]


def test_batches_stay_intact_while_held(mixed):
    held = list(mixed(epochs=1, prefetch_factor=1))
    assert [contents(batch) for batch in held] == [contents(batch) for batch in mixed(epochs=1)]


def test_a_flipped_byte_is_found_in_a_packed_record(mixed, tmp_path, write):
    path = write(tmp_path / "f.loongbin", 50, (64,))
    with lff.open_dataset(path) as dataset:
        offset = int(dataset.readers[0].extents(np.array([17]), "tokens").offset[0])
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        loader = mixed(dataset=dataset, datasets=None, weights=None, pack=64, epochs=1, global_batch=4)
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                list(loader)
            assert caught.value.record == 17


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"pack": 0}, PlanError),
        ({"pack": True}, LoaderError),
        ({"pack_window": 0}, PlanError),
        ({"pack": None, "pack_window": 5}, LoaderError),
        ({"weights": (1, 2)}, PlanError),
        ({"weights": (1, 2), "pack": None}, PlanError),
        ({"weights": (1, 2, 0)}, PlanError),
        ({"datasets": []}, LoaderError),
        ({"datasets": None}, LoaderError),
        ({"world_size": 5}, PlanError),
    ],
)
def test_arguments_that_do_not_fit_are_refused(mixed, arguments, error):
    with pytest.raises(error):
        mixed(**arguments)


def test_sets_of_other_tokenizers_or_fields_are_refused(mixed, sources, tmp_path, write):
    other = lff.open_dataset(write(tmp_path / "o.loongbin", 5, (64,), vocab=100, mask=True))
    plain = lff.open_dataset(write(tmp_path / "p.loongbin", 5, (64,)))
    for dataset, name in ((other, "vocab_size"), (plain, "fields")):
        with pytest.raises(LoaderError, match=f"0 and 1 differ in {name}"):
            mixed(datasets=[sources[0], dataset], weights=None)
        dataset.close()


def test_ctrl_c_ends_a_next_that_waits_for_packing_and_the_position_stays(mixed, monkeypatch):
    expected = [contents(batch) for batch in mixed(epochs=1)]
    packing, gate = threading.Event(), threading.Event()
    pack = WindowPacker.packed

    def slowly(self, window):
        packing.set()
        gate.wait()
        return pack(self, window)

    def interrupt():
        packing.wait()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(WindowPacker, "packed", slowly)
    loader = mixed(epochs=1)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    assert not gate.is_set()
    gate.set()
    assert [contents(batch) for batch in loader] == expected


@pytest.mark.parametrize("pack", [256, None], ids=["packed", "padded"])
@pytest.mark.parametrize("engine", ["auto", "python"])
def test_signals_at_any_moment_lose_and_repeat_nothing(mixed, under_signals, pack, engine):
    reference = [contents(batch) for batch in mixed(pack=pack)]
    loader = mixed(pack=pack, engine=engine)
    assert under_signals(loader, len(reference), contents) == reference


def test_closing_does_not_wait_for_a_window_being_packed(mixed, monkeypatch):
    packing, gate = threading.Event(), threading.Event()

    def never(self, window):
        packing.set()
        gate.wait()
        raise AssertionError("nobody asks any more")

    monkeypatch.setattr(WindowPacker, "packed", never)
    loader = mixed(epochs=1)
    loader._pipeline._staged._ask(0)
    packing.wait()
    loader.close()
    with pytest.raises(LoaderError, match="closed"):
        next(loader)
    gate.set()


def test_a_fault_while_packing_reaches_the_caller_once(mixed, monkeypatch):
    expected = [contents(batch) for batch in mixed(epochs=1)]
    faults = [MemoryError("no room to pack")]
    pack = WindowPacker.packed

    def failing(self, window):
        if faults:
            raise faults.pop()
        return pack(self, window)

    monkeypatch.setattr(WindowPacker, "packed", failing)
    loader = mixed(epochs=1)
    with pytest.raises(MemoryError, match="no room to pack"):
        next(loader)
    assert [contents(batch) for batch in loader] == expected


def test_packed_epochs_have_no_fixed_length(mixed):
    loader = mixed()
    with pytest.raises(LoaderError, match="differ in length"):
        _ = loader.steps_per_epoch
    with pytest.raises(TypeError):
        len(loader)
    assert loader.info().steps_per_epoch == 0


def test_torch_tensors_are_delivered(mixed):
    torch = pytest.importorskip("torch")
    batch = next(mixed(return_type="torch"))
    assert batch.cu_seqlens.dtype == batch.position_ids.dtype == batch.segment_ids.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.uint8
    assert batch.tokens.data_ptr() == batch.lease.address
