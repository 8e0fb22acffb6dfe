"""The simulated device inside a suite's own process, and what every suite is held to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
from simulated import Simulated, install


@pytest.fixture(scope="session")
def simulated() -> Simulated:
    """The device of this process. Evidence: contract-only."""
    torch.set_num_threads(1)
    return install(os.environ["LOONGFORGE_CONTRACT_DEVICE"])


@pytest.fixture
def misuse() -> None:
    """Asked for by tests that provoke a violation or a call of torch.cuda."""


@pytest.fixture
def watched(simulated: Simulated, request: pytest.FixtureRequest) -> Iterator[None]:
    """No unordered access to memory and no call of torch.cuda, unless a test is there to make one."""
    since = simulated.log.mark()
    yield
    simulated.module.synchronize()
    if "misuse" not in request.fixturenames:
        assert not simulated.log.violations(since)
        assert not simulated.log.counted("cuda", since)


@pytest.fixture
def device(simulated: Simulated, watched: None) -> torch.device:
    """npu:0 or mlu:0, in a test that is watched."""
    return simulated.device
