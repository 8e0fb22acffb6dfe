"""From documents to train and eval files: every token appears exactly once, in order within its document."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff


def documents_of(*paths: Path) -> list[bytes]:
    """Documents put together again from the records of byte files, sorted."""
    texts = []
    for path in paths:
        with lff.Reader(path) as reader:
            # Pieces of a document may lie in two buckets: full ones in the last, its end in another.
            records = [reader.record(i) for i in range(len(reader))]
        starts = [r for r in records if r.flags & 1]
        middles = [r for r in records if not r.flags & 1]
        texts += [r.tokens.tobytes() for r in starts] + [r.tokens.tobytes() for r in middles]
    return sorted(texts)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(max_size=100), min_size=1, max_size=15),
    max_len=st.integers(1, 40),
    fraction=st.sampled_from([0.0, 0.1, 0.5]),
    codec=st.sampled_from(["raw", "zstd", "auto"]),
)
def test_every_token_is_stored_once_in_pieces_with_flags(
    folder: Path, texts: list[str], max_len: int, fraction: float, codec: str
) -> None:
    raw = [t.encode() for t in texts if t]
    documents = [(str(i), t) for i, t in enumerate(texts)]
    options: dict[str, Any] = {"max_len": max_len, "eval_fraction": fraction, "codec": codec}
    if not raw or (len(raw) == 1 and len(raw[0]) == 1 and fraction):
        with pytest.raises(lff.InputError):
            lff.preprocess_documents(documents, folder, **options)
        return
    report = lff.preprocess_documents(documents, folder, **options)
    paths = [Path(r.path) for r in (report.train, report.eval) if r is not None]
    if len(raw) == 1 and fraction:  # the tail of the only document is held out: two documents
        cut = report.train.tokens
        raw = [raw[0][:cut], raw[0][cut:]]
    expected = sorted(d[at : at + max_len] for d in raw for at in range(0, len(d), max_len))
    assert documents_of(*paths) == expected
    assert (report.tokens, report.records) == (sum(map(len, raw)), len(expected))
    assert len(report.empty) == texts.count("")
    starts = sum(int((lff.Reader(p).flags & 1).sum()) for p in paths)
    ends = sum(int((lff.Reader(p).flags >> 1).sum()) for p in paths)
    assert starts == ends == len(raw)


def test_text_jsonl_and_directories_are_read_in_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "b.txt").write_text("bee")
    (data / "a.md").write_bytes("ä\r\n".encode())
    (data / "sub" / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "", "n": 1}\n{"text": "two"}')
    (data / ".hidden").write_text("no")
    report = lff.preprocess(data, tmp_path / "out", max_len=16)
    with lff.Reader(report.train.path) as reader:
        texts = [lff.ByteTokenizer().decode(reader.record(i).tokens) for i in range(len(reader))]
    assert texts == ["ä\r\n", "bee", "one", "two"]
    assert report.empty == ((f"{data}/sub/c.jsonl:3", "no tokens"),)
    assert (report.documents, report.eval, report.split_documents) == (4, None, 0)


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("a.txt", b"ok \xff", ["a.txt", "byte 3"]),
        ("a.jsonl", b'{"text": "ok"}\n{"txt": 1}\n', ["a.jsonl:2", "txt"]),
        ("a.jsonl", b'{"text": 5}', ["a.jsonl:1"]),
        ("a.jsonl", b"[1]", ["a.jsonl:1", "list"]),
        ("a.jsonl", b"{oops", ["a.jsonl:1", "JSON"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl:1"]),
        ("a.jsonl", b'{"text": "ok"}\n\xff', ["a.jsonl:2", "byte 15"]),
        ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1", "position 0"]),
        ("a.txt", b"", ["no document"]),
    ],
)
def test_a_bad_document_is_named_and_nothing_is_written(
    tmp_path: Path, name: str, content: bytes, names: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    with pytest.raises(lff.InputError) as caught:
        lff.preprocess(tmp_path / name, out)
    assert all(part in str(caught.value) for part in names), str(caught.value)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("place", ["worker", "reader"])
def test_a_bad_document_among_workers_is_named_and_no_process_is_left(tmp_path: Path, place: str) -> None:
    bad = {"worker": '{"text": "\\ud800"}', "reader": "{oops"}[place]
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' * 300 + bad)
    with pytest.raises(lff.InputError, match=r"a\.jsonl:301"):
        lff.preprocess(tmp_path / "a.jsonl", tmp_path / "out", num_workers=2)
    assert list((tmp_path / "out").iterdir()) == []
    assert multiprocessing.active_children() == []


def test_missing_or_no_input_is_an_error(tmp_path: Path) -> None:
    for inputs in (tmp_path / "absent", [], tmp_path):
        with pytest.raises(lff.InputError):
            lff.preprocess(inputs, tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        {"eval_fraction": 1.0},
        {"eval_fraction": -0.1},
        {"eval_fraction": float("nan")},
        {"num_workers": 0},
        {"codec": "bitpack"},
        {"too_long": "cut"},
        {"empty": "drop"},
        {"max_len": 8, "min_len": 9},
        {"buckets": (8,), "max_len": 8},
        {"tokenizer": "absent.json"},
        {"vocab_size": 300},
    ],
    ids=repr,
)
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(lff.FormatError):
        lff.preprocess(tmp_path / "a.txt", tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/*"))


def test_held_out_documents_are_whole_and_enough(tmp_path: Path) -> None:
    documents = [(str(i), f"document {i} " * (i % 7 + 1)) for i in range(60)]
    report = lff.preprocess_documents(documents, tmp_path, max_len=512, eval_fraction=0.25)
    assert report.eval is not None
    assert report.eval.tokens >= 0.25 * report.tokens
    assert report.eval.tokens <= 0.5 * report.tokens
    train, held = documents_of(Path(report.train.path)), documents_of(Path(report.eval.path))
    assert sorted(train + held) == sorted(text.encode() for _, text in documents)
    assert (report.documents, report.eval_documents) == (60, len(held))


def test_of_a_single_document_the_tail_is_held_out_and_reported(tmp_path: Path) -> None:
    text = "".join(map(str, range(1000)))
    report = lff.preprocess_documents([("one", text)], tmp_path, max_len=64, eval_fraction=0.1)
    assert report.eval is not None
    assert report.eval.tokens == -(-len(text) // 10)
    assert "last 289 of 2890 tokens are held out" in report.notes[0]
    with lff.Reader(report.eval.path) as reader:
        tail = b"".join(reader.record(i).tokens.tobytes() for i in range(len(reader)))
    assert tail == text.encode()[-289:]


@pytest.mark.parametrize(
    ("options", "text", "found"),
    [({"too_long": "raise"}, "x" * 17, 17), ({"empty": "raise"}, "", 0)],
    ids=repr,
)
def test_documents_that_a_policy_refuses_are_named(
    tmp_path: Path, options: dict[str, Any], text: str, found: int
) -> None:
    documents = [("fits", "x" * 16), ("bad", text)]
    with pytest.raises(lff.InputError, match="document bad") as caught:
        lff.preprocess_documents(documents, tmp_path, max_len=16, **options)
    assert caught.value.found == found
    assert list(tmp_path.iterdir()) == []
    assert lff.preprocess_documents(documents[:1], tmp_path, max_len=16, **options).records == 1


def test_same_input_gives_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    documents = [(str(i), f"text {i} " * (i % 50)) for i in range(400)]
    files = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        lff.preprocess_documents(documents, out, max_len=64, eval_fraction=0.1, num_workers=workers)
        files.append([(out / f"{split}.loongbin").read_bytes() for split in ("train", "eval")])
    assert files[0] == files[1]


def test_a_new_run_replaces_both_outputs(tmp_path: Path) -> None:
    lff.preprocess_documents([("a", "aaa"), ("b", "bbb")], tmp_path, eval_fraction=0.5)
    lff.preprocess_documents([("c", "ccc")], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [
        "train.loongbin"
    ]  # no eval of other data is left beside it


def test_a_failed_run_keeps_the_earlier_outputs(tmp_path: Path) -> None:
    lff.preprocess_documents([("a", "aaa"), ("b", "bbb")], tmp_path, eval_fraction=0.5)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(lff.InputError):
        lff.preprocess_documents([("c", "ccc"), ("d", "\ud800")], tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_progress_counts_documents_tokens_and_bytes(tmp_path: Path) -> None:
    seen: list[lff.Advance] = []
    lff.preprocess_documents([("a", "aa"), ("b", ""), ("c", "ccc")], tmp_path, progress=seen.append)
    assert seen == [lff.Advance(1, 2, 0, 0), lff.Advance(2, 5, 0, 0)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("four")
    (tmp_path / "in/b.jsonl").write_text('{"text": "x"}\n{"text": "yy"}\n')
    seen.clear()
    lff.preprocess(tmp_path / "in", tmp_path / "out", progress=seen.append)
    assert [(a.documents, a.bytes_read, a.bytes_total) for a in seen] == [(1, 0, 33), (2, 4, 33), (3, 18, 33)]


# --- tokenized .npz ---


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def _rows(report: lff.PreprocessReport) -> list[list[int]]:
    with lff.Reader(report.train.path) as reader:
        return sorted(reader.record(i).tokens.tolist() for i in range(len(reader)))


RAGGED = np.array([np.array([1, 2, 3]), [4, 5], np.array([6], np.int32), np.array([], np.int64)], object)


@pytest.mark.parametrize(
    ("arrays", "rows"),
    [
        ({"input_ids": np.array([[1, 2], [3, 4]])}, [[1, 2], [3, 4]]),
        ({"input_ids": np.asfortranarray(np.array([[1, 2], [3, 4]]))}, [[1, 2], [3, 4]]),
        ({"input_ids": np.array([9, 8, 7], np.uint16)}, [[9, 8, 7]]),
        ({"input_ids": RAGGED}, [[1, 2, 3], [4, 5], [6]]),
        (
            {
                "input_ids": np.array([[1, 2, 0], [0, 3, 4], [0, 0, 0]]),
                "attention_mask": [[1, 1, 0], [0, 1, 1], [0] * 3],
            },
            [[1, 2], [3, 4]],
        ),
    ],
    ids=["2d", "fortran", "flat", "ragged", "padded"],
)
def test_npz_rows_are_documents(tmp_path: Path, arrays: dict[str, Any], rows: list[list[int]]) -> None:
    report = lff.preprocess(_npz(tmp_path / "a.npz", **arrays), tmp_path / "out", max_len=16)
    assert _rows(report) == rows
    assert report.vocab_size == max(map(max, rows)) + 1
    assert "largest id + 1" in report.notes[0]


def test_npz_loss_mask_follows_its_tokens(tmp_path: Path) -> None:
    path = _npz(
        tmp_path / "a.npz",
        input_ids=np.array([[5, 6, 7, 0]]),
        attention_mask=[[1, 1, 1, 0]],
        loss_mask=[[0, 1, 1, 0]],
    )
    report = lff.preprocess(path, tmp_path / "out", max_len=2, vocab_size=100)
    with lff.Reader(report.train.path) as reader:
        masks = [reader.record(i).loss_mask.tolist() for i in range(len(reader))]
    assert sorted(masks) == sorted([[False, True], [True]])
    assert (report.vocab_size, report.notes, report.tokenizer.name) == (100, (), "unknown")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": [[1]]}, "no input_ids"),
        ({"input_ids": [[1, 999]]}, r"\[0\], position 1"),
        ({"input_ids": [[1, -1]]}, r"\[0\], position 1"),
        ({"input_ids": [[1.0, 2.0]]}, "integers"),
        ({"input_ids": [[[1]]]}, "dimensions"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]}, "rows of attention_mask"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "hole"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1]]}, "loss_mask"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1, 5]]}, "loss mask"),
        ({"input_ids": np.array([[1, 2], "text"], object)}, "one-dimensional"),
        ({"input_ids": np.array([["a"], [1, 2]], object)}, "integers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_npz_faults_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = _npz(tmp_path / "a.npz", **arrays)
    with pytest.raises(lff.InputError, match=message):
        lff.preprocess(path, tmp_path / "out", vocab_size=100)
    assert not list(tmp_path.glob("out/*"))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize(
    "value", [_Bomb(), [_Bomb()], print, Path("x")], ids=["call", "nested", "builtin", "class"]
)
def test_a_pickle_with_anything_but_arrays_is_refused_and_not_run(
    tmp_path: Path, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.empty(1, object)
    rows[0] = value
    with pytest.raises(lff.InputError, match="only numpy arrays"):
        lff.preprocess(_npz(tmp_path / "a.npz", input_ids=rows), tmp_path / "out")
    assert not (tmp_path / "exploded").exists()


def test_damaged_npz_files_are_one_typed_error(tmp_path: Path) -> None:
    whole = _npz(tmp_path / "good.npz", input_ids=RAGGED, attention_mask=RAGGED).read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "bad.npz"
    for cut in random.integers(0, len(whole), 30).tolist():
        path.write_bytes(whole[:cut])
        with pytest.raises(lff.InputError):
            lff.preprocess(path, tmp_path / "out")
    for _ in range(150):
        raw = bytearray(whole)
        raw[int(random.integers(len(raw)))] ^= int(random.integers(1, 256))
        path.write_bytes(raw)
        try:
            lff.preprocess(path, tmp_path / "out")
        except lff.FormatError:
            continue


def test_an_npz_header_with_a_hostile_shape_does_not_allocate(tmp_path: Path) -> None:
    import zipfile

    good = _npz(tmp_path / "a.npz", input_ids=np.zeros((1, 8), np.int64))
    with zipfile.ZipFile(good) as archive:
        raw = archive.read("input_ids.npy")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("input_ids.npy", raw.replace(b"(1, 8), }      ", b"(1, 888888888),"))
    with pytest.raises(lff.InputError, match="input_ids"):
        lff.preprocess(tmp_path / "b.npz", tmp_path / "out")


def test_reports_serialise_to_json(tmp_path: Path) -> None:
    import dataclasses

    report = lff.preprocess_documents([("a", "text")], tmp_path)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["tokens"] == 4
