"""Steps of several data files: shards of a tensor in the files of several ranks, deltas on them, and mixed-up files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt_states import assert_same, bits
from test_format import read_by_the_spec

import lf_ckpt
from lf_ckpt import cli
from lf_ckpt.boxes import Box
from lf_ckpt.catalog import Catalog
from lf_ckpt.dtypes import ITEM_SIZE, name_of
from lf_ckpt.files import FileLayer
from lf_ckpt.format import EXTENT_BYTES, Header, align
from lf_ckpt.loading import verified_base
from lf_ckpt.manifest import BlobEntry, DataFile, Manifest, Parent, Placed, Shard, TensorEntry
from lf_ckpt.plan import Stream, chunks
from lf_ckpt.reader import StepReader
from lf_ckpt.sink import Sink
from lf_ckpt.writer import Base, DataFileWriter

Cut = dict[str, list[tuple[int, Box]]]
"""Name of a tensor -> its shards as (rank, box)."""


def write_step(
    path: Path, step: int, tensors: dict[str, torch.Tensor], cut: Cut, ranks: int, base: str | None = None
) -> None:
    """A step as `ranks` ranks write it; a bytes item goes to the last one."""
    catalog = Catalog(FileLayer(), str(path))
    catalog.create()
    catalog.identify()
    folder = catalog.new_folder(step)
    bases = _bases(catalog, base, ranks)
    files, placed = [], []
    store_id = bytes.fromhex(catalog.store_id)
    for rank in range(ranks):
        own = [(name, box) for name, cuts in cut.items() for r, box in cuts if r == rank]
        streams = [_stream(name, tensors[name], box) for name, box in own]
        streams += [Stream("blob", "U8", (), 5, b"bytes")] if rank == ranks - 1 else []
        header = Header(step, rank, ranks, store_id, b"w" * 16)
        file, runs = _write_file(catalog, folder, header, streams, bases[rank])
        files.append(file)
        placed.append(iter(runs))
    entries = tuple(
        TensorEntry(
            name, name_of(tensors[name].dtype), tuple(tensors[name].shape),
            tuple(Shard(box, next(placed[rank])) for rank, box in cuts),
        )
        for name, cuts in cut.items()
    )  # fmt: skip
    parent = Parent(bases[0].folder, bases[0].root) if bases[0] else None
    blob = BlobEntry("blob", 5, next(placed[-1]))
    catalog.commit(
        Manifest(catalog.store_id, step, folder, 0, parent, tuple(files), entries, {}, (blob,), {}, {})
    )


def _bases(catalog: Catalog, folder: str | None, ranks: int) -> list[Base | None]:
    if folder is None:
        return [None] * ranks
    with StepReader(catalog.files, catalog.steps, folder) as reader:
        return [verified_base(reader, catalog.store_id, rank) for rank in range(ranks)]


def _stream(name: str, tensor: torch.Tensor, box: Box) -> Stream:
    part = tensor[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))].contiguous()
    dtype = name_of(tensor.dtype)
    return Stream(name, dtype, box.shape, part.numel() * ITEM_SIZE[dtype], part)


def _write_file(
    catalog: Catalog, folder: str, header: Header, streams: list[Stream], base: Base | None
) -> tuple[DataFile, list[Placed]]:
    fd = catalog.files.create(f"{catalog.steps}/{folder}/rank-{header.rank}.lfckpt")
    sink = Sink(catalog.files, [fd])
    writer = DataFileWriter(sink, header, streams, base, "auto")
    writer.start()
    for chunk in chunks([s.nbytes for s in streams], 4 * EXTENT_BYTES):
        source = streams[chunk.stream].source
        data = source if isinstance(source, bytes) else bits(source)
        room = np.zeros(align(chunk.length), np.uint8)
        room[: chunk.length] = np.frombuffer(data, np.uint8)[chunk.start : chunk.start + chunk.length]
        writer.add(chunk, room, lambda: None)
    file = writer.finish()
    sink.close()
    return file, writer.placed(header.rank)


TENSORS = {
    "rows": torch.arange(700 * 1000, dtype=torch.float32).view(700, 1000),  # more than an extent
    "columns": torch.arange(60.0).view(6, 10).bfloat16(),
    "whole": torch.arange(5),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
}
CUT: Cut = {
    "rows": [(0, Box((0, 0), (300, 1000))), (1, Box((300, 0), (400, 1000)))],  # none on rank 2
    "columns": [(2, Box((0, 0), (6, 3))), (0, Box((0, 3), (2, 7))), (1, Box((2, 3), (4, 7)))],
    "whole": [(1, Box((0,), (5,)))],
    "scalar": [(2, Box((), ()))],
    "empty": [(0, Box((0, 0), (0, 3)))],
}


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    write_step(tmp_path / "store", 1, TENSORS, CUT, 3)
    return tmp_path / "store"


def test_shards_of_three_files_load_as_whole_tensors(store_path: Path) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    into["columns"] = torch.zeros(10, 6, dtype=torch.bfloat16).T
    with lf_ckpt.open(store_path) as store:
        loaded = store.load()
        assert_same(loaded.tensors, TENSORS)
        assert loaded.items == {"blob": b"bytes"}
        store.load(into=into)

    assert_same(into, TENSORS)
    assert read_by_the_spec(store_path, "1") == {name: bits(t) for name, t in TENSORS.items()}


def test_a_delta_of_three_files_refers_to_the_files_of_the_same_names(store_path: Path) -> None:
    changed = {**TENSORS, "rows": TENSORS["rows"].clone()}
    changed["rows"][650] = -1
    write_step(store_path, 2, changed, CUT, 3, base="1")

    with lf_ckpt.open(store_path, read_only=True) as store:
        assert_same(store.load(2).tensors, changed)
        assert store.load(2).report.kind == "delta"
    assert read_by_the_spec(store_path, "2") == {name: bits(t) for name, t in changed.items()}
    assert (store_path / "steps/2/rank-0.lfckpt").stat().st_size < 20_000


def test_one_process_saves_a_delta_on_a_step_of_three_files(store_path: Path) -> None:
    with lf_ckpt.open(store_path) as store:
        loaded = store.load()
        report = store.save(2, loaded.tensors).wait()
        assert report.kind == "delta"
        assert_same(store.load(2).tensors, TENSORS)


def test_verify_and_show_read_every_file(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(store_path)]) == 0
    assert "columns  BF16[6, 10] in 3 shards" in capsys.readouterr().out
    for rank in range(3):
        path = store_path / f"steps/1/rank-{rank}.lfckpt"
        data = path.read_bytes()
        path.write_bytes(data[:4100] + bytes([data[4100] ^ 1]) + data[4101:])
        assert cli.main(["verify", str(store_path), "--deep"]) == 1
        assert f"rank-{rank}" in capsys.readouterr().out
        path.write_bytes(data)
    assert cli.main(["verify", str(store_path), "--deep"]) == 0


def test_files_that_changed_places_are_refused(store_path: Path) -> None:
    step = store_path / "steps/1"
    shutil.copy(step / "rank-0.lfckpt", step / "rank-1.lfckpt")

    with lf_ckpt.open(store_path, read_only=True) as store, pytest.raises(lf_ckpt.CorruptError):
        store.load(1)


def test_a_file_of_another_number_of_ranks_is_refused(store_path: Path, tmp_path: Path) -> None:
    """Same rank, tensors and store, but written as one of four: only the header tells."""
    four = {**CUT, "extra": [(3, Box((0,), (5,)))]}
    shutil.copy(store_path / "FORMAT", tmp_path / "FORMAT")
    write_step(tmp_path, 1, {**TENSORS, "extra": torch.zeros(5)}, four, 4)
    shutil.copy(tmp_path / "steps/1/rank-0.lfckpt", store_path / "steps/1/rank-0.lfckpt")

    with (
        lf_ckpt.open(store_path, read_only=True) as store,
        pytest.raises(lf_ckpt.CorruptError, match="rank 0 of 4"),
    ):
        store.load(1)


def test_a_missing_file_of_one_rank_is_damage(store_path: Path) -> None:
    (store_path / "steps/1/rank-2.lfckpt").unlink()

    with lf_ckpt.open(store_path, read_only=True) as store:
        assert store.steps() == ()
        with pytest.raises(lf_ckpt.CorruptError, match="rank-2"):
            store.load(1)
