"""``place``: marked modules and functions train on their devices, on simulated npu and mlu and on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lf_hal import Pool, c_target, hardware, place, torch_device
from lf_hal.placement.errors import AffinityUnavailableError, PoolError, TrainingPlacementError

HERE = Path(__file__).parent
CPU = torch_device("cpu:0")
META = torch_device("meta:0")  # a device that torch has everywhere, for what is refused before anything moves


@cache
def trained(name: str) -> dict[str, Any]:
    """What the training program found in a process of its own."""
    done = subprocess.run(
        [sys.executable, HERE / "train_simulated.py", name], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["npu", "mlu"])
def test_training_on_a_simulated_device_has_the_bits_of_the_cpu(name: str) -> None:
    found = trained(name)
    assert found["losses"][0] == found["losses"][1]
    assert len(set(found["losses"][0])) == 4  # it learns something
    assert found["equal"]
    marked = ("blocks.0.mix", "blocks.1.", "blocks.2.", "blocks.3.mix")
    for devices in (found["devices"], found["gradients"]):
        assert devices == {n: f"{name}:0" if n.startswith(marked) else "cpu" for n in devices}
    assert found["evidence"] == "contract-only"
    assert found["after"] == ["cpu", ["cpu"]]


def test_copies_are_those_of_the_edges_and_gradients_go_back_over_them() -> None:
    name = "mlu"
    found = trained(name)
    edges = {tuple(e[:3]): e[3:] for e in found["edges"]}
    steps, rows = 4, 6 * 4 * 8 * 4  # of [6, 4, 8] float32
    # into blocks.0.mix, blocks.1 and 2 at once, blocks.3.mix, and two arguments of the function
    assert edges["forward", "cpu:0", f"{name}:0"] == [5 * steps, 5 * steps * rows]
    assert edges["forward", f"{name}:0", "cpu:0"] == [4 * steps, 4 * steps * rows]
    assert edges["backward", f"{name}:0", "cpu:0"] == edges["forward", "cpu:0", f"{name}:0"]
    assert edges["backward", "cpu:0", f"{name}:0"] == edges["forward", f"{name}:0", "cpu:0"]
    assert found["copied"] == [9 * steps * rows, 9 * steps * rows]  # as the device itself counted


class Two(nn.Module):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), hardware(mark)(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def test_a_mark_without_its_device_is_an_error_and_nothing_moves() -> None:
    net = Two("mlu290")
    with pytest.raises(AffinityUnavailableError, match=r"'b'.*mlu290.*cpu:0"):
        place(net, Pool([CPU]))
    assert not net._forward_pre_hooks
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_devices_that_cannot_train_are_refused() -> None:
    with pytest.raises(TrainingPlacementError, match="no backward"):
        place(Two("c"), Pool([CPU, c_target(name="c")]))
    with pytest.raises(TrainingPlacementError, match="simulated on cpu"):
        place(Two("mlu"), Pool([CPU, torch_device("mlu:0", on="cpu")]))
    with pytest.raises(PoolError, match="torch cannot use npu:7"):
        place(Two("npu"), Pool([CPU, torch_device("npu:7")]))
    with pytest.raises(PoolError, match="not in the pool"):
        place(Two("cpu"), Pool([CPU]), default="cuda:0")


def test_parameters_that_two_devices_want_are_refused() -> None:
    net = Two("meta")
    net.b.weight = net.a.weight
    with pytest.raises(TrainingPlacementError, match=r"'b.weight'.*'a.weight'"):
        place(net, Pool([CPU, META]))
    again = nn.ModuleDict({"x": nn.Linear(2, 2)})
    again["y"] = hardware("meta")(nn.ModuleList([again["x"]]))
    with pytest.raises(TrainingPlacementError, match="used twice"):
        place(again, Pool([CPU, META]))


def test_parameters_hold_their_identity_where_torch_allows_and_come_back() -> None:
    net = Two("cpu")
    before = list(net.parameters())
    with place(net, Pool([CPU])) as placed:
        net(torch.randn(2, 3)).sum().backward()
        report = placed.report()
    assert [id(p) for p in net.parameters()] == [id(p) for p in before]
    assert report.edges == ()
    assert report.replaced == ()
    assert dict(report.modules) == {"a": "cpu:0", "b": "cpu:0"}
    assert dict(report.parameter_bytes) == {"cpu:0": 2 * 48}
    assert not net._forward_pre_hooks
    placed.remove()  # twice is once


def test_marked_functions_follow_the_pool_only_within_a_placed_forward() -> None:
    @hardware("mlu290")
    def double(x: Tensor) -> Tensor:
        return x * 2

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    net, x = Net(), torch.ones(2)
    assert double(x).tolist() == net(x).tolist() == [2, 2]
    with place(net, Pool([CPU])), pytest.raises(AffinityUnavailableError, match=r"double.*mlu290"):
        net(x)
    assert net(x).tolist() == double(x).tolist() == [2, 2]  # an error in forward leaves nothing behind


class Wide(nn.Module):
    """Marked parts in a row, around a residual, and with tuples and keywords going in and out."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(16, 16)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, pair: tuple[Tensor, Tensor], *, gain: Tensor) -> dict[str, Tensor]:
            return {"sum": self.line(pair[0]) * gain + pair[1] * self.scale}

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(
            nn.Conv2d(1, 4, 3), hardware("cuda")(nn.ReLU()), hardware("cuda")(nn.Conv2d(4, 1, 3))
        )
        self.pair = hardware("cuda")(Wide.Pair())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.row(x).flatten(1)
        return self.head(y + self.pair((y, y * 2), gain=torch.tensor(1.5))["sum"])  # type: ignore[no-any-return]


def _train(net: nn.Module) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(0, 4, (8,)))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_over_cuda_and_cpu_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    net = Wide()
    plain = Wide()
    plain.load_state_dict(net.state_dict())
    expected = _train(plain)
    identities = [id(p) for p in net.parameters()]
    placed = place(net, Pool([CPU, torch_device("cuda:0")]))
    assert [id(p) for p in net.parameters()] == identities  # an optimizer made before would do
    on: dict[str, Any] = {n: p.device.type for n, p in net.named_parameters()}
    assert on == {n: "cuda" if n.startswith(("row.2", "pair")) else "cpu" for n in on}
    found = _train(net)
    assert found == pytest.approx(expected, rel=1e-4)
    edges = {(e.direction, e.source, e.target): e.copies for e in placed.report().edges}
    assert edges["forward", "cpu:0", "cuda:0"] == 5 * 4  # the row's second part, a pair, a gain
    assert edges["forward", "cuda:0", "cpu:0"] == 5 * 2
    assert edges["backward", "cpu:0", "cuda:0"] == 5 * 2
    assert edges["backward", "cuda:0", "cpu:0"] == 5 * 3  # the gain wants no gradient
    assert {p.grad.device.type for n, p in net.named_parameters() if n.startswith("pair")} == {"cuda"}  # type: ignore[union-attr]
    placed.remove()
    assert {t.device.type for t in net.state_dict().values()} == {"cpu"}
    for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
