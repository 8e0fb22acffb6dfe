"""Bytes that each mode asks the allocator for, beside the ordinary loop and the mode's plan."""

import pytest
import torch
from release_peaks import peak_bytes
from torch import nn
from torch.optim import AdamW

from lf_memory.gradients import release

LAYERS, WIDTH = 24, 256
MATRIX = WIDTH * WIDTH * 4
TOTAL = LAYERS * MATRIX
SLACK = 16 * WIDTH * 8 + (1 << 16)  # activation gradients of 8 rows, scalars


def stack(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def backward_and_step(step, model, x, rounds=1):
    """Bytes at the peak of `rounds` backwards and a step; the forwards, and state of the optimizer, came before."""
    losses = [model(x).square().mean() for _ in range(rounds)]

    def work():
        while losses:
            losses.pop().backward()
        step()

    return peak_bytes(work)


def ordinary(optimizer, model, clip=None):
    def step():
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def warm(step, model, x):
    model(x).square().mean().backward()
    step()


def test_the_ordinary_loop_holds_every_gradient_and_a_foreach_step_as_much_again():
    model, x = stack(), torch.ones(8, WIDTH)
    step = ordinary(AdamW(model.parameters(), foreach=True), model)
    warm(step, model, x)
    assert backward_and_step(step, model, x) > 1.9 * TOTAL


@pytest.mark.parametrize(("mode", "options"), [
    ("fused", {}), ("local_clip", {"clip": 1.0}), ("local_clip", {"clip": 1.0, "clip_by": "running"}),
    ("fused", {"accumulate": "state"}),
])  # fmt: skip
def test_freeing_modes_hold_one_gradient_and_what_one_update_takes(mode, options):
    model, x = stack(), torch.ones(8, WIDTH)
    handle = release(model, AdamW(model.parameters(), foreach=False), mode, chunk_bytes=1, **options)
    warm(handle.step, model, x)
    peak = backward_and_step(handle.step, model, x)
    assert peak < 5 * MATRIX + SLACK  # the gradient, and the update's own tensors
    stats = handle.stats()
    assert stats.peak_bytes == stats.planned_bytes == MATRIX
    assert stats.in_backward == LAYERS


def test_two_passes_hold_one_gradient_too():
    model, x = stack(), torch.ones(8, WIDTH)
    handle = release(model, AdamW(model.parameters(), foreach=False), "two_pass", clip=1.0, chunk_bytes=1)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    handle.step(closure)
    activations = peak_bytes(lambda: model(x).square().mean())
    assert peak_bytes(lambda: handle.step(closure)) < activations + 5 * MATRIX + SLACK
    assert handle.stats().peak_bytes == handle.stats().planned_bytes == MATRIX


def test_state_accumulation_of_micro_batches_holds_one_gradient():
    model, x = stack(), torch.ones(8, WIDTH)
    handle = release(
        model, AdamW(model.parameters(), foreach=False), "fused", accumulation=3, accumulate="state"
    )
    for _ in range(2):
        warm(lambda: None, model, x)
    warm(handle.step, model, x)
    assert backward_and_step(handle.step, model, x, rounds=3) < 5 * MATRIX + SLACK


@pytest.mark.parametrize("foreach", [True, False])
def test_exact_holds_the_gradients_and_no_more_than_a_chunk_beside_them(foreach):
    model, x = stack(), torch.ones(8, WIDTH)
    optimizer = AdamW(model.parameters(), foreach=foreach)
    handle = release(model, optimizer, "exact", clip=1.0, chunk_bytes=2 * MATRIX)
    warm(handle.step, model, x)
    assert backward_and_step(handle.step, model, x) < TOTAL + 8 * MATRIX + SLACK
    assert handle.stats().peak_bytes == handle.stats().planned_bytes == TOTAL


def test_exact_with_kept_bfloat16_holds_half():
    model, x = stack(), torch.ones(8, WIDTH)
    optimizer = AdamW(model.parameters(), foreach=False)
    handle = release(model, optimizer, "exact", clip=1.0, keep=torch.bfloat16, chunk_bytes=MATRIX)
    warm(handle.step, model, x)
    assert backward_and_step(handle.step, model, x) < TOTAL // 2 + 8 * MATRIX + SLACK
    stats = handle.stats()
    assert stats.peak_bytes <= stats.planned_bytes == TOTAL // 2 + MATRIX


@pytest.mark.parametrize("mode", ["fused", "exact"])
def test_buffers_of_bfloat16_parameters_are_planned_in_float32(mode):
    model, x = stack(torch.bfloat16), torch.ones(8, WIDTH, dtype=torch.bfloat16)
    handle = release(
        model, AdamW(model.parameters()), mode, accumulation=2, accumulate="buffer", chunk_bytes=1
    )
    warm(lambda: None, model, x)
    warm(handle.step, model, x)
    stats = handle.stats()
    assert stats.peak_bytes <= stats.planned_bytes
    assert stats.planned_bytes <= TOTAL + MATRIX


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_small_gradients_wait_for_each_other_up_to_a_chunk(chunk):
    model, x = stack(), torch.ones(8, WIDTH)
    optimizer = AdamW(model.parameters(), foreach=False)
    handle = release(model, optimizer, "fused", chunk_bytes=chunk * MATRIX)
    warm(handle.step, model, x)
    stats = handle.stats()
    assert stats.peak_bytes == min(chunk, LAYERS) * MATRIX
    assert stats.peak_bytes <= stats.planned_bytes <= min(chunk + 1, LAYERS) * MATRIX
    assert stats.at_step == (LAYERS % chunk if chunk < LAYERS else LAYERS)
    assert stats.in_backward + stats.at_step == LAYERS


def test_nothing_grows_over_many_steps():
    model, x = stack(), torch.ones(8, WIDTH)
    handle = release(model, AdamW(model.parameters(), foreach=False), "fused")
    warm(handle.step, model, x)
    peaks = [backward_and_step(handle.step, model, x) for _ in range(8)]
    # torch's profiler adds a few KiB to some; what grew would be in all that follow
    assert min(peaks[4:]) <= max(peaks[:4])
