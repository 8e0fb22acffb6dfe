"""Trains a marked network placed over cpu and a simulated device, and the same one on the CPU alone; prints JSON.

Run as a program with the device's type ("npu", "mlu"), as a process can have one such name only.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from simulated_device import LOG, register
from torch import Tensor, nn

from lf_hal import Pool, hardware, place, torch_device

NAME = sys.argv[1] if len(sys.argv) > 1 else "mlu"
SPEC = {"mlu": "mlu290", "npu": "ascend910b"}.get(NAME, "")


@hardware(SPEC or NAME)
def gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * y


class Block(nn.Module):
    """A residual block whose inner layers are marked."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mix = hardware(NAME)(nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(
            Block(8), hardware(NAME)(Block(8)), hardware(NAME)(nn.Linear(8, 8)), Block(8)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = gate(self.blocks(x), x)
        return self.head(x.mean(1))


def train(net: nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        ids, labels = torch.randint(0, 11, (6, 4)), torch.randint(0, 5, (6,))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def main() -> None:
    register(NAME)
    plain, net = made(), made()
    expected = train(plain)
    device = torch_device(f"{NAME}:0", spec=SPEC or None)
    placed = place(net, Pool([torch_device("cpu:0"), device]))
    on = {n: str(p.device) for n, p in net.named_parameters()}
    LOG.clear()
    found = train(net)
    report, copied = placed.report(), list(LOG)
    gradients = {n: str(p.grad.device) for n, p in net.named_parameters() if p.grad is not None}
    placed.remove()
    with torch.no_grad():
        after = net(torch.zeros(1, 4, dtype=torch.long)).device
    pairs = zip(net.state_dict().values(), plain.state_dict().values(), strict=True)
    out: dict[str, Any] = {
        "losses": [expected, found],
        "devices": on,
        "gradients": gradients,
        "edges": [[e.direction, e.source, e.target, e.copies, e.nbytes] for e in report.edges],
        "modules": dict(report.modules),
        "copied": [sum(n for d, n in copied if d == way) for way in ("to device", "from device")],
        "evidence": str(device.evidence),
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "after": [str(after), sorted({str(p.device) for p in net.parameters()})],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
