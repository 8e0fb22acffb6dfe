"""Readers under threads, fork, spawn and pickle; descriptors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import lf_format as lff

Write = Callable[..., Path]


def _digest(reader: lff.Reader | lff.Dataset) -> list[bytes]:
    return [reader.record(i).tokens.tobytes() for i in range(len(reader))]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_threads_share_a_reader(write: Write, codec: str) -> None:
    path = write([[i % 5] * (1 + i % 60) for i in range(400)], codec=codec, block_bytes=300)
    with lff.Reader(path) as reader:
        expected = _digest(reader)
        orders = [np.random.default_rng(k).permutation(len(reader)).tolist() for k in range(16)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda order: [reader.record(i).tokens.tobytes() for i in order], orders))
    assert found == [[expected[i] for i in order] for order in orders]


def test_a_forked_child_reads_the_same_while_its_parent_reads(sample: Path) -> None:
    reader = lff.Reader(sample)
    expected = _digest(reader)
    context = multiprocessing.get_context("fork")
    with context.Pool(2, _inherit, (reader,)) as pool:
        asked = [pool.apply_async(_digest_inherited) for _ in range(4)]
        for _ in range(20):
            assert _digest(reader) == expected
        assert all(answer.get(30) == expected for answer in asked)


_inherited: list[lff.Reader] = []


def _inherit(reader: lff.Reader) -> None:
    _inherited.append(reader)


def _digest_inherited() -> list[bytes]:
    return _digest(_inherited[0])


def test_a_data_set_pickles_by_path(sample: Path) -> None:
    dataset = lff.open_dataset([sample, sample])
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    assert _digest(copy) == _digest(dataset)
    assert copy.readers[0].fileno() != dataset.readers[0].fileno()


def test_unpickling_refuses_a_file_that_changed(write: Write) -> None:
    packed = pickle.dumps(lff.Reader(write([[1]])))
    write([[2]])
    with pytest.raises(lff.FormatError, match="changed"):
        pickle.loads(packed)


def test_an_open_reader_keeps_the_file_it_opened(write: Write) -> None:
    reader = lff.Reader(write([[1]]))
    write([[2]])
    assert reader.record(0).tokens.tolist() == [1]


def test_a_closed_reader_says_so(sample: Path) -> None:
    with lff.Reader(sample) as reader:
        pass
    reader.close()
    with pytest.raises(lff.FormatError, match="closed"):
        reader.record(0)
    with pytest.raises(lff.FormatError, match="closed"):
        reader.fileno()
    assert len(reader.lengths) == 64


def test_no_descriptor_is_left_by_readers_good_or_bad(
    sample: Path, write_file: Write, tmp_path: Path
) -> None:
    (tmp_path / "bad.loongbin").write_bytes(b"junk")
    other = write_file(tmp_path / "other.loongbin", [[1]], vocab_size=9)
    gc.collect()  # what other tests left may close its descriptors at any time
    before = len(os.listdir("/proc/self/fd"))
    for sources in ([sample, tmp_path / "bad.loongbin"], [sample, other]):
        with pytest.raises(lff.FormatError):
            lff.open_dataset(sources)
    with lff.open_dataset(sample) as dataset:
        dataset.record(0)
    lff.verify(sample)
    lff.Reader(sample)  # dropped at once
    assert len(os.listdir("/proc/self/fd")) == before
