"""gr00t_n16_vla: size, shapes, what is trained, and that neither padding nor a split of the batch changes a result."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from vla_cases import TEXT, batch_for, fixed, in_float64, rows_of, tiny

from lf_meta.errors import ConfigError
from lf_meta.models import build_model, gr00t_vla
from lf_meta.models.gr00t_vla import GR00TVLA
from lf_meta.models.gr00t_vla_batch import check_batch


def number_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def test_3b_has_the_parameters_of_the_published_model() -> None:
    with torch.device("meta"):
        model = gr00t_vla.build("3b")
    # millions in the public key dump of GR00T-N1.6-3B, which also counts lm_head and a pooling head nobody calls
    head = [model.dit, model.action_encoder, model.action_decoder, model.state_encoder, model.position]
    millions = [round(number_of(m.parameters()) / 1e6, 1) for m in head]
    assert millions == [1091.7, 232.9, 37.8, 54.6, 1.6]
    backbone = [model.language, model.vision, model.connector]
    unused = [151_680 * 2048, number_of(nn.MultiheadAttention(1152, 16).parameters()), 0]
    unused[1] += 3 * 1152 + 2 * 1152 * 4304 + 4304 + 1152
    found = [round((number_of(m.parameters()) + n) / 1e6, 1) for m, n in zip(backbone, unused, strict=True)]
    assert found == [1426.7, 427.7, 13.6]
    assert number_of(model.parameters()) == 2_960_729_840
    assert number_of(p for p in model.parameters() if p.requires_grad) == 1_619_968_000


def test_tiny_has_every_part_in_small() -> None:
    assert 0.5e6 < number_of(tiny().parameters()) < 1.2e6
    dit = tiny().dit
    view = ("text", "text_mask", "image", "image_mask")
    seen = [dit.seen_by(i, view)[:1] for i in range(len(dit.blocks))]  # type: ignore[arg-type]
    assert seen == [("text",), (), ("image",), (), ("text",), (), ("image",), ()]


def test_stages_have_their_shapes_and_compose_to_forward() -> None:
    model = tiny().eval()
    batch = batch_for(model)
    tokens = model.config.image_tokens + TEXT
    hidden = model.encode_frozen(batch)
    context = model.encode_tuned(hidden)
    assert hidden.shape == context.shape == (3, tokens, model.config.text_hidden)
    assert not hidden.requires_grad
    assert context.requires_grad
    loss, count = model.head_loss(context, batch, **fixed(batch))
    whole, same_count = model(batch, **fixed(batch))
    assert torch.equal(loss, whole)
    assert count == same_count == batch["action_mask"].sum()
    assert model.act(batch).shape == batch["action"].shape


def test_blocks_are_the_repeated_modules_in_the_order_they_run() -> None:
    model = tiny()
    ran: list[nn.Module] = []
    for block in model.blocks():
        block.register_forward_hook(lambda module, *_: ran.append(module))
    model(batch_for(model))
    assert ran == list(model.blocks())
    assert len(ran) == 2 + 2 + 2 + 8


def test_forward_is_one_graph_for_the_compiler() -> None:
    small = {"dit_layers": 4, "vision_layers": 1, "text_layers": 2, "tuned_layers": 1}
    model = tiny(dropout=0.0, state_loss=0.1, binned_loss=0.1, image_size=48, **small)
    batch = batch_for(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch, **fixed(batch))[0], model(batch, **fixed(batch))[0])


def test_only_the_tuned_parts_get_a_gradient() -> None:
    model = tiny(state_loss=0.1, binned_loss=0.1)
    model(batch_for(model))[0].backward()
    frozen = [*model.frozen_modules(), model.language.norm]
    still = {id(p) for m in frozen for p in m.parameters()}
    for name, p in model.named_parameters():
        assert (p.grad is None) == (id(p) in still), name
        assert id(p) in still or p.grad.any(), name  # type: ignore[union-attr]


def test_only_the_slots_of_the_embodiments_in_the_batch_get_a_gradient() -> None:
    model = tiny()
    batch = batch_for(model)
    batch["embodiment_id"] = torch.tensor([2, 0, 2])
    model(batch)[0].backward()
    tables = [p for n, p in model.named_parameters() if p.dim() >= 2 and p.shape[0] == 4 and "coder" in n]
    assert len(tables) == 14
    for table in tables:
        assert table.grad is not None
        assert table.grad.flatten(1).any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("extra", [{}, {"state_loss": 0.3, "binned_loss": 0.2}])
def test_any_split_into_micro_batches_gives_the_same_sum_count_and_gradient(extra: dict[str, float]) -> None:
    model = tiny(**extra).double().eval()
    batch = in_float64(batch_for(model, rows=5))
    given = fixed(batch)

    def add_up(cuts: list[slice]) -> tuple[float, int, Tensor]:
        model.zero_grad()
        parts = [model(rows_of(batch, s), **rows_of(given, s)) for s in cuts]
        loss, count = (torch.stack(x).sum() for x in zip(*parts, strict=True))
        (loss / count).backward()
        return loss.item(), count.item(), model.dit.blocks[0].up.weight.grad.clone()

    whole = add_up([slice(0, 5)])
    assert whole[1] == batch["action_mask"].sum()
    for cuts in ([slice(0, 1), slice(1, 5)], [slice(i, i + 1) for i in range(5)]):
        split = add_up(cuts)
        assert split[0] == pytest.approx(whole[0], rel=1e-12)
        assert split[1] == whole[1]
        assert torch.allclose(split[2], whole[2], rtol=1e-9, atol=1e-14)


def test_padding_never_changes_a_result() -> None:
    model = tiny(binned_loss=0.1, state_loss=0.1).double().eval()
    batch = in_float64(batch_for(model, rows=4))
    given = fixed(batch)
    batch["lengths"] = torch.tensor([11, 9, 20, 14])
    together = [
        model(rows_of(batch, slice(i, i + 1)), **rows_of(given, slice(i, i + 1)))[0] for i in range(4)
    ]
    assert model(batch, **given)[0].item() == pytest.approx(sum(together).item(), rel=1e-12)
    for row, length in enumerate(batch["lengths"]):
        one, one_given = (rows_of(x, slice(row, row + 1)) for x in (batch, given))
        alone = one | {"input_ids": one["input_ids"][:, :length]}
        assert model(alone, **one_given)[0].item() == pytest.approx(together[row].item(), rel=1e-12)
    for padding in (0, 7, model.config.image_token):
        after = torch.arange(batch["input_ids"].shape[1]) >= batch["lengths"][:, None]
        other = batch | {"input_ids": torch.where(after, padding, batch["input_ids"])}
        assert model(other, **given)[0].item() == pytest.approx(sum(together).item(), rel=1e-12)


def test_an_empty_row_adds_nothing_and_stays_finite() -> None:
    model = tiny(binned_loss=0.1).double().eval()
    batch = in_float64(batch_for(model, rows=2))
    given = fixed(batch)
    batch["lengths"][1] = 0
    batch["action_mask"][1] = False
    check_batch(model.config, batch)
    loss, count = model(batch, **given)
    alone, alone_count = model(rows_of(batch, slice(0, 1)), **rows_of(given, slice(0, 1)))
    assert (loss.item(), count) == (pytest.approx(alone.item(), rel=1e-12), alone_count)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_every_input_matters() -> None:
    model = tiny().double().eval()
    batch = in_float64(batch_for(model, rows=2))
    given = fixed(batch)
    before = model(batch, **given)[0]
    changes = {
        "pixel_values": 255 - batch["pixel_values"],
        "state": batch["state"] + 1,
        "action": batch["action"] / 2,
        "embodiment_id": (batch["embodiment_id"] + 1) % 4,
        "input_ids": batch["input_ids"] - (torch.arange(20) == 8).long(),  # the first word
        "lengths": batch["lengths"].clamp(max=9),
        "action_mask": ~batch["action_mask"],
    }
    for key, changed in changes.items():
        assert not torch.equal(model(batch | {key: changed}, **given)[0], before), key
    for key in given:
        assert not torch.equal(model(batch, **given | {key: given[key] / 2})[0], before), key


def test_image_tokens_stand_where_their_placeholders_are() -> None:
    model = tiny().double().eval()
    batch = in_float64(batch_for(model, rows=1))
    ids = batch["input_ids"][0]
    image, text = ids[:8], ids[8:]
    moved = torch.cat((text[:3], image[:4], text[3:5], image[4:], text[5:]))
    batch["lengths"][:] = 20
    one = batch | {"input_ids": moved[None]}
    first = model.encode_frozen(one)
    swapped = one | {"pixel_values": one["pixel_values"].flip(1)}
    second = model.encode_frozen(swapped)
    assert torch.equal(first[:, :3], second[:, :3])  # causal: nothing before the first image knows of it
    assert not torch.allclose(first[:, 3:7], second[:, 3:7])


def test_both_forms_of_images_are_the_same_image() -> None:
    model = tiny().eval()
    batch = batch_for(model)
    normalised = (batch["pixel_values"].movedim(-1, -3) / 255 - 0.5) / 0.5
    assert torch.allclose(
        model.encode_frozen(batch), model.encode_frozen(batch | {"pixel_values": normalised}), atol=1e-5
    )


def test_dropout_is_on_in_training_only() -> None:
    model = tiny()
    batch = batch_for(model)
    given = fixed(batch)
    assert not torch.equal(model(batch, **given)[0], model(batch, **given)[0])
    model.eval()
    assert torch.equal(model(batch, **given)[0], model(batch, **given)[0])


def test_bfloat16_autocast_on_frozen_bfloat16_weights_is_close_to_float32() -> None:
    model = tiny(dropout=0.0, state_loss=0.1, binned_loss=0.1)
    batch = batch_for(model)
    exact = model(batch, **fixed(batch))[0]
    model.cast_frozen(torch.bfloat16)
    assert {p.dtype for m in model.frozen_modules() for p in m.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a norm whose input and weight differ in dtype warns and is not fused
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(batch, **fixed(batch))
        loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_state_dropout_replaces_the_state_of_some_samples_in_training() -> None:
    model = tiny(dropout=0.0, state_dropout=0.5).double()
    batch = in_float64(batch_for(model, rows=1))
    given = fixed(batch)
    kept = model.eval()(batch, **given)[0]
    assert model.mask_token is not None
    with torch.no_grad():
        model.mask_token.add_(1)
    assert torch.equal(model(batch, **given)[0], kept)
    seen = {round(model.train()(batch, **given)[0].item(), 6) for _ in range(20)}
    assert len(seen) == 2
    assert round(kept.item(), 6) in seen
    elsewhere = batch | {"state": batch["state"] + 1}
    assert len(seen & {round(model(elsewhere, **given)[0].item(), 6) for _ in range(20)}) == 1


def test_state_noise_is_on_in_training_only() -> None:
    model = tiny(dropout=0.0, state_noise=0.3)
    batch = batch_for(model)
    given = fixed(batch)
    assert not torch.equal(model(batch, **given)[0], model(batch, **given)[0])
    model.eval()
    assert torch.equal(model(batch, **given)[0], model(batch, **given)[0])


def test_noise_and_time_come_from_the_default_generator() -> None:
    model = tiny().eval()
    batch = batch_for(model)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(batch)[0]

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    torch.manual_seed(1)
    noise, time = torch.randn_like(batch["action"]), model.sample_time(3, torch.device("cpu"))
    assert torch.equal(seeded(1), model(batch, noise=noise, time=time)[0])


def test_sampled_times_have_the_published_distribution() -> None:
    torch.manual_seed(0)
    ours = tiny().sample_time(200_000, torch.device("cpu")).double()
    theirs = 0.999 * (1 - torch.distributions.Beta(1.5, 1.0).sample((200_000,)).double())
    assert ours.min() >= 0
    assert ours.max() < 1
    quantiles = torch.linspace(0.01, 0.99, 25, dtype=torch.float64)
    # the standard error of a quantile of 2e5 draws is below 0.002 in this range
    assert torch.allclose(ours.quantile(quantiles), theirs.quantile(quantiles), atol=0.008)


def test_acting_is_euler_integration_of_the_predicted_velocity() -> None:
    model = tiny().double().eval()
    batch = in_float64(batch_for(model))
    start = fixed(batch)["noise"]
    known = torch.randn_like(start)
    given = {"noise": start, "steps": 4}

    class Towards(nn.Module):
        """A decoder whose velocity leads from the start to ``known`` in unit time."""

        def forward(self, tokens: Tensor, embodiment: Tensor) -> Tensor:
            return known - start

    model.action_decoder = Towards()  # type: ignore[assignment]
    buckets: list[int] = []
    model.dit.register_forward_pre_hook(lambda _, args: buckets.extend(args[1].tolist()))
    assert torch.allclose(model.act(batch, **given), known)
    assert buckets == [b for b in (0, 250, 500, 750) for _ in range(3)]


class Refuse(TorchDispatchMode):
    """Fails on operators through which a value reaches the host, or whose output shape depends on values."""

    READS = frozenset(
        {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique_dim", "_unique2", "equal"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{name} reads a value"
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_in_a_step() -> None:
    model = tiny(state_loss=0.1, binned_loss=0.1, state_dropout=0.5, state_noise=0.1, image_size=48)
    batch = batch_for(model)
    with Refuse():
        loss, count = model(batch)
        (loss / count).backward()
        model.act(batch)
        model.act_binned(batch)
    with pytest.raises(AssertionError, match="reads a value"), Refuse():
        loss.item()


def test_a_model_for_other_batches_is_refused() -> None:
    model = build_model("gr00t_n16_vla", "tiny", None, {"horizon": 4}, batch_kind="mapping")
    assert isinstance(model, GR00TVLA)
    assert model.config.horizon == 4
    module = "lf_meta.models.gr00t_vla:build"
    cases = (
        ("gr00t_n16_vla", "tokens", "batch_kind='mapping'"),
        ("gr00t_n16_lm", "mapping", "batch_kind='tokens'"),
        (module, "tokens", "batch_kind='mapping'"),
    )
    for name, kind, way_out in cases:
        with pytest.raises(ConfigError, match=f"these are {kind} batches: .*{way_out}"):
            build_model(name, "tiny", 256 if name != module else 320, {}, batch_kind=kind)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_repeats_the_eager_one() -> None:
    model = tiny(dropout=0.0).cuda()
    batch = {k: v.cuda() for k, v in batch_for(model).items()}
    given = {k: v.cuda() for k, v in fixed(batch_for(model)).items()}
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> tuple[Tensor, ...]:
        loss, count = model(batch, **given)
        return (loss, *torch.autograd.grad(loss / count, trained))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [step() for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
