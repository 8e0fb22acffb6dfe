"""The tuner over Triton kernels on a CPU, in Triton's interpreter; no time is real there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import tune_sum as made
from tune_sum import LAZY, RIGHT

from lf_graph.kernels import _swiglu_triton as swiglu
from lf_graph.kernels._tunable import CHOSEN, Config, Key, config_of
from lf_graph.tune import Timing, _state
from lf_graph.tune._search import Effort, search
from lf_graph.tune._verify import fault

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU there")
CPU = torch.device("cpu")
SMALL: Key = ("float32", 1000)
WIDER = made.config(0, block=256)


class LastIsFastest:
    """Each call that is timed for the first time is faster than all before."""

    def __init__(self) -> None:
        self.asked = 0

    def time(
        self, copies: Sequence[Callable[[], object]], windows: int, give_up_us: float = math.inf
    ) -> Timing:
        copies[0]()
        self.asked += 1
        return Timing(1000.0 - self.asked, 0.0, 20)


def test_a_kernel_that_writes_nothing_is_wrong_and_another_block_size_is_not() -> None:
    problem = made.problem(SMALL, CPU)

    assert fault(problem, RIGHT, CPU, runs=3) == ""
    assert fault(problem, WIDER, CPU, runs=3) == ""
    assert fault(problem, LAZY, CPU, runs=3).startswith("wrong: output 0")


def test_a_kernel_of_the_package_is_searched_and_then_launched_as_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state, "_STATE", [])
    now = _state.use(tmp_path, CPU)
    tunable = made.tunable("tests.interpreted", WIDER, LAZY)

    entry = search(tunable, SMALL, CPU, Effort(LastIsFastest()))
    now.keep(entry)

    assert entry.complete
    assert [t.config for t in entry.rejected] == [LAZY]
    assert config_of(tunable, SMALL) == entry.config in (RIGHT, WIDER)
    CHOSEN.clear()


def test_swiglu_runs_with_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lf_graph.kernels import swiglu as operator
    from lf_graph.tune import Entry
    from lf_graph.tune._source import source_hash

    monkeypatch.setattr(_state, "_STATE", [])
    now = _state.use(tmp_path, CPU)
    gate, up = torch.randn(3, 48), torch.randn(3, 48)
    key, chosen = ("float32", False, 64), Config((("BLOCK", 512),), 4)
    now.keep(Entry("swiglu", key, source_hash(swiglu.TUNABLE), chosen, 1.0, 2.0, True))

    out = operator(gate, up, implementation="triton")

    assert now.origins["swiglu", key] == ("tuned", chosen)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
    CHOSEN.clear()
