"""On a GPU: updates within a captured backward, and what compiled code computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import train_cases as cases
from train_cases import Twins, batches, model_of

from lf_graph import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_updates_within_the_backward_give_the_bits_of_those_behind_it(autocast: torch.dtype | None) -> None:
    kept, early = model_of(device="cuda"), model_of(device="cuda")
    a, b = cases.adamw(kept), cases.adamw(early)
    with (
        TrainStep(kept, a, gate=False, autocast=autocast) as one,
        TrainStep(early, b, autocast=autocast, release="fused", max_graphs=2) as other,
    ):
        for batch in batches(6, device="cuda"):
            assert torch.equal(one(*batch).loss, other(*batch).loss)
        assert cases.equal(cases.snapshot(kept, a), cases.snapshot(early, b))
        for batch in batches(2, length=9, device="cuda"):  # a graph of its own, with addresses of its own
            other(*batch)
            cases.eager_update(kept, a, [batch], autocast=autocast)
        assert other.captures == 2
        assert cases.largest_difference(kept, early) <= (2e-2 if autocast else 1e-5)


@pytest.mark.parametrize("mode", ["blocks", "model"])
@pytest.mark.parametrize("recompute", ["cheap", 0.5])
def test_compiled_code_that_computes_again_trains_as_the_ordinary_loop(mode: Any, recompute: Any) -> None:
    pytest.importorskip("triton")
    twins = Twins(device="cuda", compile=mode, recompute=recompute, release="fused")
    with twins.step as step:
        twins.run(batches(10, device="cuda"))
        assert twins.difference() <= 1e-3
        assert step.info()["compile"] == f"compile={mode!r}, recompute={recompute!r}"
