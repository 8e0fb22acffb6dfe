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


@pytest.fixture(scope="session")
def fsdp_ranks(ranks: Ranks) -> Ranks:
    """The same where torch shards on the host with FSDP2."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} runs on no CPU: its streams record no events")
    return ranks
