"""``torch.compile(backend="lf_hal")``: the bits of ``lf_hal.compile``, weights of the moment, named refusals."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lf_hal
from lf_hal.dynamo import backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
        nn.Dropout(0.5),
    ).eval()


def compiled(net: Any, **options: Any) -> Any:
    return torch.compile(net, backend=backend, dynamic=False, options={"threads": 1, **options})


def refused(net: Any, *inputs: Any) -> str:
    """What is said when the call fails; torch wraps errors of backends."""
    with pytest.raises(Exception) as caught:
        net(*inputs)
    said = str(caught.value)
    assert "BackendError" in said or isinstance(caught.value, lf_hal.HalError)
    return said


def test_it_has_the_bits_of_the_compiled_graph_and_the_values_of_torch() -> None:
    net, x = model(), torch.randn(2, 3, 6, 6)
    graph = lf_hal.trace(net, (x,))
    with lf_hal.compile(graph, lf_hal.weights_of(net, graph)) as artifact:
        (wanted,) = artifact.run([x.numpy()]).values()

    with torch.inference_mode():
        found = compiled(net)(x)
        eager = net(x)

    assert np.array_equal(found.numpy().view(np.uint32), wanted.view(np.uint32))
    assert torch.allclose(found, eager, atol=1e-5)


def test_weights_are_those_of_the_call() -> None:
    net, x = model(), torch.randn(2, 3, 6, 6)
    fast = compiled(net)
    with torch.inference_mode():
        before = fast(x)
    with torch.no_grad():
        net[4].bias += 1
        net[1].running_mean -= 0.5
    with torch.inference_mode():
        after = fast(x)
        assert not torch.allclose(after, before + 1, atol=1e-3)
        assert torch.allclose(after, net(x), atol=1e-5)


def test_each_shape_is_compiled_and_bfloat16_comes_back_as_such() -> None:
    net = nn.Linear(4, 3).eval()
    fast = compiled(net)
    with torch.inference_mode():
        for rows in (1, 5, 2, 5):
            x = torch.randn(rows, 4)
            assert torch.allclose(fast(x), net(x), atol=1e-6)
        cast = compiled(lambda x: (x * 2).to(torch.bfloat16))
        assert torch.equal(cast(torch.arange(5.0)), (torch.arange(5.0) * 2).bfloat16())


def test_several_outputs_and_graph_breaks() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = x + 1
            torch._dynamo.graph_break()
            return y, y * x, y

    with torch.inference_mode():
        found = compiled(Two().eval())(torch.arange(3.0))

    assert [t.tolist() for t in found] == [[1, 2, 3], [0, 2, 6], [1, 2, 3]]


def test_gradients_are_refused() -> None:
    assert "inference_mode" in refused(compiled(nn.Linear(2, 2).eval()), torch.ones(1, 2))


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(2)])
def test_training_mode_is_refused(part: nn.Module) -> None:
    with torch.inference_mode(), pytest.raises(Exception, match="not to be traced"):
        compiled(nn.Sequential(part).train())(torch.ones(4, 2))


def test_dynamic_shapes_are_refused() -> None:
    fast = torch.compile(nn.Linear(2, 2).eval(), backend=backend, dynamic=True)
    with torch.inference_mode():
        assert "dynamic=False" in refused(fast, torch.ones(3, 2))


def test_unknown_options_and_modes_are_refused() -> None:
    net = nn.Linear(2, 2).eval()
    with torch.inference_mode():
        assert "unknown options speed" in refused(compiled(net, speed=9), torch.ones(1, 2))
        torch._dynamo.reset()
        assert "no modes" in refused(
            torch.compile(net, backend=backend, mode="max-autotune"), torch.ones(1, 2)
        )


def test_a_weight_that_does_not_count_its_writes_is_refused() -> None:
    with torch.inference_mode():
        net = nn.Linear(2, 2).eval()
        assert "inference_mode" in refused(compiled(net), torch.ones(1, 2))


def test_torch_knows_it_by_name() -> None:
    (entry,) = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "lf_hal"]
    assert entry.load() is backend
