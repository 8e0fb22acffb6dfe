"""Lets the tests of this folder import the modules beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)
