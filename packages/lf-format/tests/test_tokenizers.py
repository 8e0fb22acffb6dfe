"""Tokenizers: exact, identified by content, rebuilt from text."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lf_format as lff


@given(st.text())
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = lff.load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_not_utf8_decode_with_replacement() -> None:
    assert lff.load_tokenizer("bytes").decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    with pytest.raises(lff.FormatError, match=r"0\.\.255"):
        lff.load_tokenizer("bytes").decode([256])


def test_the_hash_of_the_byte_tokenizer_is_fixed() -> None:
    info = lff.load_tokenizer("bytes").info
    assert info == lff.TokenizerInfo(
        "bytes", "adc5300dc35b47838452631f784db65fdb6e26ed306caac381344f30eb450321"
    )


def test_a_byte_tokenizer_is_rebuilt_from_its_text(tmp_path: Path) -> None:
    text = lff.load_tokenizer("bytes").dumps()
    (tmp_path / "tokenizer.json").write_text(text)
    for copy in (
        lff.loads_tokenizer(text),
        lff.load_tokenizer(tmp_path),
        lff.load_tokenizer(tmp_path / "tokenizer.json"),
    ):
        assert isinstance(copy, lff.ByteTokenizer)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A small tokenizer.json that asks for truncation and padding, with a hole in its ids."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 9}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=4)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_tokenizer_json_neither_truncates_nor_pads(words: Path) -> None:
    tokenizer = lff.load_tokenizer(words)
    assert tokenizer.encode("red green blue red").tolist() == [1, 2, 9, 1]
    assert tokenizer.encode("red").tolist() == [1]
    assert tokenizer.vocab_size == 10  # the largest id decides
    assert tokenizer.decode([1, 9]) == "red blue"


def test_a_tokenizer_json_is_identified_by_content_not_by_spelling(words: Path, tmp_path: Path) -> None:
    content = json.loads(words.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content, indent=8, sort_keys=True))
    assert lff.load_tokenizer(words).info == lff.load_tokenizer(other).info
    content["model"]["vocab"]["violet"] = 3
    other.write_text(json.dumps(content))
    assert lff.load_tokenizer(words).info != lff.load_tokenizer(other).info


def test_a_tokenizer_json_is_rebuilt_from_its_text(words: Path) -> None:
    tokenizer = lff.load_tokenizer(words)
    copy = lff.loads_tokenizer(tokenizer.dumps())
    assert copy.info == tokenizer.info
    assert copy.encode("blue red").tolist() == [9, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_with_a_tokenizer_json(words: Path, tmp_path: Path, workers: int) -> None:
    report = lff.preprocess_documents(
        [("a", "red green"), ("b", "blue")], tmp_path / "out", tokenizer=words, num_workers=workers
    )
    with lff.Reader(report.train.path) as reader:
        assert [reader.record(i).tokens.tolist() for i in range(2)] == [[1, 2], [9]]
        assert (reader.vocab_size, reader.tokenizer) == (10, lff.load_tokenizer(words).info)


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"model": 5}'])
def test_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(lff.FormatError, match=r"not a tokenizer\.json"):
        lff.load_tokenizer(path)


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(lff.FormatError, match=r"lf-format\[tokenizers\]"):
        lff.load_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(lff.FormatError, match="no such tokenizer"):
        lff.load_tokenizer(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b"\xff")
    with pytest.raises(lff.FormatError, match="UTF-8"):
        lff.load_tokenizer(tmp_path / "latin.json")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(lff.FormatError, match="no regular file"):
            lff.load_tokenizer(path)
