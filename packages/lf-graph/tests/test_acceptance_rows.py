"""Rows of the acceptance table (README.md) that no test of a part holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist  # registers the operators c10d::...
from torch import Tensor, nn

from lf_graph import Chain, GraphPool, Piece, TrainStep, capture
from lf_graph._recorder import refused_call
from lf_graph._rules import classify

# row 11, pytorch#180090: AccumulateGrad remembers the stream of the first forward


class Remembering(nn.Module):
    """Notes which parameter its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.read.append(self.linear.weight)
        return self.linear(x).square().mean()


def captured(model: nn.Module, x: Tensor) -> Any:
    return capture(model, x)


def chained(model: nn.Module, x: Tensor) -> Any:
    return Chain([Piece(model)]).capture(x)


def stepped(optimizer: type[torch.optim.Optimizer]) -> Callable[[nn.Module, Tensor], Any]:
    def build(model: nn.Module, x: Tensor) -> Any:
        step = TrainStep(model, optimizer(model.parameters(), lr=0.1))
        step.capture(x)
        return step

    return build


@pytest.mark.parametrize("build", [captured, chained, stepped(torch.optim.AdamW), stepped(torch.optim.SGD)])
def test_a_capture_differentiates_parameters_that_no_other_forward_has_seen(
    build: Callable[[nn.Module, Tensor], Any],
) -> None:
    model, x = Remembering(), torch.ones(3, 2)
    held = model(x)  # keeps the AccumulateGrad node of the weight alive
    model.read.clear()

    graphs = build(model, x)

    in_capture = model.read[-1]
    assert in_capture is not model.linear.weight
    assert in_capture.data_ptr() == model.linear.weight.data_ptr()
    model(x)
    assert model.read[-1] is model.linear.weight
    assert held.grad_fn is not None
    graphs.close()


# row 12, pytorch#193402: graphs share what the pool owns, and one of them goes first


def test_closing_one_chain_of_a_pool_leaves_the_others_as_they_were() -> None:
    pool, models = GraphPool("cpu"), [nn.Linear(4, 4) for _ in range(3)]
    chains = [capture(m, torch.ones(2, 4), pool=pool) for m in models]
    chains[0].close()
    for chain, model in zip(chains[1:], models[1:], strict=True):
        x = torch.randn(2, 4)
        out = chain(x)
        torch.testing.assert_close(out, model(x))
        out.sum().backward()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4))
        chain.close()


# row 20, pytorch#158029: expandable segments, NCCL's registration and graphs


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("conf", "register", "refused"),
    [
        ("max_split_size_mb:64, expandable_segments: True", None, True),
        ("expandable_segments:True", "1", True),
        ("expandable_segments:True", "0", False),
        ("expandable_segments:False", None, False),
        ("", None, False),
    ],
)
def test_a_collective_is_refused_while_its_memory_could_move(
    monkeypatch: pytest.MonkeyPatch, variable: str, conf: str, register: str | None, refused: bool
) -> None:
    assert dist.is_available()
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    monkeypatch.setenv(variable, conf)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    collective, other = torch.ops.c10d.allreduce_.default, torch.ops.aten.add.Tensor
    problem = refused_call(collective, ([torch.ones(1)],), {})
    verdict = classify(collective, ([torch.ones(1)],), {})
    assert (problem is not None) == (verdict is not None) == refused
    assert problem is None or "NCCL_GRAPH_REGISTER=0" in problem[1]
    assert refused_call(other, (torch.ones(1), torch.ones(1)), {}) is None
