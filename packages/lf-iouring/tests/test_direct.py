"""Reads past the page cache: the same bytes, no page warmed, and a reported choice."""

import ctypes
import gc
import mmap
import os
import shutil

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, EngineError
from lf_iouring import engine as engine_module
from lf_iouring._direct import decide

GIB = 1 << 30


@pytest.fixture
def direct(loader_of):
    """loader_of with io="direct"; skips where the file system or the kernel refuses."""

    def make(dataset=None, **arguments):
        try:
            return loader_of(dataset, io="direct", **arguments)
        except EngineError as error:
            pytest.skip(str(error))

    return make


def drop_cache(dataset):
    for reader in dataset.readers:
        os.fsync(reader.fileno())
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_pages(fd, start, stop):
    """Pages of a byte range that are in the page cache, by mincore(2)."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        address = np.frombuffer(view, np.uint8).ctypes.data
        flags = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        rc = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data))
        assert rc == 0, os.strerror(ctypes.get_errno())
    return int((flags[start // mmap.PAGESIZE : stop // mmap.PAGESIZE] & 1).sum())


@pytest.mark.parametrize("name", ["io_uring", "pread"])
@pytest.mark.parametrize("mask", [False, True])
def test_extents_of_any_alignment_give_the_same_batches(
    tmp_path, write, loader_of, direct, digest, name, mask
):
    paths = [
        write(tmp_path / f"{i}.loongbin", 70, (9, 700, 5000), vocab=vocab, mask=mask, seed=i)
        for i, vocab in enumerate((50_000, 50_000))
    ]
    dataset = lff.open_dataset(paths)
    expected = digest(loader_of(dataset, io="buffered", epochs=1))
    for depth in (1, 3, 64):
        drop_cache(dataset)
        loader = direct(dataset, engine=name, queue_depth=depth, epochs=1, num_workers=2)
        assert digest(loader) == expected
        assert loader.stats().direct_reads > 0
        assert loader.info().engine.io == "direct"


@pytest.mark.parametrize("edge", [2048, 300_000])
def test_a_row_as_long_as_its_bucket_is_read_too(tmp_path, loader_of, direct, digest, edge):
    """Also when the bounce buffer holds fewer extents than the queue is deep."""
    info = lff.TokenizerInfo("test", "00")
    with lff.Writer(tmp_path / "f.loongbin", vocab_size=70_000, tokenizer=info, buckets=(edge,)) as writer:
        for i in range(60):
            writer.append(np.full(edge, i))
    dataset = lff.open_dataset(tmp_path / "f.loongbin")
    drop_cache(dataset)
    loader = direct(dataset, global_batch=60, epochs=1, queue_depth=64)
    if loader.info().engine.name == "io_uring":
        assert loader.info().engine.ring_entries == min(
            64, (64 << 20) // (-(-edge * 4 // 4096) * 4096 + 4096)
        )
    assert digest(loader) == digest(loader_of(dataset, global_batch=60, epochs=1, io="buffered"))


def test_direct_misses_do_not_warm_the_page_cache(tmp_path, write, loader_of, direct):
    dataset = lff.open_dataset(write(tmp_path / "cold.loongbin", 300, (4096,)))
    reader = dataset.readers[0]
    extents = reader.extents(np.arange(300))
    start, stop = int(extents.offset.min()), int((extents.offset + extents.nbytes).max())
    loader = direct(dataset, engine="io_uring", epochs=1)
    drop_cache(dataset)
    assert resident_pages(reader.fileno(), start, stop) == 0
    assert sum(1 for _ in loader) == 13
    assert resident_pages(reader.fileno(), start, stop) == 0
    assert loader.stats().direct_reads == 300
    assert sum(1 for _ in loader_of(dataset, io="buffered", epochs=1)) == 13
    assert resident_pages(reader.fileno(), start, stop) > 0


def test_what_is_in_the_page_cache_is_taken_from_there(tmp_path, write, direct):
    path = write(tmp_path / "warm.loongbin", 100, (4096,))
    path.read_bytes()
    loader = direct(lff.open_dataset(path), engine="io_uring", epochs=1)
    assert sum(1 for _ in loader) == 5
    stats = loader.stats()
    if stats.cached_reads == 0:
        pytest.skip("the kernel does not tell what is cached (cachestat, Linux 6.5)")
    assert (stats.cached_reads, stats.direct_reads) == (100, 0)


def test_a_flipped_byte_and_a_cut_file_are_data_errors(tmp_path, write, direct):
    path = write(tmp_path / "bad.loongbin", 200, (2048,))
    dataset = lff.open_dataset(path)
    at = int(dataset.readers[0].extents([57]).offset[0])
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    drop_cache(dataset)
    with pytest.raises(DataError, match="record hash") as caught:
        list(direct(dataset, epochs=1))
    assert (caught.value.record, caught.value.offset) == (57, at)
    os.truncate(path, 100_001)
    for name in ("io_uring", "pread"):
        with pytest.raises(DataError, match="end of the file") as caught:
            list(direct(dataset, engine=name, global_batch=200, epochs=1))
        assert caught.value.offset + 4096 > 100_001


def test_descriptors_are_closed_with_the_loader(direct):
    gc.collect()  # loaders that failed in other tests
    before = len(os.listdir("/proc/self/fd"))
    loader = direct(engine="pread")
    assert len(os.listdir("/proc/self/fd")) == before + 2  # the pool, and the second descriptor
    next(loader).release()
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_opens_its_own_descriptors(direct, digest, in_fork):
    loader = direct(epochs=1)
    first = next(loader)
    rest = digest([batch for batch in direct(epochs=1) if batch.step > first.step])

    def child():
        before = len(os.listdir("/proc/self/fd"))
        assert digest(loader) == rest
        assert len(os.listdir("/proc/self/fd")) <= before + 4

    assert in_fork(child) == 0
    assert digest(loader) == rest


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_tmpfs_is_refused_by_name_and_reported_by_auto(masked_path, loader_of, monkeypatch):
    path = f"/dev/shm/lf-iouring-test-{os.getpid()}.loongbin"
    shutil.copy(masked_path, path)
    try:
        dataset = lff.open_dataset(path)
        with pytest.raises(EngineError, match=r"io='direct'.*lf-iouring-test.*E(OP)?NOTSUP"):
            loader_of(dataset, io="direct")
        monkeypatch.setattr(engine_module, "memory_limit", lambda: 1000)
        info = loader_of(dataset).info().engine
    finally:
        os.unlink(path)
    assert info.io == "buffered"
    if info.name == "io_uring":
        assert "too much for the page cache, but no direct reads" in info.io_reason


def test_auto_is_direct_for_data_larger_than_memory(loader_of, monkeypatch, digest):
    assert loader_of().info().engine.io == "mapped"
    monkeypatch.setattr(engine_module, "memory_limit", lambda: 1000)
    loader = loader_of(epochs=1)
    info = loader.info().engine
    if info.name == "io_uring" and "no direct reads" not in info.io_reason:
        assert info.io == "direct"
    assert "too much for the page cache" in info.io_reason
    assert digest(loader) == digest(loader_of(io="buffered", epochs=1))
    assert loader_of(engine="pread").info().engine.io == "buffered"


@pytest.mark.parametrize(
    ("size", "engine", "io"),
    [
        (25 * GIB, "pread", "mapped"),
        (69 * GIB, "io_uring", "buffered"),
        (71 * GIB, "io_uring", "direct"),
        (71 * GIB, "pread", "buffered"),
    ],
)
def test_the_choice_is_by_size_and_engine(size, engine, io):
    decision = decide("auto", size, 100 * GIB, engine)
    assert decision.io == io
    assert f"{size / GIB:.2f} GiB of data, 100.00 GiB of memory" in decision.reason
    for name in ("direct", "mapped", "buffered"):
        assert decide(name, size, GIB, engine).io == name


def test_the_python_engine_refuses_direct_by_name(loader_of):
    with pytest.raises(EngineError, match="io='direct'"):
        loader_of(engine="python", io="direct")
    with pytest.raises(EngineError, match="choose one of"):
        loader_of(io="paged")


@pytest.mark.parametrize("engine", ["auto", "pread"])
def test_coded_blocks_are_read_past_the_page_cache(tmp_path, write, direct, loader_of, digest, engine):
    path = write(tmp_path / "z.loongbin", 3000, (64,), codec="zstd", top=9)
    dataset = lff.open_dataset(path)
    expected = digest(loader_of(dataset, io="buffered", epochs=1))
    drop_cache(dataset)
    loader = direct(dataset, engine=engine, epochs=1)
    assert loader.info().engine.io == "direct"
    assert digest(loader) == expected
    stats = loader.stats()
    assert stats.direct_reads + stats.cached_reads == stats.decoded_blocks >= 1


def test_files_and_the_pool_are_registered(loader_of):
    info = loader_of().info().engine
    if info.name != "io_uring" or "not registered" in info.reason:
        pytest.skip(info.reason)
    assert info.registered_files
    assert info.registered
