"""Page-locking: the contract of a registrar, held by a recorder here and by real ones where there is a GPU."""

import gc
import os

import pytest

from lf_memory import CudaRegistrar, HostPool, PoolError, Registrar, TorchRegistrar, VariablePool


class Recorder:
    """A registrar without a device."""

    def __init__(self, limit=None):
        self.limit = limit
        self.ranges = {}
        self.calls = []

    def register(self, address, nbytes):
        if self.limit is not None and nbytes > self.limit:
            raise PoolError("recorderRegister: out of page-locked memory (2)")
        if address in self.ranges:
            raise PoolError("recorderRegister: already registered (712)")
        self.ranges[address] = nbytes
        self.calls.append(("register", address, nbytes))

    def unregister(self, address):
        if self.ranges.pop(address, None) is None:
            raise PoolError("recorderUnregister: not registered (713)")
        self.calls.append(("unregister", address))


@pytest.fixture(params=[Recorder, TorchRegistrar, CudaRegistrar])
def registrar(request):
    try:
        return request.param()
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


def test_unlocking_comes_with_the_last_array_and_only_once():
    recorder = Recorder()
    pool = HostPool(4096, 2, pin=recorder)
    address = pool.buffer.ctypes.data
    assert recorder.calls == [("register", address, 8192)]
    array = pool.acquire().array
    pool.close(force=True)
    gc.collect()
    assert recorder.ranges == {address: 8192}
    del array, pool
    gc.collect()
    assert recorder.calls == [("register", address, 8192), ("unregister", address)]


def test_a_forked_child_unlocks_nothing():
    recorder = Recorder()
    pool = HostPool(4096, 1, pin=recorder)
    pid = os.fork()
    if pid == 0:
        del pool
        gc.collect()
        os._exit(len(recorder.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert pool.pinned


def test_a_refusing_device_is_a_pool_error_and_leaks_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        PoolError, match=r"8192 bytes could not be page-locked: recorderRegister.*\(2\)"
    ) as caught:
        HostPool(4096, 2, pin=Recorder(limit=4096))
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
