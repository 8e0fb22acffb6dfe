"""Batches on a device: whatever a backend's timing, the device sees what was read, and slots wait for it.

The fake copies as late as it may, from the memory as it is by then, so a slot rewritten too early shows.
"""

import gc
from collections import deque

import numpy as np
import pytest
import transform_cases

import lf_format as lff
from lf_iouring import Backend, CudaBackend, DataError, LoaderError, WorkerDied
from lf_memory import PoolError


class FakeArray:
    def __init__(self, backend, source):
        self.backend, self.source, self.value, self.given = backend, source, None, False
        self.shape = source.shape

    def read(self):
        """As host code would: only after the hand-over, and it waits for the copy."""
        assert self.given, "read by a stream that does not wait for the copy"
        self.backend.run_until(self)
        return self.value


class FakeFence:
    def __init__(self, backend, array):
        self.backend, self.array = backend, array

    def query(self):
        return self.array.value is not None

    def wait(self):
        self.backend.run_until(self.array)


class FakeBackend:
    """Keeps `lag` uploads waiting, and records what happens."""

    def __init__(self, lag=10**6, refuse=None):
        self.lag, self.refuse = lag, refuse
        self.waiting = deque()
        self.events = []

    def pin(self, memory):
        if self.refuse:
            raise PoolError(self.refuse)
        self.events.append("pin")
        return lambda: self.events.append("unpin")

    def upload(self, slot, other):
        arrays = [FakeArray(self, array) for array in slot]
        arrays += [FakeArray(self, array.copy()) for array in other]
        self.waiting.append(arrays)
        self.events.append("upload")
        while len(self.waiting) > self.lag:
            self.run_next()
        return arrays, FakeFence(self, arrays[-1])

    def hand_over(self, arrays, fence):
        assert isinstance(fence, FakeFence)
        assert fence.array in arrays
        self.events.append("hand over")
        for array in arrays:
            array.given = True

    def finish(self):
        while self.waiting:
            self.run_next()
        self.events.append("finish")

    def run_next(self):
        for array in self.waiting.popleft():
            array.value, array.source = array.source.copy(), None

    def run_until(self, array):
        while array.value is None:
            self.run_next()


def cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return CudaBackend("cuda")


BACKENDS = pytest.mark.parametrize(
    "make",
    [lambda: FakeBackend(0), lambda: FakeBackend(3), FakeBackend, cuda],
    ids=["now", "late", "never", "cuda"],
)


def host(array):
    """A device array's content."""
    return array.read() if isinstance(array, FakeArray) else array.cpu().numpy()


def contents(batch, read=np.asarray):
    names = ["tokens", "loss_mask", "lengths"]
    names += [name for name in ("cu_seqlens", "position_ids", "segment_ids") if hasattr(batch, name)]
    values = [read(getattr(batch, name)) for name in names]
    return [(v.dtype.str, v.shape, v.tobytes()) for v in values] + [
        np.asarray(batch.ids).tolist(),
        batch.step,
    ]


@BACKENDS
def test_the_backend_keeps_the_contract(make):
    backend = make()
    assert isinstance(backend, Backend)
    memory, other = np.arange(4096, dtype=np.uint8), np.arange(10)
    unpin = backend.pin(memory)
    arrays, fence = backend.upload([memory[:100]], [other])
    other[:] = -1
    backend.hand_over(arrays, fence)
    fence.wait()
    assert fence.query()
    memory[:] = 0
    assert np.array_equal(host(arrays[0]), np.arange(100))
    assert np.array_equal(host(arrays[1]), np.arange(10))
    backend.finish()
    unpin()


@BACKENDS
@pytest.mark.parametrize("packed", [{}, {"pack": 256}], ids=["padded", "packed"])
def test_the_device_sees_every_batch_as_it_was_read(loader_of, make, packed):
    common = {"epochs": 2, "prefetch_factor": 2} | packed
    expected = [contents(batch) for batch in loader_of(**common)]
    backend = make()
    kept = list(loader_of(device=backend, return_type="auto", **common))
    assert [contents(batch, host) for batch in kept] == expected
    one_by_one = loader_of(device=make(), return_type="auto", **common)
    assert [contents(batch, host) for batch in one_by_one] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"transform": transform_cases.add_one},
        {"transform": transform_cases.add_one, "transform_workers": 1},
        {
            "transform": transform_cases.noise,
            "transform_workers": 1,
            "transform_output": {"noise": ((24,), "f8"), "tokens": ((24, 256), "u2"), "step": ((1,), "f8")},
        },
    ],
    ids=["in the thread", "in a worker", "into an output slot"],
)
def test_the_device_gets_what_a_transform_made(loader_of, arguments):
    def named(batch, read):
        return {name: (read(batch[name]).dtype, read(batch[name]).tolist()) for name in batch}

    common = {"epochs": 1, "prefetch_factor": 2}
    expected = [named(batch, np.asarray) for batch in loader_of(transform=arguments["transform"], **common)]
    kept = list(loader_of(device=FakeBackend(), return_type="auto", **common, **arguments))
    assert [named(batch, host) for batch in kept] == expected


