"""Case A2 and its kin: ids are stored exactly or refused, naming document and position; nothing is written then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff

Write = Callable[..., Path]
BYTES = lff.ByteTokenizer().info


@pytest.mark.parametrize("codec", ["raw", "zstd", "packed", "auto"])
def test_a2_ids_beyond_16_bits_round_trip(write: Write, codec: str) -> None:
    ids = [0, 65_535, 65_536, 69_999]
    path = write([ids] * 20, vocab_size=70_000, codec=codec)
    reader = lff.Reader(path)
    assert reader.token_dtype == np.uint32
    assert [reader.record(i).tokens.tolist() for i in range(20)] == [ids] * 20
    if codec == "packed":  # 17 bits an id
        assert int(reader.opened.index.block_stored.sum()) == -(-80 * 17 // 8)
    assert lff.verify(path).ok


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, 1), (256, 1), (257, 2), (65_500, 2), (65_536, 2), (65_537, 4), (2**32, 4)]
)
def test_a2_width_follows_the_exact_bound(write: Write, vocab_size: int, width: int) -> None:
    reader = lff.Reader(write([[vocab_size - 1]], vocab_size=vocab_size))
    assert reader.token_dtype.itemsize == width
    assert reader.record(0).tokens.tolist() == [vocab_size - 1]


@pytest.mark.parametrize("bad", [-1, 65_536, 70_000, 2**31, 2**64 + 5, -(2**63)])
@pytest.mark.parametrize("container", [list, np.array], ids=["list", "array"])
def test_a2_an_id_outside_the_vocabulary_names_document_and_position(
    tmp_path: Path, bad: int, container: Any
) -> None:
    path = tmp_path / "a.loongbin"
    writer = lff.Writer(path, vocab_size=65_536, tokenizer=BYTES, buckets=(8,))
    writer.append([1])
    with pytest.raises(lff.FormatError, match="document 1, position 2") as caught:
        writer.append(container([5, 6, bad]))
    assert (caught.value.document, caught.value.position) == (1, 2)
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [[1, 2]],
        5,
        None,
        "text",
        [1, 2.0],
        [1, float("nan")],
        [True, False],
        ["a"],
        [[1], [1, 2]],
        [1] * 65,
        np.zeros(3, np.float32),
        np.zeros(3, bool),
        np.zeros((2, 2), np.int64),
        np.array([1, None]),
    ],
    ids=repr,
)
def test_anything_but_a_flat_list_of_integers_is_refused(tmp_path: Path, bad: object) -> None:
    writer = lff.Writer(tmp_path / "a.loongbin", vocab_size=256, tokenizer=BYTES, buckets=(8, 64))
    with pytest.raises(lff.InputError, match="document 0"):
        writer.append(bad)
    writer.append([1])  # the writer is still good, and the refused record left nothing behind
    assert writer.close().records == 1


def test_pieces_of_a_document_count_as_one(tmp_path: Path) -> None:
    writer = lff.Writer(tmp_path / "a.loongbin", vocab_size=256, tokenizer=BYTES, buckets=(8,))
    writer.append([1], document_end=False)
    with pytest.raises(lff.InputError, match="document 0, position 0"):
        writer.append([256], document_start=False)
    writer.append([2], document_start=False)
    with pytest.raises(lff.InputError, match="document 1, position 0"):
        writer.append([256])


def test_nan_is_located(tmp_path: Path) -> None:
    writer = lff.Writer(tmp_path / "a.loongbin", vocab_size=256, tokenizer=BYTES, buckets=(8,))
    with pytest.raises(lff.InputError, match=r"position 1: .*nan"):
        writer.append([1, float("nan")])


@pytest.mark.parametrize(
    "mask",
    [[1], [1, 0, 2], [0.5, 1, 1], ["a", "b", "c"], [[1, 1, 1]], [1, 1, -1], [1, 1, float("nan")]],
    ids=repr,
)
def test_a_loss_mask_that_is_not_one_bit_per_token_is_refused(tmp_path: Path, mask: object) -> None:
    writer = lff.Writer(
        tmp_path / "a.loongbin", vocab_size=256, tokenizer=BYTES, buckets=(8,), loss_mask=True
    )
    with pytest.raises(lff.InputError, match="loss mask"):
        writer.append([1, 2, 3], mask)


def test_a_missing_mask_means_loss_on_every_token(write: Write, tmp_path: Path) -> None:
    with lff.Writer(tmp_path / "a", vocab_size=9, tokenizer=BYTES, buckets=(8,), loss_mask=True) as writer:
        writer.append([1, 2, 3])
    assert lff.Reader(tmp_path / "a").record(0).loss_mask.tolist() == [True] * 3


def test_a_mask_for_a_file_without_one_is_refused(tmp_path: Path) -> None:
    writer = lff.Writer(tmp_path / "a.loongbin", vocab_size=256, tokenizer=BYTES, buckets=(8,))
    with pytest.raises(lff.InputError, match="loss_mask=True"):
        writer.append([1], [1])


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 0},
        {"vocab_size": 2**32 + 1},
        {"buckets": ()},
        {"buckets": (0, 8)},
        {"buckets": (8, 8)},
        {"buckets": (16, 8)},
        {"buckets": (2**28 + 1,)},
        {"codec": "lz4"},
        {"block_bytes": 0},
        {"uuid": b"short"},
        {"tokenizer": lff.TokenizerInfo("x" * 257, "")},
        {"tokenizer": lff.TokenizerInfo("nul\0", "")},
        {"tokenizer": lff.TokenizerInfo("", "h" * 121)},
    ],
    ids=repr,
)
def test_writer_arguments_out_of_range_are_refused_before_a_file_exists(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = {"vocab_size": 256, "tokenizer": BYTES, "buckets": (8,)} | options
    with pytest.raises(lff.FormatError):
        lff.Writer(tmp_path / "a.loongbin", **settings)
    assert list(tmp_path.iterdir()) == []


def test_check_vocab_names_file_record_and_id(write: Write) -> None:
    path = write([[1, 2], [3, 200, 4], [250]], block_bytes=1)
    with lff.open_dataset(path) as dataset:
        dataset.check_vocab(251)
        with pytest.raises(lff.FormatError) as caught:
            dataset.check_vocab(128)
    error = caught.value
    assert (error.path, error.record, error.position, error.found) == (str(path), 1, 1, 200)


def test_error_attributes_survive_pickling() -> None:
    import pickle

    error = lff.InputError("bad", path="p", offset=3, expected=1, found=2, document="d", position=9)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is lff.InputError
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize(
    "wrong", [{"buckets": (1.5,)}, {"buckets": ("a",)}, {"vocab_size": 1.5}, {"vocab_size": "3"}]
)
def test_sizes_that_are_not_integers_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"vocab_size": 256, "buckets": (8,), "tokenizer": lff.ByteTokenizer().info}
    with pytest.raises(lff.FormatError, match="integers"):
        lff.Writer(tmp_path / "a.loongbin", **options | wrong)
    assert list(tmp_path.iterdir()) == []
