"""Engines: the same bytes from each, and one clear error for bytes that are not as written."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, EngineError, LoongDataLoader

ENGINES = ("io_uring", "pread", "python")


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "io_uring":
        try:
            os.close(_probe_ring())
        except OSError as error:
            pytest.skip(f"io_uring: {error}")
    return request.param


def _probe_ring():
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return fd


@pytest.mark.parametrize("vocab", [256, 65_536, 70_000])
@pytest.mark.parametrize("mask", [False, True])
def test_rows_hold_the_records_padded_with_zeros(tmp_path, write, loader_of, engine, vocab, mask):
    paths = [
        write(tmp_path / f"{i}.loongbin", 90, (9, 33, 130), vocab=vocab, mask=mask, seed=i) for i in range(3)
    ]
    dataset = lff.open_dataset(paths)
    seen = []
    for batch in loader_of(dataset, engine=engine, global_batch=16, epochs=1):
        assert batch.tokens.dtype == dataset.token_dtype
        assert (batch.loss_mask is not None) == mask
        for row, number in enumerate(batch.ids.tolist()):
            length = int(batch.lengths[row])
            assert not batch.tokens[row, length:].any()
            if mask:
                assert not batch.loss_mask[row, length:].any()
            if number < 0:
                assert length == 0
                continue
            record = dataset.record(number)
            assert np.array_equal(batch.tokens[row, :length], record.tokens)
            if mask:
                assert np.array_equal(batch.loss_mask[row, :length], record.loss_mask)
            seen.append(number)
    assert sorted(seen) == list(range(270))


def test_every_engine_gives_identical_bytes(loader_of, digest):
    digests = {
        (engine, threads): digest(loader_of(engine=engine, num_workers=threads, epochs=2))
        for engine in ("auto", "pread", "python")
        for threads in (1, 3)
    }
    assert len(set(digests.values())) == 1, digests


def copy_of(path, tmp_path):
    return shutil.copy(path, tmp_path / "copy.loongbin")


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("field", ["tokens", "loss_mask"])
def test_a_flipped_byte_is_a_data_error_naming_the_record(masked_path, tmp_path, loader_of, engine, field):
    path = copy_of(masked_path, tmp_path)
    dataset = lff.open_dataset(path)
    at = int(dataset.readers[0].extents([123], field).offset[0])
    start = int(dataset.readers[0].extents([123]).offset[0])
    flip(path, at)
    loader = loader_of(dataset, engine=engine, epochs=1)
    with pytest.raises(DataError, match="record hash") as caught:
        list(loader)
    error = caught.value
    assert (error.path, error.record, error.offset) == (str(path), 123, start)
    assert error.expected != error.found
    position = loader.step
    with pytest.raises(DataError):
        next(loader)
    assert loader.step == position
    flip(path, at)
    assert next(loader).step == position


def test_verify_off_delivers_what_is_there(masked_path, tmp_path, loader_of, engine):
    path = copy_of(masked_path, tmp_path)
    dataset = lff.open_dataset(path)
    flip(path, int(dataset.readers[0].extents([123]).offset[0]))
    assert sum(1 for _ in loader_of(dataset, engine=engine, epochs=1, verify=False)) == 42


def test_a_coded_block_with_a_flipped_byte_is_a_data_error(tmp_path, write, loader_of):
    path = write(tmp_path / "z.loongbin", 200, (64,), codec="zstd", top=9)
    with lff.open_dataset(path) as dataset:
        block = int(dataset.readers[0].opened.index.block_offset[0])
    flip(path, block + 100)
    with pytest.raises(DataError) as caught:
        list(loader_of(lff.open_dataset(path), epochs=1))
    assert caught.value.path == str(path)


def test_a_truncated_file_is_a_data_error(masked_path, tmp_path, loader_of, engine):
    path = copy_of(masked_path, tmp_path)
    dataset = lff.open_dataset(path)
    os.truncate(path, 40_000)
    with pytest.raises(DataError, match="end of the file") as caught:
        list(loader_of(dataset, engine=engine, epochs=1))
    assert caught.value.offset + 512 > 40_000


def test_a_vanished_file_is_read_on_through_its_descriptor(masked_path, tmp_path, loader_of, engine, digest):
    path = copy_of(masked_path, tmp_path)
    dataset = lff.open_dataset(path)
    os.unlink(path)
    assert digest(loader_of(dataset, engine=engine, epochs=1)) == digest(loader_of(engine=engine, epochs=1))


def test_a_read_error_is_a_data_error_with_the_errno(masked_path, tmp_path, loader_of, engine):
    dataset = lff.open_dataset(copy_of(masked_path, tmp_path))
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, dataset.readers[0].fileno())
    with pytest.raises(DataError, match="EISDIR"):
        next(loader_of(dataset, engine=engine))
    os.close(folder)


def test_an_extent_that_lies_is_refused_before_it_is_read(masked, loader_of, engine, monkeypatch):
    reader = masked.readers[0]
    honest = reader.locations

    def lying(ids):
        found = honest(ids)
        return replace(found, nbytes=found.nbytes + np.uint32(100_000))

    monkeypatch.setattr(reader, "locations", lying)
    with pytest.raises(DataError, match="bytes"):
        next(loader_of(engine=engine))


def test_cold_reads_go_through_the_ring(tmp_path, write, loader_of, digest):
    path = write(tmp_path / "cold.loongbin", 400, (2048,))
    dataset = lff.open_dataset(path)
    try:
        loader = loader_of(dataset, engine="io_uring", io="buffered", epochs=1)
    except EngineError as error:
        pytest.skip(str(error))
    fd = dataset.readers[0].fileno()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    cold = digest(loader)
    stats = loader.stats()
    if stats.ring_reads == 0:
        pytest.skip("this file system keeps its files in memory")
    assert stats.ring_reads + stats.cached_reads == 400
    assert stats.pread_reads == 0
    assert cold == digest(loader_of(dataset, engine="python", epochs=1))


def test_a_cold_corrupt_record_is_found_on_the_ring_path(tmp_path, write, loader_of):
    path = write(tmp_path / "cold.loongbin", 200, (2048,))
    dataset = lff.open_dataset(path)
    flip(path, int(dataset.readers[0].extents([57]).offset[0]))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with pytest.raises(DataError) as caught:
        list(loader_of(dataset, epochs=1))
    assert caught.value.record == 57


def test_more_rows_than_ring_entries(tmp_path, write, loader_of, digest):
    dataset = lff.open_dataset(write(tmp_path / "wide.loongbin", 1200, (64,), mask=True))
    os.posix_fadvise(dataset.readers[0].fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    wide = loader_of(dataset, global_batch=600, epochs=1)
    assert digest(wide) == digest(loader_of(dataset, global_batch=600, epochs=1, engine="python"))


def test_an_unknown_engine_is_refused(loader_of):
    with pytest.raises(EngineError, match="choose one of"):
        loader_of(engine="mmap")


def test_without_the_c_module_auto_is_python_and_names_are_errors(masked, loader_of, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lf_iouring._native_engine", None)
    loader = loader_of()
    assert loader.info().engine.name == "python"
    assert "C module" in loader.info().engine.reason
    for name in ("io_uring", "pread"):
        with pytest.raises(EngineError, match="C compiler"):
            LoongDataLoader(masked, global_batch=24, engine=name)


def test_times_and_counts_are_reported(loader_of, masked):
    loader = loader_of(epochs=1, engine="pread", io="buffered")
    list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.tokens) == (42, int(masked.lengths.sum()))
    assert stats.pread_reads == 2000
    assert stats.bytes == int(masked.lengths.sum()) * 2 + int(((masked.lengths + 7) // 8).sum())
    assert 0 < stats.hash_s <= stats.read_s
    loader.close()
    assert loader.stats().pread_reads == 2000


@pytest.mark.parametrize("prefetch", [1, 2, 7, 59])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_order_to_the_last_at_any_depth(loader_of, digest, engine, prefetch, threads):
    """Also where the epochs end and where every slot is held."""
    plain = digest(loader_of(engine="python", epochs=3))
    loader = loader_of(engine=engine, epochs=3, prefetch_factor=prefetch, num_workers=threads)
    assert digest(loader) == plain
    held = list(loader_of(engine=engine, epochs=1, prefetch_factor=prefetch, num_workers=threads))
    assert [batch.step for batch in held] == list(range(42))
    assert len({batch.tokens.ctypes.data for batch in held}) == 42


def test_a_fault_among_batches_read_ahead_is_raised_for_its_own(masked_path, tmp_path, loader_of, engine):
    path = copy_of(masked_path, tmp_path)
    dataset = lff.open_dataset(path)
    steps = {int(i): batch.step for batch in loader_of(dataset, epochs=1) for i in batch.ids if i >= 0}
    flip(path, int(dataset.readers[0].extents([321]).offset[0]))
    loader = loader_of(dataset, engine=engine, prefetch_factor=8, epochs=1)
    assert [next(loader).step for _ in range(steps[321])] == list(range(steps[321]))
    with pytest.raises(DataError) as caught:
        next(loader)
    assert (caught.value.record, loader.step) == (321, steps[321])
