"""What a schedule holds, followed by hand and through Inductor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch._inductor.config
from bench_modules import loaded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

bench = pytest.fixture(scope="module")(loaded)


@pytest.fixture(scope="module")
def tool(bench: Any) -> Any:
    return importlib.import_module("planned_memory")


def test_the_most_alive_is_counted_while_results_and_what_ends_are_both_there(tool: Any) -> None:
    made, ended = [[4], [4], [2]], [[], [4], [4]]
    assert tool.highest(10, made, ended, [False] * 3) == 18
    assert tool.highest(10, [[4]], [[10]], [False]) == 14


def test_only_kernels_that_may_write_over_their_input_need_no_room_for_a_result_of_its_size(
    tool: Any,
) -> None:
    assert tool.highest(8, [[8]], [[8]], [True]) == 8
    assert tool.highest(8, [[8]], [[8]], [False]) == 16
    assert tool.highest(8, [[8, 8, 3]], [[8]], [True]) == 19  # one of them


def test_a_line_through_two_depths_gives_the_third(tool: Any) -> None:
    assert tool.at_depth([4, 8], [50, 90], 28) == 290
    assert tool.at_depth([4, 8], [70, 70], 28) == 70


def test_a_backward_begins_with_what_the_forward_kept_and_ends_with_the_gradients(tool: Any) -> None:
    rows, width = 256, 32
    # the patterns that Inductor looks for take seconds to be made, and there is none here
    with torch._inductor.config.patch(pattern_matcher=False), FakeTensorMode():
        x, w = torch.empty(rows, width), torch.empty(width, width, requires_grad=True)

        def loss() -> Tensor:
            return (F.silu(x @ w) * 2).sum()

        plan = tool.planned(loss, [w])
    product = rows * width * 4
    assert plan.kept == {("aten.mm.default", "torch.float32", (rows, width)): (1, product)}
    assert plan.forward.peak == product + 4
    assert plan.backward.start == product
    assert (
        plan.backward.peak == product + width * width * 4
    )  # the product's gradient is written over the product
    assert plan.backward.moved >= 3 * product


def test_more_bytes_are_told_against_the_first_row_of_the_same_loss(tool: Any) -> None:
    one = {"kept_of_a_layer": 2**20, "peak": 2**30, "moved": 2**32}
    rows = [
        {**one, "loss": "a", "recompute": "default"},
        {**one, "loss": "a", "recompute": "cheap", "moved": 2**33},
        {**one, "loss": "b", "recompute": "cheap"},
    ]
    lines = tool.table(rows).splitlines()
    assert lines[3] == "| a | cheap | 1 | 1.0 | 8 | +4.0 | +1.1 |"
    assert lines[4].endswith("| +0.0 | +0.0 |")
