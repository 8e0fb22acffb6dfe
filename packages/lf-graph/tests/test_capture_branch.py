"""Code that asks whether a capture is on: the dry run and the recorder take the branch that CUDA would take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lf_graph import GraphCaptureError, TrainStep, capture, check

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch without CUDA
        return False


def careful(x: Tensor) -> Tensor:
    """Reads a value back, but not while it is captured."""
    if not capturing() and x.sum().item() > 1e9:
        return x * 0
    return x * 2


def careless(x: Tensor) -> Tensor:
    return x * x.sum().item()


def test_what_is_read_back_only_outside_of_a_capture_can_be_captured() -> None:
    x = torch.arange(4.0, requires_grad=True)

    with capture(careful, x) as twice:
        twice(x).sum().backward()

    assert check(careful, x).ok
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4


def test_the_question_is_answered_as_before_once_the_capture_is_over() -> None:
    real = torch.cuda.is_current_stream_capturing

    capture(careful, torch.ones(2)).close()
    with pytest.raises(GraphCaptureError, match="_local_scalar_dense"):
        capture(careless, torch.ones(2))

    assert torch.cuda.is_current_stream_capturing is real


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS)], ids=["no mask", "mask of ones"])
def test_a_hugging_face_decoder_trains_without_cache_as_in_plain_pytorch(
    kind: str, mask: Tensor | None
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=16, num_attention_heads=2, num_key_value_heads=1, **shape
    )

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss
        return loss

    plain, optimizer = fresh()
    expected = []
    for _ in range(3):
        loss = loss_of(plain, IDS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model, ours = fresh()
    with TrainStep(model, ours, loss=lambda ids: loss_of(model, ids)) as step:
        got = [step(IDS).loss.item() for _ in range(3)]

    assert got == pytest.approx(expected, rel=1e-5)
    assert check(lambda ids: loss_of(model, ids), IDS).ok
