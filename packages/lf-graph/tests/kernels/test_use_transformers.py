"""use(), our attention and loss_of() in models of transformers: tiny, of random weights."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lf_graph
from lf_graph._errors import GraphError
from lf_graph.kernels import UnsupportedAttentionError, loss_of, register_attention, use

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral"]
NORMS = {"Llama": 5, "Qwen2": 5, "Qwen3": 9, "Mistral": 5}


def decoder(family: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))  # norms whose weights are not all one
    return model


def tokens(rows: int = 3, length: int = 11) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, rows: int = 3, length: int = 11) -> Tensor:
    """int64 [rows, length], one row full and one with a single token."""
    used = torch.tensor([length, 1, 6])[:rows, None]
    position = torch.arange(length)
    return (position < used if side == "right" else position >= length - used).long()


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def labels_of(ids: Tensor, mask: Tensor | None) -> Tensor:
    """The ids, but for padding and the first token behind it, which only padding could foretell."""
    if mask is None:
        return ids
    follows = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return ids.masked_fill((mask == 0) | (follows == 0), -100)


def near(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_gated_branches_are_exchanged_and_the_model_trains_as_before(family: str) -> None:
    model, ids = decoder(family), tokens()
    before = model(input_ids=ids, labels=ids)
    expected = gradients(before.loss, model)

    report = use(model, implementation="plain")

    kinds = list(report.exchanged.values())
    assert (kinds.count("rms_norm"), kinds.count("swiglu"), len(kinds)) == (
        NORMS[family],
        2,
        NORMS[family] + 2,
    )
    assert report.left == {}
    after = model(input_ids=ids, labels=ids)
    near(after.logits, before.logits)
    near(gradients(after.loss, model), expected)
    report.undo()
    assert torch.equal(model(input_ids=ids).logits, before.logits)


def test_kernels_in_the_interpreter_train_as_before() -> None:
    model, ids = decoder("Qwen3"), tokens(2, 5)
    expected = gradients(model(input_ids=ids, labels=ids).loss, model)
    use(model, attention=True, implementation="triton")
    near(gradients(model(input_ids=ids, labels=ids).loss, model), expected)


def test_gemma_and_other_activations_are_left_with_reasons() -> None:
    report = use(decoder("Gemma"))
    assert report.exchanged.keys() == {"model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"}
    assert len(report.left) == 7  # five norms whose weight is added to one, two branches gated by GELU


def test_packed_branches_of_phi_and_layer_norms_and_gelu_of_siglip() -> None:
    assert list(use(decoder("Phi3", pad_token_id=0)).exchanged.values()).count("swiglu") == 2
    vision = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
    )
    pixels = torch.randn(2, 3, 16, 16)
    expected = vision(pixel_values=pixels).last_hidden_state
    found = list(use(vision, attention=True, implementation="plain").exchanged.values())
    assert (found.count("layer_norm"), found.count("gelu_tanh"), found.count("attention")) == (6, 3, 1)
    near(vision(pixel_values=pixels).last_hidden_state, expected)


# -- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attention_trains_as_sdpa_does(family: str, side: str | None) -> None:
    model, ids = decoder(family), tokens()
    mask = padding(side) if side else None
    labels = labels_of(ids, mask)
    before = model(input_ids=ids, labels=labels, attention_mask=mask)
    expected = gradients(before.loss, model)

    with use(model, norms=False, activations=False, attention=True, implementation="plain") as report:
        assert report.exchanged == {"": "attention"}
        after = model(input_ids=ids, labels=labels, attention_mask=mask)
        near(gradients(after.loss, model), expected)
        used = slice(None) if mask is None else mask.bool()
        near(after.logits[used], before.logits[used])

    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_grouped_heads(kv_heads: int) -> None:
    model, ids = decoder(num_key_value_heads=kv_heads), tokens()
    expected = model(input_ids=ids, attention_mask=padding("left")).logits
    model.set_attn_implementation(register_attention("plain"))
    used = padding("left").bool()
    near(model(input_ids=ids, attention_mask=padding("left")).logits[used], expected[used])


def test_what_padding_holds_changes_nothing() -> None:
    model, ids, mask = decoder(), tokens(), padding("left")
    model.set_attn_implementation(register_attention("plain"))
    other = torch.where(mask.bool(), ids, 5)
    found = [model(input_ids=i, attention_mask=mask).logits[mask.bool()] for i in (ids, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize("side", [None, "left"])
def test_attention_generates_the_same_tokens(side: str | None) -> None:
    model, ids = decoder().eval(), tokens()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = padding(side) if side else torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation(register_attention("plain"))
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)


def test_attention_of_an_encoder_with_padding() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model, ids = transformers.BertModel(config), tokens()
    for mask in (None, padding("left"), padding("right")):
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        with use(model, attention=True, implementation="plain"):
            found = model(input_ids=ids, attention_mask=mask).last_hidden_state
        near(found, expected)  # of padding too: every query sees all tokens


def test_sequences_packed_into_one_row() -> None:
    model = decoder()
    lengths = [4, 1, 6]
    ids = tokens(1, 11)
    alone = [model(input_ids=part).logits for part in ids.split(lengths, 1)]
    offsets = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model.set_attn_implementation(register_attention("plain"))

    packed = model(
        input_ids=ids,
        position_ids=positions,
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=6,
        max_length_k=6,
    )

    near(packed.logits, torch.cat(alone, 1))
    with pytest.raises(UnsupportedAttentionError, match="pass cu_seq_lens_q"):
        model(input_ids=ids, position_ids=positions, use_cache=False)


def test_a_window_as_long_as_the_keys_is_none_and_a_shorter_one_is_refused() -> None:
    for window in (11, 12):
        model, ids = decoder("Mistral", sliding_window=window), tokens()
        expected = model(input_ids=ids).logits
        model.set_attn_implementation(register_attention("plain"))
        near(model(input_ids=ids).logits, expected)
    model = decoder("Mistral", sliding_window=10)
    model.set_attn_implementation(register_attention("plain"))
    with pytest.raises(UnsupportedAttentionError, match="a window of 10 keys out of 11"):
        model(input_ids=ids)


def refused(model: Any, **inputs: Any) -> str:
    model.set_attn_implementation(register_attention("plain"))
    with pytest.raises(UnsupportedAttentionError) as caught:
        model(input_ids=tokens(), **inputs)
    return str(caught.value)


def test_refuses_what_it_does_not_compute() -> None:
    assert "dropout 0.1" in refused(decoder(attention_dropout=0.1).train())
    assert "a soft cap" in refused(decoder("Gemma2", sliding_window=64))
    assert "a mask of its own (torch.bool [3, 1, 11, 11])" in refused(
        decoder(), attention_mask=torch.ones(3, 1, 11, 11, dtype=torch.bool)
    )
    cache = transformers.StaticCache(decoder().config, max_cache_len=32)
    assert "a cache of a fixed size" in refused(decoder(), past_key_values=cache)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    forward = transformers.AttentionInterface()[register_attention("plain")]
    for option in ({"s_aux": torch.zeros(2)}, {"position_bias": q}, {"output_attentions": True}):
        with pytest.raises(UnsupportedAttentionError, match=next(iter(option))):
            forward(nn.Identity(), q, k, k, None, **option)


def test_a_mask_with_gaps_fails_on_the_device() -> None:
    model, mask = decoder(), torch.ones(3, 11, dtype=torch.long)
    mask[1, 4] = 0
    model.set_attn_implementation(register_attention("plain"))
    with pytest.raises(RuntimeError, match="must be side by side"):
        model(input_ids=tokens(), attention_mask=mask)


def test_a_row_of_padding_only_is_finite() -> None:
    model, mask = decoder(), padding("right")
    mask[1] = 0
    model.set_attn_implementation(register_attention("plain"))
    out = model(input_ids=tokens(), attention_mask=mask, labels=labels_of(tokens(), mask))
    assert all(g.isfinite().all() for g in gradients(out.loss, model))


def test_names_and_errors_of_the_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [register_attention(i) for i in ("auto", "triton", "plain")] == [
        "lf_graph", "lf_graph_triton", "lf_graph_plain",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="implementation='fast'"):
        register_attention("fast")  # type: ignore[arg-type]
    assert "of which there is none" in use(nn.Linear(2, 2), attention=True).left[""]
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(GraphError, match="pip install -U transformers"):
        register_attention()


def test_a_copy_and_a_pickle_keep_attention_and_modules() -> None:
    model, ids = decoder(), tokens()
    use(model, attention=True, implementation="plain")
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(input_ids=ids).logits, model(input_ids=ids).logits)


# -- the loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "GPTNeoX", "Phi"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_loss_and_its_gradients_are_those_of_the_model(family: str, side: str | None) -> None:
    model, ids = decoder(family).eval(), tokens()
    mask = padding(side) if side else None
    labels = labels_of(ids, mask)
    expected = model(input_ids=ids, labels=labels, attention_mask=mask).loss

    loss = loss_of(model)(ids, labels, mask)

    assert isinstance(loss, Tensor)
    near(loss, expected)
    near(gradients(loss, model), gradients(expected, model))


def test_the_sum_comes_with_its_count() -> None:
    model, ids = decoder(), tokens()
    labels = labels_of(ids, padding("right"))
    total, count = loss_of(model, reduction="sum")(ids, labels, padding("right"))
    assert int(count) == int((labels[:, 1:] != -100).sum())
    near(total / count, model(input_ids=ids, labels=labels, attention_mask=padding("right")).loss)


def test_a_model_that_does_more_with_its_logits_is_refused_and_stays_in_its_modes() -> None:
    model = decoder("Gemma2", final_logit_softcapping=0.5).train()
    model.model.norm.eval()
    modes = [m.training for m in model.modules()]
    with pytest.raises(GraphError, match="does more with its logits"):
        loss_of(model)
    assert [m.training for m in model.modules()] == modes


def test_models_without_a_head_or_numbers_are_refused() -> None:
    with pytest.raises(GraphError, match="Sequential does not tell"):
        loss_of(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(GraphError, match="does not tell"):
        loss_of(decoder().model)
    with torch.device("meta"), pytest.raises(GraphError, match="meta device"):
        loss_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)))
    with pytest.raises(ValueError, match="reduction='none'"):
        loss_of(decoder(), reduction="none")  # type: ignore[arg-type]


# -- with the rest of lf-graph and torch --------------------------------------------------------------------


def eager_curve(batch: tuple[Tensor, ...]) -> list[float]:
    """Losses of the model as it is."""
    model = decoder("Qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(**dict(zip(("input_ids", "labels", "attention_mask"), batch, strict=False))).loss
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()))
    return curve


@pytest.mark.parametrize("padded", [False, True])
def test_the_whole_model_trains_in_a_captured_step_as_before(padded: bool) -> None:
    ids, mask = tokens(), padding("left") if padded else None
    batch = (ids, labels_of(ids, mask), *([] if mask is None else [mask]))
    model = decoder("Qwen3")
    use(model, attention=True, implementation="plain")
    loss = loss_of(model, implementation="plain")

    with lf_graph.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss=loss) as step:
        curve = [float(step(*batch).loss) for _ in range(5)]

    assert curve[-1] < curve[0]
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(eager_curve(batch)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_a_dry_run_finds_nothing(padded: bool) -> None:
    model, ids = decoder(), tokens()
    use(model, attention=True, implementation="plain")
    inputs = (ids, ids, padding("left")) if padded else (ids, ids)
    report = lf_graph.check(loss_of(model, implementation="plain"), *inputs)
    assert report.ok, str(report)


def test_model_and_loss_compile_as_one_graph() -> None:
    model, ids, mask = decoder(), tokens(), padding("left")
    use(model, attention=True, implementation="plain")
    loss = loss_of(model, implementation="plain")
    labels = labels_of(ids, mask)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = loss(ids, labels, mask)
    found = compiled(ids, labels, mask)
    near(found, expected)
    near(gradients(found, model), gradients(expected, model))
