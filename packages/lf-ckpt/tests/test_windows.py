"""A rank reads its part of a tensor from whatever parts other ranks have written."""

from __future__ import annotations

import pytest
import torch
from ckpt_states import bits
from test_shards import Cut, write_step

from lf_ckpt.boxes import Box, whole
from lf_ckpt.files import FileLayer
from lf_ckpt.filling import Filler
from lf_ckpt.local import Window, window_of
from lf_ckpt.reader import StepReader
from lf_ckpt.windows import needed, part_of, scatter

ROWS = torch.arange(3000 * 400, dtype=torch.float32).view(3000, 400)  # 4.8 MB, 1 MiB is 655.36 rows
BOXES = [(0, Box((0, 0), (2000, 400))), (1, Box((2000, 0), (1000, 100))), (0, Box((2000, 100), (1000, 300)))]
CUT: Cut = {"rows": BOXES}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> StepReader:
    path = tmp_path_factory.mktemp("windows")
    write_step(path, 1, {"rows": ROWS}, CUT, 2)
    return StepReader(FileLayer(), str(path / "steps"), "1")


WINDOWS = [
    whole((3000, 400)),
    Box((0, 0), (1, 400)),
    Box((700, 0), (20, 400)),
    Box((1990, 90), (30, 20)),
    Box((0, 399), (3000, 1)),
    Box((2999, 99), (1, 2)),
    Box((655, 10), (1, 390)),
]


@pytest.mark.parametrize("box", WINDOWS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_window_gets_its_elements_and_no_others(reader: StepReader, box: Box, transposed: bool) -> None:
    shape = box.shape[::-1] if transposed else box.shape
    local = torch.full(shape, -1.0)
    window = Window(local.T if transposed else local, box)
    with Filler(reader, 2, verify=True) as filler:
        filler.fill_window(reader.manifest.tensors[0], window)

    assert bits(window.local) == bits(part_of(ROWS, box))


@pytest.mark.parametrize(
    ("box", "extents"),
    [(Box((0, 0), (600, 400)), [0]), (Box((700, 0), (1, 1)), [1]), (Box((2500, 0), (1, 100)), [0]),
     (Box((3000, 0), (0, 400)), []), (Box((655, 0), (1, 100)), [0]), (Box((655, 200), (1, 100)), [1])],
)  # fmt: skip
def test_only_extents_that_hold_wanted_elements_are_read(
    reader: StepReader, box: Box, extents: list[int]
) -> None:
    (entry,) = reader.manifest.tensors
    assert [number for part in needed(reader, entry, box) for _, number, _ in part.extents] == extents


def test_scattering_any_cut_of_a_shard_restores_it() -> None:
    tensor = torch.arange(4 * 5 * 6.0).view(4, 5, 6)
    shard = Box((1, 0, 2), (3, 5, 3))
    flat = part_of(tensor, shard).reshape(-1)
    for size in range(1, 20):
        out = torch.full((2, 4, 6), -1.0)
        for begin in range(0, flat.numel(), size):
            scatter(shard, Window(out, Box((2, 1, 0), (2, 4, 6))), flat[begin : begin + size], begin)
        wanted = torch.full((2, 4, 6), -1.0)
        wanted[:, :, 2:5] = tensor[2:4, 1:5, 2:5]
        assert torch.equal(out, wanted)


def test_a_plain_tensor_is_a_window_on_all_of_itself() -> None:
    tensor = torch.zeros(3, 4, requires_grad=True)
    window = window_of("x", tensor)
    assert window.box == Box((0, 0), (3, 4))
    assert not window.local.requires_grad
    assert window.local.data_ptr() == tensor.data_ptr()
