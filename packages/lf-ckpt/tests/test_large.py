"""Case A10, its last line: a tensor of more than 4 GiB. LF_CKPT_LARGE=1 runs it: seconds of hashing, little memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

import lf_ckpt
from lf_ckpt import cli

GIB = 1 << 30


@pytest.mark.skipif(os.environ.get("LF_CKPT_LARGE") != "1", reason="takes long; set LF_CKPT_LARGE=1")
@pytest.mark.timeout(600)
def test_a_sparse_file_of_more_than_4_gib_round_trips(tmp_path: Path) -> None:
    size = 4 * GIB + 12_345
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(size)
    big = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.uint8)
    big[-1], big[4 * GIB] = 7, 5
    with lf_ckpt.open(tmp_path / "store", slab_bytes=64 << 20) as store:
        report = store.save(1, {"big": big, "small": torch.ones(3)}).wait()
        assert report.bytes_written < GIB // 2
        assert store.save(2, {"big": big, "small": torch.zeros(3)}).wait().bytes_written < 64 << 20

    assert cli.main(["verify", str(tmp_path / "store"), "--deep"]) == 0
    with (tmp_path / "target").open("wb") as file:
        file.truncate(size)
    into = torch.from_file(str(tmp_path / "target"), shared=True, size=size, dtype=torch.uint8)
    with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
        store.load(2, into={"big": into}, strict=False)
    assert (int(into[-1]), int(into[4 * GIB]), int(into[0])) == (7, 5, 0)
    assert int(into[4 * GIB :].sum()) == 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 16 * GIB
