"""Peers' formats in: each written here byte by byte from its description, damaged, and read through preprocess."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import lf_format as lff
from lf_format import preprocess_cli
from lf_format._convert_megatron import megatron_documents
from lf_format._documents import file_documents, input_files

IDS = [[1, 2, 3], [4], [5, 6, 7, 8, 600]]
TEXTS = ["a", "bäh", "third one"]


def megatron(folder: Path) -> Path:
    """IDS as three documents, the last in two sequences."""
    rows = [IDS[0], IDS[1], IDS[2][:2], IDS[2][2:]]
    (folder / "set.bin").write_bytes(b"".join(np.array(r, "<u2").tobytes() for r in rows))
    lengths = [len(r) for r in rows]
    starts = [2 * sum(lengths[:k]) for k in range(4)]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 4)
    (folder / "set.idx").write_bytes(head + struct.pack("<4i4q4q", *lengths, *starts, 0, 1, 2, 4))
    return folder / "set.idx"


def mds(folder: Path, zipped: bool = False, encoding: str = "ndarray:uint16") -> Path:
    """Two columns: ids of `encoding`, and text."""
    folder = folder / "mds"
    folder.mkdir()
    samples = []
    for ids, text in zip(IDS, TEXTS, strict=True):
        values = bytes([1 << 2, len(ids)]) + np.array(ids, "<u2").tobytes()
        values = bytes([16]) * (encoding == "ndarray") + values
        words = text.encode()
        samples.append(struct.pack("<2I", len(values), len(words)) + values + words)
    description = b"{}"
    at = 4 * 5 + len(description)
    offsets = [at + sum(map(len, samples[:k])) for k in range(4)]
    raw = struct.pack("<5I", 3, *offsets) + description + b"".join(samples)
    name = "shard.00000.mds" + ".zstd" * zipped
    (folder / name).write_bytes(zstandard.compress(raw) if zipped else raw)
    data = {"basename": name, "bytes": len(raw), "hashes": {}}
    shard: dict[str, Any] = {"column_names": ["ids", "text"], "column_encodings": [encoding, "str"]}
    shard |= {"column_sizes": [None, None], "format": "mds", "samples": 3, "raw_data": data, "zip_data": None}
    shard |= {"compression": None, "version": 2}
    if zipped:
        shard |= {
            "compression": "zstd:3",
            "zip_data": data,
            "raw_data": data | {"basename": "shard.00000.mds"},
        }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def tar(folder: Path) -> Path:
    """Samples with ids (.ids.npy), text (.txt) for the first two and .json for the last, and a member to ignore."""
    with tarfile.open(folder / "set.tar", "w") as archive:
        for k, (ids, text) in enumerate(zip(IDS, TEXTS, strict=True)):
            array = io.BytesIO()
            np.save(array, np.array(ids, np.uint16))
            words = ("txt", text.encode()) if k < 2 else ("json", json.dumps({"text": text}).encode())
            for extension, content in (("ids.npy", array.getvalue()), words, ("jpg", b"\xff\xd8")):
                member = tarfile.TarInfo(f"a.folder/{k:04}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return folder / "set.tar"


def parquet(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"ids": IDS, "text": TEXTS}), folder / "set.parquet")
    return folder / "set.parquet"


def arrow(folder: Path) -> Path:
    """What datasets.save_to_disk leaves."""
    pytest.importorskip("pyarrow")
    import pyarrow as pa

    folder = folder / "hf"
    folder.mkdir()
    table = pa.table({"ids": pa.array(IDS, pa.list_(pa.int32())), "text": TEXTS})
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def zipped_mds(folder: Path) -> Path:
    return mds(folder, zipped=True)


def loose_mds(folder: Path) -> Path:
    return mds(folder, encoding="ndarray")


Maker = Callable[[Path], Path]
MAKERS: list[Maker] = [megatron, mds, zipped_mds, loose_mds, tar, parquet, arrow]


def ids_key(make: Maker) -> str | None:
    return None if make is megatron else "ids.npy" if make is tar else "ids"


def read(path: Path, ids_key: str | None) -> list[Any]:
    documents = file_documents(input_files(path), "text", ids_key)
    return [d.text if d.ids is None else d.ids.tolist() for d in documents]


@pytest.mark.parametrize("make", MAKERS)
def test_ids_of_every_format(make: Maker, tmp_path: Path) -> None:
    path = make(tmp_path)
    assert read(path, ids_key(make)) == IDS
    report = lff.preprocess(path, tmp_path / "out", ids_key=ids_key(make), vocab_size=1000, max_len=16)
    assert (report.documents, report.tokens, report.vocab_size) == (3, 9, 1000)
    with lff.Reader(tmp_path / "out" / "train.loongbin") as reader:
        assert sorted(reader.record(i).tokens.tolist() for i in range(3)) == IDS


@pytest.mark.parametrize("make", MAKERS[1:])
def test_text_of_every_format(make: Maker, tmp_path: Path) -> None:
    path = make(tmp_path)
    assert read(path, None) == TEXTS
    arguments = ["--input", str(path), "--output", f"{tmp_path}/out", "--max-len", "16"]
    assert preprocess_cli.main(arguments) == 0
    with lff.Reader(tmp_path / "out" / "train.loongbin") as reader:
        texts = [lff.load_tokenizer("bytes").decode(reader.record(i).tokens) for i in range(3)]
    assert sorted(texts) == sorted(TEXTS)


@pytest.mark.parametrize("make", MAKERS)
def test_damage_is_one_typed_error(make: Maker, tmp_path: Path) -> None:
    path = make(tmp_path)
    files = sorted(p for p in (path if path.is_dir() else tmp_path).iterdir() if p.is_file())
    dice, refused = random.Random(8), 0
    for _ in range(40 if make in (parquet, arrow) else 150):
        target = dice.choice(files)
        whole = target.read_bytes()
        raw = bytearray(whole)
        for _ in range(dice.choice([1, 1, 4])):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        target.write_bytes(raw[: dice.choice([len(raw), len(raw), dice.randrange(len(raw))])])
        for key in (ids_key(make), None):
            try:
                read(path, key)
            except lff.InputError:
                refused += 1
            except MemoryError:
                pytest.fail("an unbounded size")
        target.write_bytes(whole)
    assert refused  # some damage is inside of texts, where it is another text


def test_megatron_largest_id_decides_the_vocabulary(tmp_path: Path) -> None:
    report = lff.preprocess(megatron(tmp_path), tmp_path / "out", max_len=16)
    assert report.vocab_size == 601
    assert "largest id + 1" in report.notes[0]


def test_a_folder_with_megatron_files_is_read_once(tmp_path: Path) -> None:
    megatron(tmp_path)
    assert [f.name for f in input_files(tmp_path)] == ["set.idx"]


@pytest.mark.parametrize("field", ["length", "pointer", "boundary", "bin"])
def test_megatron_pointers_outside_the_bin_are_refused(tmp_path: Path, field: str) -> None:
    path = megatron(tmp_path)
    raw = bytearray(path.read_bytes())
    if field == "bin":
        (tmp_path / "set.bin").unlink()
    elif field == "length":
        struct.pack_into("<i", raw, 34, 2**31 - 1)
    else:
        struct.pack_into("<q", raw, 34 + (16 if field == "pointer" else 48 + 8), 2**62)
    path.write_bytes(raw)
    with pytest.raises(lff.InputError):
        list(megatron_documents(path))


@pytest.mark.parametrize("make", [mds, tar, parquet])
def test_ids_without_a_vocabulary_are_refused(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(lff.FormatError, match="vocab_size is needed"):
        lff.preprocess(make(tmp_path), tmp_path / "out", ids_key=ids_key(make))


@pytest.mark.parametrize("make", [mds, tar, parquet, arrow])
def test_a_column_that_is_not_there_is_named(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(lff.InputError, match="nothing"):
        read(make(tmp_path), "nothing")


def test_shard_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = mds(tmp_path)
    index = (folder / "index.json").read_text().replace("shard.00000.mds", "../shard.00000.mds")
    (folder / "index.json").write_text(index)
    with pytest.raises(lff.InputError, match="plain file name"):
        read(folder, "ids")


@pytest.mark.parametrize("encoding", ["pkl", "json", "jpeg", "ndarray:uint16:2,3"])
def test_mds_columns_that_are_not_text_or_ids_are_refused_unread(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(lff.InputError, match="column encoding") as caught:
        read(mds(tmp_path, encoding=encoding), "ids")
    assert caught.value.found == encoding


def test_an_mds_shard_under_another_compression_is_refused(tmp_path: Path) -> None:
    folder = mds(tmp_path, zipped=True)
    index = (folder / "index.json").read_text().replace("zstd:3", "gz")
    (folder / "index.json").write_text(index)
    with pytest.raises(lff.InputError, match="plain or zstd"):
        read(folder, "ids")


def test_mds_folders_below_other_folders_and_under_any_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "ünï" / "b").mkdir(parents=True)
    mds(tmp_path / "ünï", zipped=True)
    (tmp_path / "ünï" / "b" / "x.jsonl").write_text('{"text": "文字"}')
    assert read(tmp_path, None) == ["文字", *TEXTS]


def test_webdataset_members_may_be_npy_json_or_txt_and_pickles_are_refused(tmp_path: Path) -> None:
    def sample(name: str, content: bytes) -> None:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

    def array(value: Any) -> bytes:
        raw = io.BytesIO()
        np.save(raw, value, allow_pickle=True)
        return raw.getvalue()

    sample("s.npy", array(np.array([1, 2], np.int32)))
    assert read(tmp_path / "a.tar", "npy") == [[1, 2]]
    sample("s.json", json.dumps({"body": "ä"}).encode())
    assert [d.text for d in file_documents([tmp_path / "a.tar"], "body")] == ["ä"]
    sample("s.txt", "文字".encode())
    assert read(tmp_path / "a.tar", None) == ["文字"]
    sample("s.npy", array(np.array([{"a": 1}], object)))
    with pytest.raises(lff.InputError, match=r"not a \.npy array"):
        read(tmp_path / "a.tar", "npy")
    sample("s.pkl", b"\x80\x04.")
    with pytest.raises(lff.InputError, match="no text"):
        read(tmp_path / "a.tar", None)


def test_a_real_datasets_folder_of_several_shards_is_read_in_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"ids": [[i, i + 1] for i in range(50)], "text": [f"row {i} ü" for i in range(50)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "hf", num_shards=4)
    assert len(input_files(tmp_path / "hf")) == 4
    assert read(tmp_path / "hf", None) == rows["text"]
    assert read(tmp_path / "hf", "ids") == rows["ids"]
    chosen = datasets.Dataset.from_dict(rows).select([7, 3]).shuffle(seed=1)
    chosen.save_to_disk(tmp_path / "few")
    assert read(tmp_path / "few", "ids") == chosen["ids"][:]


def test_a_datasets_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "hf")
    with pytest.raises(lff.InputError, match="name one of them") as caught:
        input_files(tmp_path / "hf")
    assert caught.value.found == ["test", "train"]
    assert read(tmp_path / "hf" / "test", None) == ["a", "b"]


def test_a_link_to_a_folder_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "real")
    with pytest.raises(lff.InputError, match="name it as an input"):
        input_files(tmp_path / "in")


def test_what_is_no_regular_file_is_neither_opened_nor_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for given in (Path("/dev/zero"), tmp_path / "fifo.jsonl", tmp_path / "in" / "gone.txt"):
        if given.parent == tmp_path:
            os.mkfifo(given)
        elif given.name == "gone.txt":
            given.symlink_to(tmp_path / "absent")
            given = given.parent
        with pytest.raises(lff.InputError, match="no regular file"):
            input_files(given)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, None])
def test_a_webdataset_sample_with_a_second_or_linked_member_is_refused(
    tmp_path: Path, kind: bytes | None
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, size in (("a.txt", 2), ("a.txt" if kind is None else "b.txt", 3)):
            member = tarfile.TarInfo(name)
            if size == 3 and kind is not None:
                member.type, member.linkname = kind, "a.txt"
            else:
                member.size = size
            archive.addfile(member, io.BytesIO(b"x" * size))
    with pytest.raises(lff.InputError, match=r"two members|a link or device"):
        read(tmp_path / "a.tar", None)


def test_two_arrays_of_one_name_and_a_shape_below_zero_are_refused(tmp_path: Path) -> None:
    raw = io.BytesIO()
    np.save(raw, np.arange(4))
    for content, names in ((raw.getvalue(), ["input_ids.npy"] * 2), (_any_length(raw), ["input_ids.npy"])):
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            warnings.simplefilter("ignore")  # of equal names
            for name in names:
                archive.writestr(name, content)
        with pytest.raises(lff.InputError, match=r"two arrays|shape \(-1,\)"):
            read(tmp_path / "a.npz", None)


def _any_length(raw: io.BytesIO) -> bytes:
    return raw.getvalue().replace(b"(4,), ", b"(-1,),")


def test_an_mds_frame_larger_than_the_index_says_is_refused_unread(tmp_path: Path) -> None:
    folder = mds(tmp_path, zipped=True)
    shard = next(path for path in folder.iterdir() if path.name != "index.json")
    header = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little")
    shard.write_bytes(header + shard.read_bytes())
    with pytest.raises(lff.InputError, match="shard size") as caught:
        read(folder, "ids")
    assert caught.value.found == 1 << 50
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(lff.InputError, match="no regular file"):
        read(folder, "ids")


def test_a_megatron_sequence_that_begins_inside_an_id_is_refused(tmp_path: Path) -> None:
    index = megatron(tmp_path)
    index = index / "set.idx" if index.is_dir() else index
    raw = bytearray(index.read_bytes())
    raw[34 + 4 * 4 + 8] += 1  # pointers follow a head of 34 bytes and four lengths
    index.write_bytes(raw)
    with pytest.raises(lff.InputError, match="sequence 1 lies outside"):
        read(index, None)
