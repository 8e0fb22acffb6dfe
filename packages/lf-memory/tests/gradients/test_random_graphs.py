"""Random graphs of shared weights, views, sums, in-place steps and slices: order and bytes are those of the engine."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lf_memory.gradients import predict, verify
from lf_memory.gradients._policy import MODES
from lf_memory.gradients._walk import walk

SIZE = 64
STEPS = {
    "linear": lambda net, a, b: net.weights[0](a),
    "other linear": lambda net, a, b: net.weights[1](a),
    "product": lambda net, a, b: a @ net.matrix,
    "add": lambda net, a, b: a + b,
    "subtract": lambda net, a, b: a - b,
    "multiply": lambda net, a, b: a * b,
    "transpose": lambda net, a, b: a.t(),
    "reshape": lambda net, a, b: a.reshape(2 * SIZE, -1).reshape(SIZE, SIZE),
    "relu": lambda net, a, b: a.relu(),
    "relu in place": lambda net, a, b: (a * 1.5).relu_(),
    "halves": lambda net, a, b: torch.cat([a[: SIZE // 2], b[SIZE // 2 :]]),
    "scale": lambda net, a, b: a * net.scale,
    "norm": lambda net, a, b: net.norm(a),
    "detour": lambda net, a, b: a + a.detach(),
}


class Random(nn.Module):
    """Each step takes two earlier results; all that nothing else reads goes into the loss."""

    def __init__(self, program):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.matrix, self.scale = nn.Parameter(torch.eye(SIZE)), nn.Parameter(torch.ones(SIZE))
        self.norm = nn.LayerNorm(SIZE)
        self.program = program

    def forward(self, x):
        results, read = [self.weights[0](x)], set()
        for name, first, second in self.program:
            a, b = first % len(results), second % len(results)
            results.append(STEPS[name](self, results[a], results[b]))
            read |= {a, b}
        ends = [result for at, result in enumerate(results) if at not in read]
        return torch.stack([end.square().mean() for end in ends]).sum()


programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 30), st.integers(0, 30)), max_size=14
)
X = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)
SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=60, **SETTINGS)
@given(programs)
def test_the_engine_runs_nodes_in_the_order_that_is_walked(program):
    loss = Random(program)(X)
    graph = walk([loss], {})
    executed = []
    for at, node in enumerate(graph.order):
        node.register_prehook(lambda _, at=at: executed.append(at))
    loss.backward()
    assert executed == list(range(len(graph.order)))


@settings(max_examples=40, **SETTINGS)
@given(programs, st.sampled_from(MODES))
def test_bytes_are_those_of_the_allocator(program, mode):
    model = Random(program)
    plan = predict(model, X, mode=mode, bucket_bytes=20_000)
    found = verify(plan, model, X)
    assert found.ratio("saved_bytes") == pytest.approx(1, abs=0.005), f"{found}"
    assert found.within(0.025), f"{found}"  # layer norm sums its parameters' gradients in memory of its own


@settings(max_examples=40, **SETTINGS)
@given(programs, st.sampled_from(MODES))
def test_a_graph_that_is_only_read_gives_the_same_arena(program, mode):
    """Temporaries within a node are not in the graph, so that only parameters are compared."""
    model = Random(program)
    ran = predict(model, X, mode=mode, bucket_bytes=20_000)
    walked = predict(model(X), model=model, mode=mode, bucket_bytes=20_000)
    assert walked.placements == ran.placements
    assert walked.slots == ran.slots
    assert walked.parameter_peak_bytes >= ran.arena_bound_bytes
