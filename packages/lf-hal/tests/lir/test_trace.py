"""From torch modules to graphs: what is recognised, kept, dropped and refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lir_models import Llama, settle
from torch import Tensor, nn
from traced import check

from lf_hal.hardware import HardwareNameError, hardware
from lf_hal.lir import Graph
from lf_hal.lir.errors import (
    DynamicShapeError,
    ExportFailedError,
    TrainingModeError,
    UnsupportedOperatorsError,
)
from lf_hal.lir.trace import trace, trace_program, weights_of


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


class Do(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def test_rope_that_is_almost_one_is_left_alone() -> None:
    def almost(_: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos - a * sin), dim=-1)

    inputs = (torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3, 4))
    assert not kinds(check(Do(almost), inputs))["rope"]


def test_values_keep_the_names_that_torch_gives_them() -> None:
    graph = trace(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    assert [v.name for v in graph.values()] == ["input", "weight", "bias", "linear"]


def test_a_weight_named_like_an_input_or_an_operator_keeps_its_name() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.add = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.x * self.add

    graph = check(Same().eval(), (torch.randn(2),))
    assert [w.name for w in graph.weights] == ["x", "add"]
    assert graph.inputs[0].name == "x.1"


def test_inputs_within_dicts_and_tuples_are_named() -> None:
    x, y = torch.randn(2), torch.randn(2)
    graph = check(Do(lambda _, d, t: d["a"] + t[0] * 2), ({"a": x}, (y,)))
    assert len(graph.inputs) == 2
    assert "a" in graph.inputs[0].name


def test_dropout_is_dropped() -> None:
    assert set(kinds(check(Do(lambda m, x: m.d(x) * 2, d=nn.Dropout(0.5)), (torch.ones(3),)))) == {"binary"}


@pytest.mark.parametrize("path", ["", "part"])
def test_training_mode_is_refused(path: str) -> None:
    module = Do(lambda m, x: m.part(x), part=nn.Dropout())
    (module.get_submodule(path)).train()
    with pytest.raises(TrainingModeError) as e:
        trace(module, (torch.ones(2),))
    assert e.value.module == path


def write_in_place(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = y.relu_()
    y += 1
    return y + z  # both are what y is now


def write_twice(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    same = y.detach()
    y.mul_(3).add_(1)
    return y + same


@pytest.mark.parametrize("function", [write_in_place, write_twice])
def test_writes_in_place_reach_every_name_of_a_tensor(function: Any) -> None:
    check(Do(function), (torch.randn(3),))


def write_under_a_view(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    y += 1
    return row


def write_to_an_input(_: nn.Module, x: Tensor) -> Tensor:
    return x.relu_()


@pytest.mark.parametrize(
    ("function", "reason"), [(write_under_a_view, "is a view"), (write_to_an_input, "an input or a weight")]
)
def test_writes_that_have_no_form_are_refused(function: Any, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorsError) as e:
        trace(Do(function), (torch.randn(3, 2),))
    assert reason in e.value.found[0].reason


def test_every_unsupported_operator_is_named_at_once_with_module_and_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svd(x)[0] + torch.erfinv(x)

    outer = Do(lambda m, x: torch.special.i0(m.inner(m.linear(x))), inner=Inner(), linear=nn.Linear(3, 3))
    extra = Do(
        lambda m, x: (m.outer(x), F.max_pool2d(x[None, None], 2, ceil_mode=True), x.double()), outer=outer
    )
    with pytest.raises(UnsupportedOperatorsError) as e:
        trace(extra, (torch.rand(3, 3),))
    found = {f.operator: f for f in e.value.found}
    assert set(found) == {
        "aten.linalg_svd.default", "aten.erfinv.default", "aten.max_pool2d.default", "aten.to.dtype",
    }  # fmt: skip
    assert found["aten.linalg_svd.default"].module == "outer.inner"
    assert "test_trace.py" in found["aten.linalg_svd.default"].source
    assert "torch.linalg.svd(x)" in found["aten.linalg_svd.default"].source
    assert found["aten.max_pool2d.default"].reason == "ceil_mode"
    assert "torch.float64" in found["aten.to.dtype"].reason
    assert all(f.operator in str(e.value) for f in e.value.found)


def test_dynamic_shapes_are_refused_by_name() -> None:
    linear = nn.Linear(3, 3).eval()
    dims = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(linear, (torch.ones(4, 3),), dynamic_shapes=dims)
    with pytest.raises(DynamicShapeError) as e:
        trace_program(program)
    assert e.value.value == "input"


def test_a_shape_that_follows_data_is_refused_by_name() -> None:
    with pytest.raises(DynamicShapeError) as e:
        trace(Do(lambda _, x: x.nonzero()), (torch.ones(4),))
    assert e.value.value == "nonzero"


def test_nearest_pixels_that_float32_would_choose_otherwise_are_refused() -> None:
    image = torch.arange(2.0)[None, None, None]
    grown = F.interpolate(image, size=(1, 82))[0, 0, 0]
    assert grown[41] == 0  # torch; 41 * 2 / 82 is 1
    with pytest.raises(UnsupportedOperatorsError, match="float32 rounds otherwise"):
        trace(Do(lambda _, x: F.interpolate(x, size=(1, 82))), (image,))


def test_control_flow_on_data_is_an_error_of_ours() -> None:
    with pytest.raises(ExportFailedError) as e:
        trace(Do(lambda _, x: x * 2 if x.sum() > 0 else x), (torch.ones(2),))
    assert e.value.__cause__ is not None


def test_a_module_that_changes_its_buffers_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return x + self.seen

    with pytest.raises(UnsupportedOperatorsError, match="weight"):
        trace(Counts().eval(), (torch.ones(2),))


def test_a_large_tensor_made_by_the_code_should_be_a_buffer() -> None:
    table = torch.zeros(1 << 17)
    with pytest.raises(UnsupportedOperatorsError, match="register it as a buffer"):
        trace(Do(lambda _, x: x + table), (torch.ones(1),))


def test_a_saved_program_gives_the_same_graph(tmp_path: Any) -> None:
    module = settle(Llama(vocab=16, d=32, layers=1))
    ids = torch.randint(0, 16, (1, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (ids,)), tmp_path / "m.pt2")
        program = torch.export.load(tmp_path / "m.pt2")
    graph = trace_program(program, "Llama")
    assert kinds(graph) == kinds(trace(module, (ids,)))
    weights = weights_of(program, graph)
    assert all(np.array_equal(weights[n], w) for n, w in weights_of(module, graph).items())


def test_bfloat16_weights_are_their_bits() -> None:
    module = nn.Linear(3, 2).to(torch.bfloat16).eval()
    graph = check(module, (torch.randn(2, 3).to(torch.bfloat16),), bound=2**-7)
    assert weights_of(module, graph)["weight"].dtype == np.uint16


# hardware


@hardware("mlu290")
class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


@hardware("npu")
def marked_function(x: Tensor) -> Tensor:
    return torch.tanh(x)


def test_marks_reach_the_ops_of_modules_and_functions() -> None:
    marked = Marked()
    hardware("cpu")(marked.b)
    module = Do(lambda m, x: marked_function(m.marked(x)) + 1, marked=marked)
    graph = check(module, (torch.ones(1, 2),))
    assert [op.hardware_affinity for op in graph.ops] == ["mlu290", "cpu", "npu", None]


def test_a_mark_changes_nothing_outside_of_tracing() -> None:
    assert torch.equal(marked_function(torch.ones(2)), torch.ones(2).tanh())
    assert marked_function.__name__ == "marked_function"


@pytest.mark.parametrize("name", ["", "a b", None, 3])
def test_a_name_of_hardware_that_is_none(name: Any) -> None:
    with pytest.raises(HardwareNameError):
        hardware(name)


def test_the_intermediate_form_imports_no_torch() -> None:
    code = "import lf_hal.lir, lf_hal.lir.trace, lf_hal.passes, lf_hal.hardware, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
