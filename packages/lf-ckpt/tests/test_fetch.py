"""Reads past the page cache give the same bytes and the same checks, and say why they were, or were not, made."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_states import assert_same, copy_of

import lf_ckpt
import lf_ckpt.fetch
from lf_ckpt.fetch import RUN_BYTES, DirectFile, Fetch, Run, aligned, empty, land, runs, settle
from lf_ckpt.reader import StepReader

MIB = 1 << 20


class Files(lf_ckpt.FileLayer):
    """A file system whose direct reads want memory aligned to `want`, or are refused."""

    def __init__(self, want: int = 1, *, opens: bool = True, cached: bool = False) -> None:
        super().__init__()
        self.want, self.opens, self.in_cache = want, opens, cached
        self.direct: dict[int, list[int]] = {}

    def open_direct_read(self, path: str) -> int | None:
        if not self.opens:
            return None
        fd = os.open(path, os.O_RDONLY)
        self.direct[fd] = []
        return fd

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if fd in self.direct:
            address = np.frombuffer(view, np.uint8).ctypes.data
            if address % self.want or len(view) % 4096 or offset % 4096:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.direct[fd].append(len(view))
        return super().read(fd, view, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.direct.pop(fd, None)

    def cached(self, fd: int, offset: int) -> bool:
        return self.in_cache


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "long": torch.randint(0, 255, (9 * MIB + 4096 + 77,), dtype=torch.uint8),
        "planes": torch.randn(700_000) * 0.02,
        "small": torch.arange(100),
        "row": torch.randn(1000, 333)[::2],
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with lf_ckpt.open(tmp_path) as writer:
        writer.save(1, state()).wait()
        changed = state()
        changed["long"][5 * MIB] ^= 1
        writer.save(2, changed).wait()
    return tmp_path


@pytest.mark.parametrize("want", [1, 64, 512, 4096, 1 << 40], ids=lambda w: f"memory aligned to {w}")
@pytest.mark.parametrize("precheck", [True, False])
def test_direct_reads_fill_memory_of_any_alignment(store: Path, want: int, precheck: bool) -> None:
    wanted = state()
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    room = torch.zeros(9 * MIB + 4096 + 77 + 3, dtype=torch.uint8)
    into["long"] = room[3:]
    with lf_ckpt.open(store, read_only=True, files=Files(want)) as reader:
        fresh = reader.load(1, io="direct")
        placed = reader.load(1, into=into, io="direct", precheck=precheck)

    assert_same(fresh.tensors, wanted)
    assert_same(into, wanted)
    for loaded in (fresh, placed):
        assert loaded.report.io.startswith("direct")
        assert ("in part buffered" in loaded.report.io) == (want > 4096)
    assert not room[:3].any()


def test_direct_reads_work_on_the_file_system_of_the_tests(store: Path) -> None:
    with lf_ckpt.open(store, read_only=True) as reader:
        for step in (1, 2):
            try:
                loaded = reader.load(step, io="direct")
            except lf_ckpt.CkptError as error:
                pytest.skip(str(error))
            assert_same(loaded.tensors, reader.load(step, io="buffered").tensors)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (Files(), "direct, the files are not in the page cache"),
        (Files(cached=True), "are in the page cache"),
        (Files(opens=False), "the file system refuses O_DIRECT"),
    ],
)
def test_auto_chooses_and_says_why(store: Path, files: Files, says: str) -> None:
    with lf_ckpt.open(store, read_only=True, files=files) as reader:
        loaded = reader.load(2)
    assert says in loaded.report.io
    assert not files.direct  # every descriptor was closed


class SecondFails(Files):
    """A step and its base on two file systems, in effect: the second file cannot be opened past the page cache."""

    def __init__(self, code: int = 0) -> None:
        super().__init__()
        self.code = code

    def open_direct_read(self, path: str) -> int | None:
        if not self.direct:
            return super().open_direct_read(path)
        if self.code:
            raise OSError(self.code, os.strerror(self.code), path)
        return None


def test_when_one_file_of_a_step_refuses_all_are_read_buffered(store: Path) -> None:
    files = SecondFails()
    with lf_ckpt.open(store, read_only=True, files=files) as reader:
        loaded = reader.load(2)
        assert loaded.report.io == "buffered, the file system refuses O_DIRECT"
        with pytest.raises(lf_ckpt.CkptError, match="io='direct' cannot be had"):
            reader.load(2, io="direct")
    assert not files.direct


def test_a_failed_open_leaves_no_descriptor(store: Path) -> None:
    files = SecondFails(errno.EMFILE)
    with (
        lf_ckpt.open(store, read_only=True, files=files) as reader,
        pytest.raises(OSError, match="open files"),
    ):
        reader.load(2)
    assert not files.direct


def test_direct_reads_that_are_refused_are_an_error_with_the_reason(store: Path) -> None:
    with lf_ckpt.open(store, read_only=True, files=Files(opens=False)) as reader:
        with pytest.raises(lf_ckpt.CkptError, match=r"io='direct' cannot be had.*O_DIRECT.*io='auto'"):
            reader.load(1, io="direct")
        with pytest.raises(ValueError, match="choose auto or direct or buffered"):
            reader.load(1, io="fast")  # type: ignore[arg-type]
    with (
        lf_ckpt.open(store, read_only=True, mode="shared") as reader,
        pytest.raises(lf_ckpt.CkptError, match="mode='shared', as asked"),
    ):
        reader.load(1, io="direct")


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("precheck", [True, False])
def test_every_flipped_extent_is_found_and_the_step_before_takes_its_place(
    store: Path, io: Any, precheck: bool
) -> None:
    path = store / "steps/2/rank-0.lfckpt"
    data = bytearray(path.read_bytes())
    data[4096 + 5] ^= 4  # in the first extent that is stored, however short its delta is
    path.write_bytes(data)
    into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    untouched = copy_of(into)
    with lf_ckpt.open(store, read_only=True, files=Files(512)) as reader:
        with pytest.raises(lf_ckpt.CorruptError, match=r"(stored|decoded) bytes differ"):
            reader.load(2, into=into, io=io, precheck=precheck)
        if precheck:
            assert_same(into, untouched)
        loaded = reader.load(into=into, io=io, precheck=precheck)

    assert loaded.step == 1
    assert_same(into, state())


def test_one_pass_needs_strict(store: Path) -> None:
    with lf_ckpt.open(store, read_only=True) as reader, pytest.raises(ValueError, match="strict=True"):
        reader.load(1, into={}, strict=False, precheck=False)


def test_a_cut_file_is_named_with_the_first_extent_that_is_missing(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, {"x": state()["long"]}).wait()
    with StepReader(lf_ckpt.FileLayer(), str(tmp_path / "steps"), "1") as reader:
        (tmp_path / "steps/1/rank-0.lfckpt").open("r+b").truncate(4096 + 2 * MIB + 5)
        (shard,) = reader.manifest.tensors[0].shards
        first = next(runs(reader, reader.extents_of(shard.placed)))
        assert isinstance(first, Run)
        out = aligned(first.nbytes)
        landed = land(first, out)
        with pytest.raises(lf_ckpt.CorruptError, match="cut") as caught:
            settle(first, landed, out, "x", verify=True)
    assert caught.value.extent == 2


def test_only_the_tail_of_a_tensor_in_reach_of_the_device_is_copied(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, {"x": state()["long"]}).wait()
    files = Files(512)
    with StepReader(files, str(tmp_path / "steps"), "1") as reader, closing(Fetch(reader, "direct")):
        (shard,) = reader.manifest.tensors[0].shards
        *_, last = runs(reader, reader.extents_of(shard.placed))
        assert isinstance(last, Run)
        assert last.nbytes % 4096 == 77
        room = aligned(last.nbytes + 64)
        land(last, room[64 : 64 + last.nbytes])  # here the device's wish is learned
        with_copy, without = (land(last, room[at : at + last.nbytes]) for at in (64, 0))
        assert (with_copy.lent is None, without.lent is None) == (False, True)
        assert with_copy.memory[: last.nbytes].tobytes() == without.memory.tobytes()
        with_copy.give_back()


def test_runs_join_what_lies_side_by_side_and_lose_nothing(store: Path) -> None:
    for step in ("1", "2"):
        with StepReader(lf_ckpt.FileLayer(), str(store / "steps"), step) as reader:
            for entry in reader.manifest.tensors:
                extents = list(reader.extents_of(entry.shards[0].placed))
                at = 0
                for part in runs(reader, extents):
                    count = part.extents if isinstance(part, Run) else 1
                    if isinstance(part, Run):
                        assert part.start == extents[at][2].start
                        assert part.nbytes == sum(e.raw_bytes for _, _, e in extents[at : at + count])
                        assert part.nbytes <= RUN_BYTES
                    else:
                        assert part == extents[at]
                    at += count
                assert at == len(extents)


def test_fresh_tensors_begin_at_a_page() -> None:
    for shape, dtype in (((MIB,), torch.float32), ((3, MIB // 2 + 1), torch.bfloat16), ((0, 5), torch.int8)):
        tensor = empty(shape, dtype)
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        if tensor.nbytes >= MIB:
            assert tensor.data_ptr() % 4096 == 0


def test_a_device_that_refuses_all_memory_is_read_through_the_cache(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(4 * 4096))
    files = Files(1 << 40)
    fd, fallback = files.open_direct_read(str(tmp_path / "f")), files.open(str(tmp_path / "f"))
    assert fd is not None
    direct = DirectFile(files, fd, fallback)
    out = np.zeros(2 * 4096 + 10, np.uint8)

    assert direct.read(out, 4096) == out.size
    assert direct.refused
    assert out.tobytes() == (tmp_path / "f").read_bytes()[4096:][: out.size]
    direct.close()
    files.close(fallback)
