"""Page-locking: the contract of a registrar, held by a recorder here and by real ones where there is a GPU."""

import gc
import os

import pytest

from lf_memory import CudaRegistrar, HostPool, PoolError, Registrar, TorchRegistrar, VariablePool, _pin
from lf_memory._pin import LOCK_BYTES, pieces


@pytest.fixture(params=["recorder", TorchRegistrar, CudaRegistrar])
def registrar(request, recorder):
    try:
        return recorder() if request.param == "recorder" else request.param()
    except PoolError as error:
        pytest.skip(str(error))


def test_a_registrar_keeps_its_contract(registrar):
    assert isinstance(registrar, Registrar)
    pool = HostPool(1 << 20, 2)
    address = pool.buffer.ctypes.data
    registrar.register(address, pool.buffer.nbytes)
    with pytest.raises(PoolError, match=r"\(\d+\)"):
        registrar.register(address, pool.buffer.nbytes)
    registrar.unregister(address)
    with pytest.raises(PoolError, match=r"\(\d+\)"):
        registrar.unregister(address)
    registrar.register(address, pool.buffer.nbytes)
    registrar.unregister(address)


@pytest.mark.parametrize(
    "make", [lambda pin: HostPool(5000, 3, pin=pin), lambda pin: VariablePool(9000, pin=pin)]
)
def test_a_pool_is_locked_as_a_whole_until_its_memory_goes(registrar, make):
    pool = make(registrar)
    assert pool.pinned
    assert pool.stats().pinned
    again = make(registrar)
    del again
    gc.collect()
    third = make(registrar)  # the address of the second may come again
    third.close()


def test_unlocking_comes_with_the_last_array_and_only_once(recorder):
    device = recorder()
    pool = HostPool(4096, 2, pin=device)
    address = pool.buffer.ctypes.data
    assert device.calls == [("register", address, 8192)]
    array = pool.acquire().array
    pool.close(force=True)
    gc.collect()
    assert device.ranges == {address: 8192}
    del array, pool
    gc.collect()
    assert device.calls == [("register", address, 8192), ("unregister", address)]


def test_a_forked_child_unlocks_nothing(recorder):
    device = recorder()
    pool = HostPool(4096, 1, pin=device)
    pid = os.fork()
    if pid == 0:
        del pool
        gc.collect()
        os._exit(len(device.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert pool.pinned


def test_a_refusing_device_is_a_pool_error_and_leaks_nothing(recorder):
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        PoolError, match=r"8192 bytes could not be page-locked: recorderRegister.*\(2\)"
    ) as caught:
        HostPool(4096, 2, pin=recorder(limit=4096))
    assert caught.value.needed == 8192
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_object_that_is_no_registrar_is_refused():
    with pytest.raises(PoolError, match="object has not both"):
        HostPool(4096, 1, pin=object())


def test_without_a_driver_the_error_says_so():
    with pytest.raises(PoolError, match="no CUDA driver"):
        CudaRegistrar(library="liblf-none.so")


def test_nothing_is_locked_unless_asked():
    assert not HostPool(4096, 1).stats().pinned


def test_pieces_hold_whole_units_of_at_most_a_gibibyte():
    gib = 1 << 30
    assert list(pieces(0, 3 * gib, gib)) == [(0, gib), (gib, gib), (2 * gib, gib)]
    assert list(pieces(0, 10_000, 4096)) == [(0, 10_000)]
    unit = 600 << 20
    assert list(pieces(0, 3 * unit, unit)) == [(0, unit), (unit, unit), (2 * unit, unit)]
    assert list(pieces(8192, 13 * gib, 13 * gib)) == [(8192, 13 * gib)]
    cut = list(pieces(0, 2 * gib, 12_288))
    assert all(start % 12_288 == 0 and length <= LOCK_BYTES for start, length in cut)
    assert sum(length for _, length in cut) == 2 * gib


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(_pin, "LOCK_BYTES", 16_384)


def test_no_slot_lies_in_two_pieces(recorder, small_pieces):
    device = recorder()
    pool = HostPool(12_288, 5, pin=device)
    assert list(device.ranges.values()) == [12_288] * 5
    assert {lease.address for lease in [pool.acquire() for _ in range(5)]} == set(device.ranges)


def test_pieces_locked_before_a_refusal_are_unlocked(recorder, small_pieces, open_fds):
    before, device = open_fds(), recorder(room=40_000)
    with pytest.raises(PoolError, match="out of page-locked memory"):
        HostPool(4096, 12, pin=device)
    assert device.ranges == {}
    assert [call[0] for call in device.calls] == ["register", "register", "unregister", "unregister"]
    gc.collect()
    assert open_fds() == before


def test_a_registrar_that_raises_something_else_is_rolled_back_too(recorder, small_pieces):
    class Flaky(recorder):
        def register(self, address, nbytes):
            if self.ranges:
                raise KeyboardInterrupt
            super().register(address, nbytes)

    device = Flaky()
    with pytest.raises(KeyboardInterrupt):
        HostPool(4096, 12, pin=device)
    assert device.ranges == {}


def test_a_failing_unlock_does_not_keep_the_memory(recorder, small_pieces, open_fds, monkeypatch):
    class Lost(recorder):
        def unregister(self, address):
            self.calls.append("lost")
            raise PoolError("recorderUnregister: device lost (46)")

    noted = []
    monkeypatch.setattr("sys.unraisablehook", noted.append)
    before, device = open_fds(), Lost()
    pool = HostPool(16_384, 3, pin=device)
    pool.close()
    del pool
    gc.collect()
    assert device.calls.count("lost") == 3
    assert open_fds() == before
    assert [type(note.exc_value) for note in noted] == [PoolError]


def test_the_time_spent_on_pages_and_locking_is_reported(recorder):
    stats = HostPool(1 << 20, 4, pin=recorder()).stats()
    assert stats.populate_s > 0
    assert stats.lock_s > 0
    assert HostPool(4096, 1).stats().lock_s == 0
