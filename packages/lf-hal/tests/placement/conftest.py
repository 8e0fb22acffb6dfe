"""Lets the tests of this folder import the modules beside them and the models of ``tests/lir``; settles hypothesis."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "lir")]
settings.register_profile("placement", deadline=None, derandomize=True, database=None)
settings.load_profile("placement")


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)
