"""Polling is proved by a read of the data set before a ring relies on it, and is off where that fails."""

import pytest

import lf_format as lff
from lf_iouring import EngineError

WAYS = ["sqpoll", "iopoll"]


@pytest.fixture
def large(tmp_path, write):
    """A data set whose records are read from the device, by io="direct"."""
    return lff.open_dataset(write(tmp_path / "large.loongbin", 200, (4096,), mask=True))


def ring_or_skip(loader):
    info = loader.info().engine
    if info.name != "io_uring":
        pytest.skip(info.reason)
    return info


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_the_same_whether_polling_can_be_had_or_not(large, loader_of, digest, way, io):
    try:
        loader = loader_of(large, io=io, polling=way, epochs=1, num_workers=2)
    except EngineError as error:
        pytest.skip(str(error))
    info = ring_or_skip(loader)
    assert (info.polling == way) != bool(info.polling_reason)
    assert digest(loader) == digest(loader_of(large, io=io, epochs=1))


def test_a_set_up_that_succeeds_and_reads_that_fail_mean_no_polling(large, loader_of):
    """Where the device has no poll queues, an IOPOLL ring is granted and every read of it refused."""
    try:
        loader = loader_of(large, io="direct", polling="iopoll")
    except EngineError as error:
        pytest.skip(str(error))
    info = ring_or_skip(loader)
    if info.polling == "iopoll":
        pytest.skip("this device has poll queues")
    assert "did not come back by polling: E" in info.polling_reason
    assert info.ring_entries > 0


def test_device_polling_of_buffered_reads_is_refused_with_the_fix(loader_of):
    info = ring_or_skip(loader_of(io="buffered", polling="iopoll"))
    assert info.polling == "off"
    assert "io='direct'" in info.polling_reason


def test_without_a_ring_there_is_no_polling(loader_of):
    try:
        info = loader_of(engine="pread", polling="sqpoll").info().engine
    except EngineError as error:
        pytest.skip(str(error))
    assert (info.polling, info.polling_reason) == ("off", "there is no ring")


def test_off_is_the_default_and_other_words_are_refused(loader_of):
    info = loader_of().info().engine
    assert (info.polling, info.polling_reason) == ("off", "")
    with pytest.raises(EngineError, match="choose one of off, sqpoll, iopoll"):
        loader_of(polling="always")
