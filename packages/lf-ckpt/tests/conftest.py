"""Shared set-up: one thread in torch (the machine is shared) and the helper modules of this folder importable."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

from ckpt_ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Five processes for tests with Gloo."""
    pool = Ranks(5)
    yield pool
    pool.close()
