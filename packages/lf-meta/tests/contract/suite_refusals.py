"""lf-hal, lf-graph and lf-comm on a simulated device: found, or refused by name. contract-only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated import Simulated
from torch import nn

import lf_comm
import lf_graph
import lf_hal
from lf_graph.kernels import rms_norm
from lf_hal.errors import DeviceIndexError, DeviceUnavailableError
from lf_hal.probe import Devices, State

BACKENDS = {"npu": ("ascend", "torch_npu", "hccl"), "mlu": ("mlu", "torch_mlu", "cncl")}


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8).to(device)


def test_the_probe_finds_the_device_and_no_other_is_given_for_it(
    simulated: Simulated, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, package, _ = BACKENDS[simulated.name]
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    (tmp_path / f"{package}.py").write_text(
        f"{text}from simulated import install\ninstall({simulated.name!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = lf_hal.probe(backends=[backend])
    assert (found.state, found.device_type, found.count) == (State.READY, simulated.name, 1), found
    assert found.evidence == lf_hal.Evidence.CONTRACT_ONLY

    devices = Devices(lambda: [found])
    assert devices.require(f"{simulated.name}:0").torch_device() == device
    with pytest.raises(DeviceIndexError):
        devices.require(f"{simulated.name}:1")
    with pytest.raises(DeviceUnavailableError, match="cuda:0"):
        devices.require("cuda:0")


def test_graphs_are_refused_by_name_before_anything_runs(simulated: Simulated, device: torch.device) -> None:
    model, x = network(device), torch.ones(2, 8, device=device)
    since = simulated.log.mark()
    for ask in (
        lambda: lf_graph.capture(model, x),
        lambda: lf_graph.TrainStep(model, torch.optim.AdamW(model.parameters()))(x),
    ):
        with pytest.raises(lf_graph.GraphError, match=f"no graphs on {simulated.name}"):
            ask()
    assert not simulated.log.counted("fallback", since)["aten::addmm"]


def test_a_check_runs_on_the_device_and_leaves_its_generator(
    simulated: Simulated, device: torch.device
) -> None:
    model, x = nn.Sequential(network(device), nn.Dropout(0.5)), torch.ones(2, 8, device=device)
    before = simulated.module.get_rng_state()
    lf_graph.check(model, x)  # what it finds here are host reads of the simulation's own kernels
    assert torch.equal(simulated.module.get_rng_state(), before)


def test_kernels_take_their_twins(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16), torch.randn(16)
    assert torch.equal(rms_norm(x.to(device), weight.to(device)).cpu(), rms_norm(x, weight))


def test_a_process_group_of_the_device_is_refused_by_name(simulated: Simulated, device: torch.device) -> None:
    _, package, backend = BACKENDS[simulated.name]
    with pytest.raises(lf_comm.BackendMissingError, match=f"the package {package} is not installed"):
        lf_comm.init_loong_dist(backend)
    assert not torch.distributed.is_initialized()


def test_gloo_moves_no_tensors_of_the_device_and_torch_says_so(device: torch.device, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=f"(?i)no backend type associated.*{device.type}"):
            torch.distributed.all_reduce(torch.ones(2, device=device))
    finally:
        torch.distributed.destroy_process_group()
