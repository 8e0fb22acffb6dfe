"""Shared set-up: one thread in torch, and Gloo ranks that live as long as the tests of a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

from comm_ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes for tests with Gloo."""
    pool = Ranks(4)
    yield pool
    pool.close()
