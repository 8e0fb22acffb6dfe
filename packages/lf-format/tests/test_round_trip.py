"""What goes in comes out, in every dtype, codec and mask setting."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff

Write = Callable[..., Path]
BYTES = lff.ByteTokenizer().info

VOCABULARIES = (2, 256, 257, 65_536, 65_537, 2**32)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    vocab_size=st.sampled_from(VOCABULARIES),
    codec=st.sampled_from(["raw", "zstd"]),
    loss_mask=st.booleans(),
    block_bytes=st.sampled_from([1, 64, 4096]),
)
def test_any_records_come_back_with_mask_and_flags(
    folder: Path, data: st.DataObject, vocab_size: int, codec: str, loss_mask: bool, block_bytes: int
) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=40)
    records = data.draw(
        st.lists(st.tuples(ids, st.booleans(), st.booleans(), st.integers(0, 2**32)), max_size=30)
    )
    path = folder / "a.loongbin"
    expected = []
    with lff.Writer(
        path, vocab_size=vocab_size, tokenizer=BYTES, buckets=(4, 16, 40), codec=codec,
        loss_mask=loss_mask, block_bytes=block_bytes,
    ) as writer:  # fmt: skip
        for tokens, start, end, seed in records:
            mask = np.random.default_rng(seed).random(len(tokens)) < 0.5
            writer.append(tokens, mask if loss_mask else None, start, end)
            expected.append((tokens, mask.tolist() if loss_mask else None, start | end << 1))
    with lff.Reader(path) as reader:
        found = [_plain(reader.record(i)) for i in range(len(reader))]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
        assert reader.lengths.tolist() == [len(tokens) for tokens, _, _ in found]
        assert reader.flags.tolist() == [flags for _, _, flags in found]
        assert reader.max_id() == max((max(tokens) for tokens, _, _ in expected), default=-1)
    assert lff.verify(path).problems == []


def _plain(record: lff.Record) -> tuple[list[int], list[bool] | None, int]:
    return (
        record.tokens.tolist(),
        None if record.loss_mask is None else record.loss_mask.tolist(),
        record.flags,
    )


def test_records_of_one_bucket_keep_their_order_and_ids_follow_the_blocks(write: Write) -> None:
    reader = lff.Reader(write([[1], [2] * 12, [3], [4] * 12], buckets=(8, 16)))
    assert [reader.record(i).tokens[0] for i in range(4)] == [1, 3, 2, 4]
    assert reader.bucket_of.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("length", "bucket"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (64, 2)])
def test_a_record_goes_to_the_first_bucket_that_holds_it(write: Write, length: int, bucket: int) -> None:
    assert lff.Reader(write([[0] * length])).bucket_of.tolist() == [bucket]


@pytest.mark.parametrize(("buckets", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_bucket_numbers_are_as_wide_as_needed(write: Write, buckets: int, dtype: type) -> None:
    reader = lff.Reader(write([[1] * buckets], buckets=range(1, buckets + 1)))
    assert reader.bucket_of.dtype == dtype
    assert reader.bucket_of.tolist() == [buckets - 1]


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "u2", "i4", ">u4", "i8", "u8"])
def test_every_integer_dtype_and_stride_is_accepted(write: Write, dtype: str) -> None:
    tokens = np.arange(0, 120, dtype=dtype)[::3]
    assert lff.Reader(write([tokens])).record(0).tokens.tolist() == list(range(0, 120, 3))


def test_record_owns_its_arrays(sample: Path) -> None:
    reader = lff.Reader(sample)
    first = reader.record(5)
    first.tokens[:] = 0
    assert reader.record(5).tokens.any()


def test_metadata_is_read_only(sample: Path) -> None:
    reader = lff.Reader(sample)
    for array in (reader.lengths, reader.flags, reader.bucket_of):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("i", [-1, 64, 2**40])
def test_record_outside_is_an_index_error(sample: Path, i: int) -> None:
    with pytest.raises(IndexError):
        lff.Reader(sample).record(i)
    with pytest.raises(IndexError):
        lff.Reader(sample).extents([0, i])


def test_an_empty_file_is_a_file_with_no_records(write: Write) -> None:
    path = write([])
    reader = lff.Reader(path)
    assert (len(reader), reader.max_id(), reader.codecs_raw) == (0, -1, True)
    assert len(reader.extents([]).offset) == 0
    assert lff.verify(path).ok


def test_same_input_gives_the_same_bytes(write: Write) -> None:
    records = [[i] * (1 + i % 60) for i in range(100)]
    one, two = write(records, "one.loongbin"), write(records, "two.loongbin")
    assert one.read_bytes() == two.read_bytes()


def test_fingerprint_depends_on_content_order_vocabulary_and_tokenizer_only(write: Write) -> None:
    base = {"records": [[1], [2]], "name": "b.loongbin"}
    variants = [
        base,
        base | {"records": [[2], [1]]},
        base | {"records": [[1], [3]]},
        base | {"vocab_size": 255},
        base | {"tokenizer": lff.TokenizerInfo("bytes", "other")},
        base | {"buckets": (8, 64)},
    ]
    prints = [lff.Reader(write(**v)).fingerprint for v in variants]
    assert len(set(prints)) == len(prints)
    assert lff.Reader(write(**base, uuid=bytes(range(16)))).fingerprint == prints[0]


# --- extents: what an engine with its own I/O reads ---


def test_extents_point_at_the_bytes_of_every_record(sample: Path) -> None:
    with lff.Reader(sample) as reader:
        ids = np.random.default_rng(0).permutation(len(reader))
        tokens, masks = reader.extents(ids), reader.extents(ids, "loss_mask")
        for row, i in enumerate(ids.tolist()):
            record = reader.record(i)
            raw = os.pread(reader.fileno(), int(tokens.nbytes[row]), int(tokens.offset[row]))
            bits = os.pread(reader.fileno(), int(masks.nbytes[row]), int(masks.offset[row]))
            assert raw == record.tokens.tobytes()
            assert bits == np.packbits(record.loss_mask, bitorder="little").tobytes()
        assert (tokens.offset.dtype, tokens.nbytes.dtype, tokens.hash.dtype) == (
            np.uint64,
            np.uint32,
            np.uint32,
        )


def test_extents_refuse_packed_blocks_unknown_fields_and_wrong_ids(write: Write) -> None:
    reader = lff.Reader(write([[7] * 60] * 50, codec="zstd"))
    assert not reader.codecs_raw
    with pytest.raises(lff.FormatError, match="raw blocks"):
        reader.extents([0])
    with pytest.raises(lff.FormatError, match="field"):
        reader.extents([0], "labels")
    with pytest.raises(lff.FormatError, match="record ids"):
        reader.extents([0.5])


def test_zstd_keeps_blocks_raw_that_do_not_shrink(write: Write) -> None:
    noise = [np.random.default_rng(i).integers(0, 256, 64) for i in range(8)]
    assert lff.Reader(write(noise, codec="zstd")).codecs_raw


# --- several files ---


def test_dataset_counts_through_its_shards(write_file: Write, tmp_path: Path) -> None:
    for name, ids in (("a", [1, 2]), ("b", []), ("c", [3])):
        write_file(tmp_path / f"{name}.loongbin", [[i] for i in ids])
    with lff.open_dataset(tmp_path) as dataset:
        assert [dataset.record(i).tokens[0] for i in range(3)] == [1, 2, 3]
        shard, local = dataset.locate(np.array([2, 0, 1], np.uint8))
        assert (shard.tolist(), local.tolist()) == ([2, 0, 0], [0, 0, 1])
        assert (shard.dtype, local.dtype) == (np.int32, np.int64)
        assert dataset.lengths.tolist() == [1, 1, 1]
        assert dataset.max_id() == 3
        for wrong in (-1, 3):
            with pytest.raises(IndexError):
                dataset.record(wrong)
            with pytest.raises(IndexError):
                dataset.locate([wrong])


def test_dataset_fingerprint_depends_on_shard_order(write_file: Write, tmp_path: Path) -> None:
    a = write_file(tmp_path / "a.loongbin", [[1]])
    b = write_file(tmp_path / "b.loongbin", [[2]])
    prints = {lff.open_dataset(order).fingerprint for order in itertools.permutations([a, b])}
    assert len(prints) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"vocab_size": 255},
        {"buckets": (8, 64)},
        {"loss_mask": True},
        {"tokenizer": lff.TokenizerInfo("bytes", "other")},
    ],
    ids=["vocabulary", "buckets", "fields", "tokenizer"],
)
def test_shards_that_disagree_are_refused_naming_both(
    write_file: Write, tmp_path: Path, other: dict[str, object]
) -> None:
    a = write_file(tmp_path / "a.loongbin", [[1]])
    b = write_file(tmp_path / "b.loongbin", [[2]], **other)
    with pytest.raises(lff.FormatError) as caught:
        lff.open_dataset([a, b])
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)


def test_a_directory_with_train_and_eval_has_to_be_named(write_file: Write, tmp_path: Path) -> None:
    write_file(tmp_path / "train.loongbin", [[1]])
    write_file(tmp_path / "eval.loongbin", [[2]])
    with pytest.raises(lff.FormatError, match="train and eval"):
        lff.open_dataset(tmp_path)
    assert lff.open_dataset(tmp_path, split="eval").record(0).tokens.tolist() == [2]


def test_nothing_to_open_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(lff.FormatError, match=r"no \.loongbin"):
        lff.open_dataset(tmp_path)
    with pytest.raises(lff.FormatError, match="at least one file"):
        lff.open_dataset([])
    with pytest.raises(FileNotFoundError):
        lff.open_dataset(tmp_path / "absent.loongbin")
