"""Random programs of backwards and steps give what the ordinary loop gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from release_cases import assert_same, assert_same_state
from torch import nn
from torch.optim import SGD, AdamW

from lf_memory.gradients import release

LAYERS = 3
micro_batches = st.tuples(st.sets(st.integers(0, LAYERS - 1)), st.floats(-2.0, 2.0, width=16))
programs = st.lists(
    st.tuples(st.lists(micro_batches, max_size=3), st.sampled_from(["step", "zero, step"])),
    min_size=1,
    max_size=4,
)
OPTIMIZERS = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2),
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
}


class Parts(nn.Module):
    """Uses the layers it is told to, one of them twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.shared = nn.Parameter(torch.ones(4))

    def forward(self, used, scale):
        x = torch.full((2, 4), scale) * self.shared
        for i in sorted(used):
            x = torch.tanh(self.layers[i](x)) + x
        return (x * self.shared).sum()


def play(program, model, optimizer, step, clip=None):
    for micro, end in program:
        for used, scale in micro:
            model(used, scale).backward()
        if end == "zero, step":
            optimizer.zero_grad()
        if clip is not None:
            grads = [p for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(grads, clip)
        step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("mode", "options"), [
    ("exact", {"clip": 0.5, "chunk_bytes": 70}), ("exact", {}), ("exact", {"gate": True}),
    ("fused", {"accumulation": 4, "accumulate": "buffer"}),
])  # fmt: skip
@settings(max_examples=40, deadline=None)
@given(program=programs)
def test_any_program_gives_the_bits_of_the_ordinary_loop(make, mode, options, program):
    theirs, ours = Parts(), Parts()
    plain, released = make(theirs.parameters()), make(ours.parameters())

    def ordinary_step():
        plain.step()
        plain.zero_grad()

    play(program, theirs, plain, ordinary_step, options.get("clip"))
    with release(ours, released, mode, **options) as handle:
        play(program, ours, released, handle.step)
        assert handle.stats().live_bytes == 0
    assert_same(ours, theirs)
    assert_same_state(released, plain)
