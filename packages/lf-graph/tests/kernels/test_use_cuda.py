"""use(), our attention and loss_of() on a GPU, in a Qwen3 of transformers: numbers, captured steps, the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from use_cases import Rows, TypedRows, block, trained

import lf_graph
from lf_graph.kernels import loss_of, use

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")


def decoder(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=997, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).to("cuda", dtype)


def batch(side: str | None, rows: int = 3, length: int = 200) -> tuple[Tensor, Tensor, Tensor | None]:
    """ids, labels and the padding mask; tokens behind padding get no label."""
    ids = torch.randint(0, 997, (rows, length), generator=torch.Generator().manual_seed(1)).cuda()
    if side is None:
        return ids, ids, None
    used = torch.tensor([length, 1, 77], device="cuda")[:rows, None]
    position = torch.arange(length, device="cuda")
    mask = position < used if side == "right" else position >= length - used
    follows = nn.functional.pad(mask[:, :-1], (1, 0))
    return ids, ids.masked_fill(~(mask & follows), -100), mask.long()


def outcome(model: Any, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def own(model: Any, ids: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False).loss
    return loss


def relative(found: list[Tensor], exact: list[Tensor]) -> float:
    """Largest distance of a tensor from its reference, relative to that."""
    return max(
        float((f.double() - e).norm() / e.norm().clamp(min=1e-12)) for f, e in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_kernels_is_as_near_to_float64_as_before(side: str | None, dtype: torch.dtype) -> None:
    model, inputs = decoder(), batch(side)
    exact = outcome(reference := decoder(torch.float64), own(reference, *inputs))
    model.to(dtype)
    before = relative(outcome(model, own(model, *inputs)), exact)

    report = use(model, attention=True, implementation="triton")
    after = relative(outcome(model, loss_of(model, implementation="triton")(*inputs)), exact)

    assert len(report.exchanged) == 12
    assert after <= max(2 * before, 1e-4)


@pytest.mark.parametrize("outputs", ["same", "autocast"])
def test_under_autocast_it_is_as_near_to_float64_as_before(outputs: Any) -> None:
    model, inputs = decoder(), batch("left")
    exact = outcome(reference := decoder(torch.float64), own(reference, *inputs))
    with torch.autocast("cuda", torch.bfloat16):
        before = relative(outcome(model, own(model, *inputs)), exact)
        use(model, attention=True, norm_outputs=outputs)
        after = relative(outcome(model, loss_of(model)(*inputs)), exact)
    assert after <= 2 * before


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm, Rows, TypedRows])
def test_results_keep_their_dtype(kind: Any, x_dtype: torch.dtype, autocast: bool) -> None:
    model, x = nn.Sequential(kind(64)).cuda(), torch.randn(2, 64, device="cuda", dtype=x_dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        try:
            expected = model(x)
        except RuntimeError:
            pytest.skip("torch does not take these dtypes together on a GPU")
        use(model)
        found = model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_thirty_steps_give_the_same_bits() -> None:
    model, inputs = decoder(), batch("left")
    use(model, attention=True, implementation="triton")
    loss = loss_of(model, implementation="triton")

    def gradients_without_embedding() -> list[Tensor]:  # whose backward in torch adds in any order
        names = [n for n, _ in model.named_parameters()]
        found = outcome(model, loss(*inputs))[1:]
        return [g for n, g in zip(names, found, strict=True) if "embed" not in n]

    first = gradients_without_embedding()
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(gradients_without_embedding(), first, strict=True))


@pytest.mark.parametrize("compiled", ["off", "blocks", "model"])
@pytest.mark.parametrize("side", [None, "left"])
def test_a_captured_step_trains_as_the_eager_model_does(side: str | None, compiled: Any) -> None:
    inputs = [t for t in batch(side) if t is not None]
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = own(model, *inputs, *[None] * (3 - len(inputs)))  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()))
    model = decoder()
    use(model, attention=True, norm_outputs="autocast")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lf_graph.TrainStep(
        model, optimizer, loss=loss_of(model), autocast=torch.bfloat16, compile=compiled
    ) as step:
        found = [float(step(*inputs).loss) for _ in range(5)]
    assert found[-1] < found[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(curve), rtol=1e-2, atol=1e-2)


def test_a_model_moved_to_the_gpu_after_the_exchange_runs_kernels_and_compiles() -> None:
    model = block()
    use(model, norm_outputs="autocast")
    model.cuda()
    x = torch.randn(64, 16, device="cuda")
    exact = [t.double() for t in trained(block().double().cuda(), x.double())]
    assert relative(trained(model, x), exact) < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        eager = trained(model, x)
        compiled = trained(torch.compile(model, fullgraph=True), x)
    assert relative(compiled, [t.double() for t in eager]) < 3e-2
