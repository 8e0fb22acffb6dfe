"""FusedAdamW inside a graph: replays equal eager steps, and nothing the host decides is frozen into them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adamw_cases import DEVICE, IMPLEMENTATIONS, Twins, assert_twins_equal, cosine, same_bits

from lf_graph import GraphCaptureError
from lf_graph._flat import OptimizerError
from lf_graph._recorder import RecordBackend

CLIP = {"clip": 1.0}


def recorded(twins: Twins, scale: torch.Tensor | None = None) -> Any:
    """The step as a graph of the recorder, with what the capture itself did taken back."""
    held = [*_state(twins), twins.fused.skipped]
    before = [t.clone() for t in held]
    graph, _ = RecordBackend().capture(lambda: twins.fused.step(scale), None)
    for t, value in zip(held, before, strict=True):
        t.copy_(value)
    return graph


def _state(twins: Twins) -> list[torch.Tensor]:
    f = twins.flat
    return [f.master, f.exp_avg, f.exp_avg_sq, f.shadow, f.steps]


def on_cpu() -> Any:
    return pytest.mark.skipif(DEVICE != "cpu", reason="the recorder is a CPU backend")


@on_cpu()
def test_twenty_replays_equal_twenty_eager_steps_to_the_bit() -> None:
    graphed, eager = Twins(step=CLIP), Twins(step=CLIP)
    graph = recorded(graphed)
    for step in range(20):
        for twins in (graphed, eager):
            twins.set_lr(cosine(step), 0.1 * cosine(step))
            twins.new_gradients()
            twins.fused.refresh_hyper()
        graph.replay()
        eager.fused.step()
        assert same_bits(graphed.everything(), eager.everything())
        assert same_bits([graphed.fused.norm], [eager.fused.norm])


@on_cpu()
def test_replays_equal_torch_with_a_cosine_schedule() -> None:
    twins = Twins()
    graph = recorded(twins)
    for step in range(20):
        twins.set_lr(cosine(step), 0.1 * cosine(step))
        twins.new_gradients()
        twins.reference.step()
        twins.fused.refresh_hyper()
        graph.replay()
    assert_twins_equal(twins)


@on_cpu()
def test_replays_read_the_gradient_set_in_use() -> None:
    twins = Twins()
    graph = recorded(twins)
    others = [torch.zeros_like(g) for g in twins.gradients]
    second = twins.fused.set_gradients(others)
    for step in range(4):
        twins.new_gradients()
        if step % 2:
            for g, mine in zip(others, twins.gradients, strict=True):
                g.copy_(mine)
                mine.fill_(float("nan"))
        twins.fused.use(second if step % 2 else twins.table)
        twins.reference.step()
        graph.replay()
    assert_twins_equal(twins)


@on_cpu()
def test_the_gate_and_the_scale_work_in_replays() -> None:
    twins = Twins(step=CLIP)
    scale = torch.ones(())
    graph = recorded(twins, scale)
    twins.new_gradients()
    graph.replay()
    before, norm = twins.everything(), float(twins.fused.norm)
    scale.fill_(float("nan"))
    graph.replay()
    assert same_bits(twins.everything(), before)
    assert int(twins.fused.skipped) == 1
    scale.fill_(0.5)
    graph.replay()
    assert float(twins.fused.norm) == pytest.approx(0.5 * norm)
    assert not same_bits(twins.everything(), before)


@on_cpu()
def test_a_loaded_checkpoint_is_what_the_next_replay_starts_from() -> None:
    source, twins = Twins(), Twins()
    graph = recorded(twins)
    for _ in range(3):
        source.step()
    with torch.no_grad():
        for mine, theirs in zip(twins.ours, source.ours, strict=True):
            mine.copy_(theirs)
    twins.optimizer.load_state_dict(source.optimizer.state_dict())
    for g, value in zip(twins.gradients, source.gradients, strict=True):
        g.copy_(value)
    graph.replay()
    source.fused.step()
    assert same_bits(twins.everything(), source.everything())


def cuda_graph(twins: Twins) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        twins.fused.step()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cuda_replays_equal_eager_steps_to_the_bit(implementation: str) -> None:
    graphed, eager = Twins(implementation, step=CLIP), Twins(implementation, step=CLIP)
    graph = cuda_graph(graphed)
    for step in range(20):
        for twins in (graphed, eager):
            twins.set_lr(cosine(step), 0.1 * cosine(step))
            twins.new_gradients()
            twins.fused.refresh_hyper()
        graph.replay()
        eager.fused.step()
        assert same_bits(graphed.everything(), eager.everything())


@pytest.mark.gpu
def test_cuda_replays_read_the_gradient_set_in_use() -> None:
    twins = Twins("triton")
    others = [torch.zeros_like(g) for g in twins.gradients]
    second = twins.fused.set_gradients(others)
    graph = cuda_graph(twins)
    for step in range(4):
        twins.new_gradients()
        if step % 2 == 0:
            for g, mine in zip(others, twins.gradients, strict=True):
                g.copy_(mine)
                mine.fill_(float("nan"))
        twins.fused.use(second if step % 2 == 0 else twins.table)
        twins.reference.step()
        graph.replay()
    assert_twins_equal(twins)


@pytest.mark.gpu
def test_torch_on_cuda_refuses_another_gradient_set_after_capture() -> None:
    twins = Twins("torch")
    second = twins.fused.set_gradients([g.clone() for g in twins.gradients])
    cuda_graph(twins)
    twins.fused.use(second)
    with pytest.raises(OptimizerError, match="one optimizer graph per gradient set"):
        twins.fused.use(twins.table)


@pytest.mark.gpu
def test_refreshing_under_capture_is_refused() -> None:
    twins = Twins("triton")
    with (
        pytest.raises(GraphCaptureError, match="call it before replay"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        twins.fused.refresh_hyper()


@pytest.mark.gpu
def test_steps_and_refreshes_do_not_wait_for_the_device() -> None:
    twins = Twins("triton", step=CLIP)
    twins.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        twins.fused.step(torch.ones((), device=DEVICE))
        twins.set_lr(0.3, 0.2)
        twins.fused.refresh_hyper()
        twins.fused.use(twins.table)
        twins.flat.refresh_shadow()
        twins.flat.verify_addresses()
    finally:
        torch.cuda.set_sync_debug_mode("default")
