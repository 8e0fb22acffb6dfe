"""partition: what it cannot follow is told with its line."""

from __future__ import annotations

import pytest
import torch
from marks import marks_of
from partition_cases import Reads, X, kinds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lf_graph import GraphCaptureError, GraphError
from lf_graph._partition import partition

at = marks_of(__file__)


# what cannot be cut


class OwnRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x.sum().item()  # at: own


def test_a_finding_in_the_forward_of_the_module_itself_is_an_error_with_its_line_and_a_way_out():
    with pytest.raises(GraphCaptureError) as raised:
        partition(OwnRead(), X)
    assert raised.value.where == at("own")
    assert "put these lines into a submodule" in raised.value.fix


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class UsesHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        y = Hidden.apply(x)  # at: hidden
        return self.reads(y + 1)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), Reads()

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.linear, x, use_reentrant=False, preserve_rng_state=False)  # at: checkpoint
        return self.reads(y)


LOOSE = torch.ones(4)


class UsesGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(x * LOOSE)  # at: global


class SetsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.data = x.detach() * 2  # at: data
        return self.reads(y)


class Options:
    pass


class TakesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.reads = Ignores(), Reads()

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.inner(x, Options()))  # at: object


class Ignores(nn.Module):
    def forward(self, x: Tensor, options: object) -> Tensor:
        return x


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads, self.others = Reads(), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.others[0](x))  # at: foreign


@pytest.mark.parametrize(
    ("cls", "mark", "why"),
    [
        (UsesHidden, "hidden", "autograd.Function"),
        (Checkpoints, "checkpoint", "activation checkpointing"),
        (UsesGlobal, "global", "records nothing"),
        (SetsData, "data", "attribute of a tensor"),
        (TakesObject, "object", "type Options"),
        (Foreign, "foreign", "no submodule"),
    ],
)
def test_what_cannot_be_a_node_is_an_error_with_its_line_and_a_way_out(cls, mark, why):
    with pytest.raises(GraphCaptureError) as raised:
        partition(cls(), X)
    assert raised.value.where == at(mark)
    assert why in raised.value.why
    assert "submodule" in raised.value.fix


def test_the_same_lines_in_a_submodule_of_their_own_are_fine():
    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Hidden.apply(x)

    model = nn.Sequential(Wraps(), Reads())
    assert kinds(partition(model, X)) == [("piece", "piece0"), ("eager", "1")]


def test_a_module_with_findings_that_is_used_without_being_called_is_an_error():
    class Bypasses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: Tensor) -> Tensor:
            return self.reads.forward(x)

    with pytest.raises(GraphCaptureError, match="another method than its call"):
        partition(Bypasses(), X)


def test_what_passes_between_submodules_without_being_a_tensor_is_noticed_by_other_bits():
    doubled = []

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if doubled else x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads, self.doubles = Reads(), Doubles()

        def forward(self, x: Tensor) -> Tensor:
            doubled.append(True)
            y = self.doubles(x)
            doubled.clear()
            return self.reads(y)

    with pytest.raises(GraphError, match="do not compute what the module does"):
        partition(Root(), X)


def test_a_module_without_tensor_arguments_is_refused():
    class Makes(nn.Module):
        def forward(self, n: int) -> Tensor:
            return torch.zeros(n)

    with pytest.raises(GraphError, match="at least one tensor"):
        partition(Makes(), 3)


def test_a_returned_parameter_is_refused():
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads, self.w = Reads(), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.reads(x), self.w

    with pytest.raises(GraphError, match="returns a parameter"):
        partition(Gives(), X)


def test_a_chain_of_the_parts_notices_that_the_users_module_changed_its_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), Reads())
    parts = partition(model, X)
    chain = parts.chain().capture(X)
    chain(X)
    model.eval()
    with pytest.raises(GraphError, match="training"):
        chain(X)


@pytest.mark.gpu
def test_the_parts_run_as_cuda_graphs():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Reads(), nn.GELU(), nn.Linear(4, 4)).cuda(), X.cuda()
    parts = partition(model, x)
    with parts.chain().capture(x) as chain:
        torch.testing.assert_close(chain(x + 1), model(x + 1))
