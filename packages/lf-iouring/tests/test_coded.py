"""Coded blocks: every codec gives the bytes of raw ones, each block is decoded once, damage is named."""

import os
import shutil

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, EngineError

ENGINES = ("auto", "pread", "python")
VOCAB = 3000


@pytest.fixture(scope="module")
def raw_path(tmp_path_factory):
    """2,000 masked records whose ids repeat, so that every codec pays."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("coded") / "raw.loongbin"
    words = [rng.integers(0, VOCAB, 12) for _ in range(400)]
    with lff.Writer(
        path, vocab_size=VOCAB, tokenizer=lff.TokenizerInfo("test", "00"), buckets=(64, 256), loss_mask=True,
        block_bytes=8192,
    ) as writer:  # fmt: skip
        for _ in range(2000):
            tokens = np.concatenate([words[k] for k in rng.integers(0, 400, int(rng.integers(1, 20)))])
            writer.append(tokens, rng.integers(0, 2, len(tokens)))
    return path


@pytest.fixture(scope="module", params=["zstd", "dictionaries", "packed"])
def coded(request, raw_path):
    """(codec, the same records in coded blocks)."""
    path = raw_path.with_name(f"{request.param}.loongbin")
    name = request.param
    codec = lff.CodecOptions("zstd", dictionary="auto", rank_table="auto") if name == "dictionaries" else name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lf_format._train.LEAST_SAVING", -10.0)  # kept whether they pay or not
        lff.convert(raw_path, path, codec=codec)
    return request.param, path


@pytest.mark.parametrize("engine", ENGINES)
def test_every_codec_gives_the_bytes_of_raw_blocks(raw_path, coded, loader_of, digest, engine):
    with lff.open_dataset(raw_path) as raw, lff.open_dataset(coded[1]) as dataset:
        assert not dataset.readers[0].codecs_raw
        expected = digest(loader_of(raw, engine=engine, epochs=1, shuffle=False))
        loader = loader_of(dataset, engine=engine, epochs=1, shuffle=False)
        assert digest(loader) == expected
        if engine != "python":
            blocks = int((dataset.readers[0].opened.index.block_codec != 0).sum())
            assert loader.stats().decoded_blocks == blocks > 10
            assert loader.stats().decode_s > 0


def test_the_dictionaries_and_ranks_of_these_files_are_in_use(coded):
    with lff.open_dataset(coded[1]) as dataset:
        codecs = set(dataset.readers[0].opened.index.block_codec.tolist())
        entries = dataset.readers[0].opened.dictionaries.entries
    assert max(codecs) == {"zstd": 1, "packed": 2, "dictionaries": 3}[coded[0]]
    assert {entry.kind for entry in entries} == ({1, 2} if coded[0] == "dictionaries" else set())


def test_threads_share_the_decoded_blocks(raw_path, coded, loader_of, digest):
    with lff.open_dataset(coded[1]) as dataset:
        digests = set()
        for threads, cache in ((1, 256 << 20), (3, 256 << 20), (3, 0)):
            loader = loader_of(dataset, num_workers=threads, epochs=1, cache_bytes=cache)
            digests.add(digest(loader))
            decoded = loader.stats().decoded_blocks
        assert len(digests) == 1
        blocks = len(dataset.readers[0].opened.index.block_codec)
        assert decoded > blocks  # without a cache a block is decoded for every batch that touches it


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flipped_byte_of_a_coded_block_is_a_data_error(coded, tmp_path, loader_of, engine):
    path = shutil.copy(coded[1], tmp_path / "bad.loongbin")
    with lff.open_dataset(path) as dataset:
        index = dataset.readers[0].opened.index
        block = int(np.flatnonzero(index.block_codec != 0)[2])
        at = int(index.block_offset[block]) + 64 + int(index.block_stored[block]) // 2
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
        first = int(index.block_count[:block].sum())
        records = range(first, first + int(index.block_count[block]))
        loader = loader_of(dataset, engine=engine, epochs=1)
        while not set(loader.plan.batch(loader.step).ids.tolist()) & set(records):
            next(loader)
        with pytest.raises(DataError, match="hash") as caught:
            next(loader)
        assert caught.value.record in records
        assert caught.value.offset == int(index.block_offset[block]) + 64
        assert "bad.loongbin" in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_truncated_coded_block_is_a_data_error(coded, tmp_path, loader_of, engine):
    path = shutil.copy(coded[1], tmp_path / "cut.loongbin")
    with lff.open_dataset(path) as dataset:
        os.truncate(path, int(dataset.readers[0].opened.index.block_offset[1]) + 100)
        with pytest.raises(DataError):
            list(loader_of(dataset, engine=engine, epochs=1))


def test_an_unchecked_block_that_does_not_decode_is_a_data_error(coded, tmp_path, loader_of):
    if coded[0] == "packed":
        pytest.skip("any bits are ids")
    path = shutil.copy(coded[1], tmp_path / "bad.loongbin")
    with lff.open_dataset(path) as dataset:
        index = dataset.readers[0].opened.index
        block = int(np.flatnonzero(index.block_codec != 0)[0])
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"\xff" * 8, int(index.block_offset[block]) + 64)
        with pytest.raises(DataError, match="decode"):
            list(loader_of(dataset, engine="pread", epochs=1, verify=False))


def test_without_libzstd_lf_format_decodes_and_the_engine_says_why(
    raw_path, coded, loader_of, digest, monkeypatch
):
    native = pytest.importorskip("lf_iouring._native_engine")
    monkeypatch.setattr(native, "zstd_version", lambda: 0)
    with lff.open_dataset(coded[1]) as dataset, lff.open_dataset(raw_path) as raw:
        loader = loader_of(dataset, epochs=1, shuffle=False)
        assert digest(loader) == digest(loader_of(raw, epochs=1, shuffle=False))
        if coded[0] == "packed":
            assert loader.info().engine.name != "python"
            return
        assert loader.info().engine.name == "python"
        assert "libzstd" in loader.info().engine.reason
        with pytest.raises(EngineError, match="libzstd"):
            loader_of(dataset, engine="pread")
        with pytest.raises(EngineError, match="libzstd"):
            loader_of(dataset, io="direct")