def test_a_worker_that_died_while_a_batch_was_copied_ahead_is_raised_once(loader_of, tmp_path):
    flag = tmp_path / "die"
    flag.touch()
    common = {"epochs": 1, "transform": transform_cases.Dying(3, flag), "transform_workers": 1}
    loader = loader_of(device=FakeBackend(), return_type="auto", **common)
    seen = []
    with pytest.raises(WorkerDied, match="signal 9"):
        seen.extend(iter(lambda: next(loader).step, None))
    assert not flag.exists()
    assert len(seen) <= 3
    assert seen + [batch.step for batch in loader] == list(range(len(loader)))


def test_a_slot_is_not_used_again_while_its_copy_waits(loader_of):
    backend = FakeBackend()
    loader = loader_of(device=backend, prefetch_factor=2)
    batches = [next(loader) for _ in range(30)]
    pool = loader._pipeline.pool
    assert pool.stats().fenced == pool.slots
    assert loader.stats().overflow > 0
    backend.finish()
    assert pool.stats().fenced + pool.stats().free >= 0
    before = loader.stats().overflow
    backend.lag = 0
    for _ in range(30):
        next(loader)
    assert loader.stats().overflow - before <= 3  # those that were read ahead while nothing was free
    assert len({batch.step for batch in batches}) == 30


def test_the_next_batch_is_on_its_way_before_this_one_is_handed_over(loader_of):
    backend = FakeBackend(0)
    loader = loader_of(device=backend, epochs=1)
    assert len(list(loader)) == 42
    assert backend.events == ["pin", "upload"] + ["upload", "hand over"] * 41 + ["hand over"]
    loader.close()
    assert backend.events[-2:] == ["finish", "unpin"]


def test_a_dropped_loader_waits_for_its_copies_and_unpins(loader_of, masked):
    from lf_iouring import LoongDataLoader

    backend = FakeBackend()
    next(LoongDataLoader(masked, global_batch=24, device=backend))
    gc.collect()
    assert backend.events[-2:] == ["finish", "unpin"]


def test_the_state_counts_delivered_batches_not_those_copied_ahead(loader_of):
    loader = loader_of(device=FakeBackend())
    for _ in range(3):
        next(loader)
    assert loader.state_dict()["step"] == 3
    loader.set_step(20)
    assert next(loader).step == 20
    again = loader_of(device=FakeBackend())
    again.load_state_dict(loader.state_dict())
    assert next(again).step == 21


def test_a_broken_batch_raises_in_its_turn_and_costs_no_other(tmp_path, write, loader_of):
    path = write(tmp_path / "f.loongbin", 48, (64,))
    with lff.open_dataset(path) as dataset:
        offset = int(dataset.readers[0].extents(np.array([30]), "tokens").offset[0])
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        loader = loader_of(dataset, device=FakeBackend(0), shuffle=False, global_batch=8)
        assert [next(loader).step for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(DataError):
                next(loader)
        loader.set_step(4)
        assert next(loader).step == 4


def test_memory_that_cannot_be_pinned_is_reported(loader_of):
    loader = loader_of(device=FakeBackend(0, refuse="no more locked memory"), epochs=1)
    assert len(list(loader)) == 42
    assert loader.info().notes == ("slots are not page-locked: no more locked memory",)


def test_copies_are_counted(loader_of):
    loader = loader_of(device=FakeBackend(0), epochs=1)
    copied = sum(batch.tokens.read().nbytes + batch.loss_mask.read().nbytes + 24 * 8 for batch in loader)
    assert loader.stats().copied_bytes == copied
    assert loader.stats().copy_s > 0


@pytest.mark.parametrize("device", [None, "cpu"])
def test_on_the_cpu_batches_stay_where_they_are(loader_of, device):
    loader = loader_of(device=device)
    batch = next(loader)
    assert batch.tokens.ctypes.data == batch.lease.address
    assert loader.stats().copied_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"device": "cuda", "return_type": "numpy"}, "exclude each other"),
        ({"device": "tpu", "return_type": "auto"}, "choose 'cpu', 'cuda'"),
    ],
)
def test_devices_that_cannot_be_had_are_refused(loader_of, arguments, match):
    with pytest.raises(LoaderError, match=match):
        loader_of(**arguments)


def test_cuda_without_a_device_is_refused(loader_of):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(LoaderError, match="no CUDA device"):
        loader_of(device="cuda", return_type="torch")


def test_a_forked_child_is_refused(loader_of, in_fork):
    backend = FakeBackend(0)
    loader = loader_of(device=backend)
    next(loader)
    seen = len(backend.events)

    def child():
        with pytest.raises(LoaderError, match="after fork"):
            next(loader)
        loader.close()
        assert len(backend.events) == seen

    assert in_fork(child) == 0
    assert next(loader).step == 1


def test_cuda_copies_are_asynchronous_and_right_under_load(loader_of):
    """Many batches while the device is busy: the copies queue up behind nothing the host waits for."""
    cuda()
    import torch

    expected = [contents(batch) for batch in loader_of(epochs=2)]
    loader = loader_of(device="cuda", return_type="torch", epochs=2)
    assert loader.info().notes == ()
    busy = torch.randn(4096, 4096, device="cuda")
    kept = []
    for batch in loader:
        busy = busy @ busy
        busy /= busy.norm()
        kept.append((batch, batch.tokens.clone()))
    assert all(bool((batch.tokens == copy).all()) for batch, copy in kept)
    assert [contents(batch, host) for batch, _ in kept] == expected
