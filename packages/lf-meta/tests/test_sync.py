"""Between two log lines a step never waits for the device."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lf_meta import loop, rundir
from lf_meta.config import load_config
from lf_meta.dist import World
from lf_meta.session import Session, open_session
from lf_meta.signals import StopSignal

# operators through which a value reaches the host, or whose output shape depends on values
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique_dim", "_unique2", "equal"}


class CountReads(TorchDispatchMode):
    """Counts operators that make the host wait on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def _session_steps(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, small: list[str], *overrides: str
) -> list[str]:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [*small, "run.steps=12", "metrics.every=12", "ckpt.every=0", *overrides])
    run = rundir.create(config)
    reads: list[str] = []
    step = loop._train_step

    def counted(s: Session, batch: Any) -> Any:
        with CountReads() as counter:
            record = step(s, batch)
        reads.extend(counter.reads)
        return record

    monkeypatch.setattr(loop, "_train_step", counted)
    with (
        StopSignal() as signal,
        World.from_environment(config.device, config.dist) as world,
        open_session(config, run, world, signal) as session,
    ):
        loop.train(session)
        assert session.step == 12
    return reads


def test_no_value_is_read_in_a_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, small: list[str]) -> None:
    assert _session_steps(tmp_path, monkeypatch, small) == []


def test_the_counter_sees_a_read() -> None:
    with CountReads() as counter:
        torch.ones(3).sum().item()
    assert counter.reads == ["_local_scalar_dense"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_reports_no_synchronisation_in_a_step(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    step = loop._train_step

    def strict(s: Session, batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error" if s.step >= 2 else "default")  # the first steps load kernels
        try:
            return step(s, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop, "_train_step", strict)
    assert _session_steps(tmp_path, monkeypatch, small, "device.type=cuda") == []
