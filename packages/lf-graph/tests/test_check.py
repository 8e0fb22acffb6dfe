"""check: clean models have no finding, and where a finding is."""

from __future__ import annotations

import pytest
import torch
from check_cases import GPT, TOKENS, Block, X, kinds
from marks import marks_of
from torch import nn

from lf_graph import GraphError
from lf_graph._check import check

at = marks_of(__file__)


def test_a_clean_model_has_no_finding_and_uses_every_parameter():
    model = GPT().train()
    report = check(model, TOKENS)
    assert report.findings == ()
    assert report.ok
    assert report.random
    assert report.operations > 100
    assert report.parameters.used == tuple(n for n, _ in model.named_parameters(remove_duplicate=False))
    assert report.parameters.unused == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_clean_outside_and_inside_of_the_function(dtype):
    model = GPT().train()
    with torch.autocast("cpu", dtype):
        assert check(model, TOKENS).findings == ()

    def inside(tokens):
        with torch.autocast("cpu", dtype):
            return model(tokens)

    assert check(inside, TOKENS).findings == ()


def test_a_gradient_scaler_reads_the_device_and_scaling_by_hand_does_not():
    model = nn.Linear(3, 3)
    scale = torch.full((), 1024.0)
    assert check(lambda x: model(x).sum() * scale, X).findings == ()


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_every_attention_backend_is_clean(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        assert check(Block().eval(), torch.randn(2, 4, 16)).findings == ()


SEQUENCE = torch.randn(2, 4, 16)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (SEQUENCE,)),
        (nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), (SEQUENCE, SEQUENCE)),
        (nn.LSTM(16, 8, batch_first=True), (SEQUENCE,)),
        (nn.Conv1d(4, 3, 3), (SEQUENCE,)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(16, 3)), (SEQUENCE,)),
        (
            nn.Sequential(nn.GroupNorm(2, 4), nn.Dropout1d(), nn.InstanceNorm1d(4, track_running_stats=True)),
            (SEQUENCE,),
        ),
    ],
)
def test_torchs_own_layers_are_clean(model, inputs):
    assert check(model.train(), *inputs).findings == ()


def test_a_compiled_module_is_looked_into():
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), Scaled()), backend="eager")
    report = check(model, X)
    assert kinds(report) == ["host_read"]
    assert report.findings[0].where == at("scaled_by_item")


class Scaled(nn.Module):
    def forward(self, x):
        return x * x.sum().item()  # at: scaled_by_item


def test_a_lazy_module_has_to_be_run_once_before():
    with pytest.raises(GraphError, match="run the model once"):
        check(nn.LazyLinear(3), X)


def test_inference_mode_is_checked_too():
    with torch.inference_mode():
        assert kinds(check(nn.Linear(3, 3), X.clone())) == []


@pytest.mark.parametrize("cache", [True, False])
def test_hugging_face_llama_is_clean(cache):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(config).train()
    report = check(model, input_ids=TOKENS, labels=TOKENS, use_cache=cache)
    assert report.findings == (), str(report)
    assert report.parameters.unused == ()


def test_a_line_that_several_layers_run_is_one_row_and_a_finding_for_each():
    model = nn.Sequential(Scaled(), nn.Linear(3, 3), Scaled(), Scaled())
    report = check(model, X)
    assert [f.module for f in report.findings] == ["0", "2", "3"]
    assert str(report).startswith("1 error, 0 warnings")
    assert "0 and 2 more" in str(report)


def test_a_finding_names_the_submodule_it_is_in():
    class Inner(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"deep": Inner()})["deep"])
    assert check(model, X).findings[0].module == "1"


def test_a_call_from_a_library_inside_torch_is_told_at_the_users_line():
    def sample(x):
        return torch.distributions.Normal(x, x.abs() + 1, validate_args=True).mean  # at: distribution

    assert check(sample, X).findings[0].where == at("distribution")
