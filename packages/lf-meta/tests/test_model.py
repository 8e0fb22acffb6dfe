"""gr00t_n16_lm: size, causality, positions, and agreement with plain formulas."""

import math
import subprocess
import sys

import pytest
import torch

from lf_meta.errors import ConfigError
from lf_meta.models import build_model
from lf_meta.models.gr00t_lm import IGNORE, SwiGLU, build, next_token_labels, rope_tables, rotate


def test_named_sizes_have_the_documented_parameter_counts() -> None:
    with torch.device("meta"):
        counts = {
            s: sum(p.numel() for p in build(s, v).parameters()) for s, v in [("tiny", 256), ("small", 256)]
        }
        large = build("1.6b", 50257)
    assert 0.7e6 < counts["tiny"] < 1.2e6
    assert 24e6 < counts["small"] < 27e6
    expected = 28 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2 * 50257 * 2048 + 2048
    assert sum(p.numel() for p in large.parameters()) == expected


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = build("tiny", 256)
    loss, count = model(torch.randint(0, 256, (4, 65)), torch.full((4,), 65))
    assert count == 4 * 64
    assert loss.item() / 256 == pytest.approx(math.log(256), abs=0.1)


def test_no_position_sees_a_later_token() -> None:
    torch.manual_seed(0)
    model = build("tiny", 256).double().eval()
    tokens = torch.randint(0, 256, (1, 24))
    changed = tokens.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % 256
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


def test_rotary_attention_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = (t.double() for t in rope_tables(64, 8, 10000.0, torch.device("cpu")))

    def score(i: int, j: int) -> torch.Tensor:
        return rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j])

    assert torch.allclose(score(5, 2), score(40, 37), atol=1e-5)
    assert not torch.allclose(score(5, 2), score(5, 4), atol=1e-5)


def test_swiglu_is_its_formula() -> None:
    ffn = SwiGLU(build("tiny", 8).config).double()
    x = torch.randn(3, 128, dtype=torch.float64)
    gate = x @ ffn.gate.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ ffn.up.weight.T)) @ ffn.down.weight.T
    assert torch.allclose(ffn(x), expected)


def test_labels_stop_at_the_row_length_and_follow_the_mask() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    labels = next_token_labels(tokens, torch.tensor([4, 2, 0]))
    assert labels.tolist() == [[2, 3, 4], [6, IGNORE, IGNORE], [IGNORE] * 3]
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert next_token_labels(tokens, torch.tensor([4, 4, 4]), mask)[0].tolist() == [IGNORE, 3, 4]


@pytest.mark.parametrize(
    ("name", "size", "args", "key"),
    [
        ("gpt9", "tiny", {}, "model.name"),
        ("no.such.module:thing", "tiny", {}, "model.name"),
        ("json:nothing", "tiny", {}, "model.name"),
        ("gr00t_n16_lm", "huge", {}, "model.size"),
        ("gr00t_n16_lm", "tiny", {"width": 3}, "model.args.width"),
        ("gr00t_n16_lm", "tiny", {"heads": 3}, "model.args.heads"),
        ("gr00t_n16_lm", "tiny", {"dropout": 1.5}, "model.args.dropout"),
        ("gr00t_n16_lm", "tiny", {"layers": "four"}, "model.args.layers"),
        ("gr00t_n16_lm", "tiny", {"hidden": 0}, "model.args.hidden"),
        ("gr00t_n16_lm", "tiny", {"layers": -1}, "model.args.layers"),
    ],
)
def test_an_unknown_model_size_or_dimension_names_its_key(
    name: str, size: str, args: dict[str, int], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(name, size, 256, args)
    assert caught.value.key == key


def test_a_model_can_come_from_any_module() -> None:
    assert build_model("lf_meta.models.gr00t_lm:build", "tiny", 16, {"layers": 1}).config.layers == 1


def test_a_job_on_one_model_loads_nothing_that_only_other_models_need() -> None:
    script = (
        "import sys, lf_meta.jobs; from lf_meta.models import build_model\n"
        "path = list(sys.path); build_model('gr00t_n16_lm', 'tiny', 256, {})\n"
        "assert sys.path == path, 'the folder of the command is searched for module:callable only'\n"
        "print([m for m in ('lf_graph', 'torch._dynamo', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
