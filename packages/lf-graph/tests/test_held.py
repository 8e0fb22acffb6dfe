"""What a call holds beside tensors is part of its signature, inside of objects too."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lf_graph import GraphError, SignatureError, TrainStep, capture


@dataclass
class Options:
    scale: float = 1.0
    parts: list[dict[str, float]] = field(default_factory=lambda: [{"w": 1.0}])


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (types.SimpleNamespace(scale=1.0), _set("scale", 100.0)),
        (types.SimpleNamespace(scale=1.0), _set("other", 1)),
        (types.SimpleNamespace(scale=1), _set("scale", True)),
        (Options(), _set("scale", 2.0)),
        (Options(), lambda o: o.parts[0].update(w=2.0)),
        (Slots(), _set("scale", 3.0)),
        ({1, 2}, lambda s: s.add(3)),
        (bytearray(b"ab"), lambda b: b.append(1)),
    ],
    ids=["namespace", "added", "type", "dataclass", "nested", "slots", "set", "bytes"],
)
def test_a_changed_object_is_another_signature(held: Any, change: Callable[[Any], None]) -> None:
    x = torch.randn(3, requires_grad=True)
    graphed = capture(lambda x, held: x * 2, x, held)
    torch.testing.assert_close(graphed(x, held), x * 2)

    change(held)

    with pytest.raises(SignatureError, match=r"args\[1\]"):
        graphed(x, held)


def test_a_training_step_sees_it_too_and_takes_an_equal_object() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(x: Tensor, options: Options) -> Tensor:
        return model(x).square().mean() * options.scale

    x, options = torch.randn(2, 4), Options()
    with TrainStep(model, optimizer, loss=loss) as step:
        first = step(x, options).loss.clone()
        assert torch.equal(step(x, Options()).loss, first)
        options.scale = 100.0
        with pytest.raises(SignatureError, match="scale=100"):
            step(x, options)


def test_what_cannot_be_compared_at_every_call_is_refused() -> None:
    with pytest.raises(GraphError, match="over 1000 values"):
        capture(lambda x, held: x * 2, torch.ones(2), types.SimpleNamespace(many=list(range(2000))))


def test_an_array_deep_inside_is_refused() -> None:
    with pytest.raises(GraphError, match="holds a numpy array"):
        capture(lambda x, held: x * 2, torch.ones(2), types.SimpleNamespace(deep=[{"a": np.ones(2)}]))


def test_what_comes_back_is_the_object_itself() -> None:
    options = Options()
    options.parts.append(OrderedDict(itself=0.0))
    x = torch.ones(2, requires_grad=True)

    out, same = capture(lambda x, held: (x * 2, held), x, options)(x, options)

    assert same is options
    torch.testing.assert_close(out, x * 2)


def test_nan_is_the_same_as_itself_and_a_circle_ends() -> None:
    circle = types.SimpleNamespace()
    circle.itself = circle
    graphed = capture(lambda x, nan, held: x * 2, torch.ones(2), float("nan"), circle)
    graphed(torch.ones(2), float("nan"), circle)
