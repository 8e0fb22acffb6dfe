"""lf-memory's plans of lf-meta's models and of Hugging Face's, beside what a real step allocates."""

import pytest
import torch
import transformers

from lf_memory.gradients import predict, verify
from lf_meta.models import build_model
from lf_meta.models.gr00t_vla_batch import random_batch

MODES = ["fused", "all-alive"]
TOKENS = torch.arange(4 * 64).view(4, 64) * 7 % 1000
LENGTHS = torch.tensor([64, 60, 33, 1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "arguments", "tensors"),
    [
        ("gr00t_n16_lm", {}, "fake"),
        ("gr00t_n16_lm", {}, "real"),
        ("gr00t_n16_lm", {"fused_loss": True}, "real"),  # scales its gradients in place, if they are real
        ("gr00t_n16_moe", {}, "real"),  # torch's fake grouped_mm takes bfloat16 only
    ],
    ids=["dense", "dense, real", "fused loss", "experts"],
)
def test_language_models(name, arguments, tensors, mode):
    torch.manual_seed(0)
    model = build_model(name, "tiny", 1000, arguments)
    plan = predict(model, TOKENS, LENGTHS, mode=mode, tensors=tensors)
    found = verify(plan, model, TOKENS, LENGTHS)
    assert found.within(0.02), f"{found}"


@pytest.mark.parametrize("mode", MODES)
def test_vision_language_action_model(mode):
    torch.manual_seed(0)
    model = build_model("gr00t_n16_vla", "tiny", None, {}, "mapping")
    batch = random_batch(model.config, 2, 8)
    plan = predict(model, batch, mode=mode)
    found = verify(plan, model, batch)
    assert found.within(0.02), f"{found}"


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`"
)  # its new name is not in transformers 5.0
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_llama_of_transformers(mode, checkpointed):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.train()

    def loss(ids):
        return model(input_ids=ids, labels=ids, use_cache=False)

    # transformers makes a mask of fake tensors that it leaves out for real ones
    plan = predict(loss, TOKENS, model=model, mode=mode, tensors="real")
    found = verify(plan, loss, TOKENS, model=model)
    assert found.within(0.02), f"{found}"


def test_a_model_that_notices_fake_tensors_is_found_out():
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)

    def loss(ids):
        return model(input_ids=ids, labels=ids, use_cache=False)

    found = {
        tensors: verify(predict(loss, TOKENS, model=model, tensors=tensors), loss, TOKENS, model=model)
        for tensors in ("fake", "real")
    }
    assert found["real"].same_graph
    assert found["fake"].same_graph == (found["fake"].ratio("saved_bytes") == pytest.approx(1, abs=0.01))


def test_the_published_size_of_the_vision_language_action_model():
    """GR00T N1.6 with 1.62 B trained parameters, planned on the meta device; 4 samples of 32 words in bfloat16."""
    with torch.device("meta"):
        model = build_model("gr00t_n16_vla", "3b", None, {}, "mapping").bfloat16()
    batch = random_batch(model.config, 4, 32)
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    kept, fused = (predict(model, batch, mode=mode, device="cpu") for mode in ("all-alive", "fused"))
    mib = 2**20
    assert kept.parameter_peak_bytes == pytest.approx(3089.8 * mib, rel=1e-4)
    assert fused.parameter_peak_bytes == fused.arena_bytes == pytest.approx(288 * mib, rel=1e-3)
    assert fused.backward_peak_bytes < 0.32 * kept.backward_peak_bytes
    assert fused.share_below(3, "slot", ["parameter"]) == 1
