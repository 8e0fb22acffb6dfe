"""Shared set-up: one thread in torch (the machine is shared), Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined
    if importlib.util.find_spec("triton"):
        from fast_interpreter import patch_once_a_launch

        patch_once_a_launch()


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """Benchmarks multiply float32 in TF32 on a GPU; the tests behind theirs must not."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` need a CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
