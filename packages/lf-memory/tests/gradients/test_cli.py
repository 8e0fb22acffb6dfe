"""python -m lf_memory.gradients report, as a user runs it."""

import json
import operator
import subprocess
import sys

import pytest

from lf_memory.gradients.__main__ import main

CASE = """
import torch
from torch import nn

class Loss(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))
    def forward(self, x):
        return (self.net(x) - x).square().mean()

def small():
    return Loss(256), (torch.ones(8, 64),)

def huge():  # 16 TiB
    model = Loss(2**36)
    return (lambda x: model(x), [torch.ones(1, 64)], model)

def wrong():
    return Loss(8)

def broken():
    raise KeyError("no such width")

def broken_loss():
    def loss(x):
        return x @ torch.ones(3)
    return loss, (torch.ones(8, 64, requires_grad=True),)
"""


@pytest.fixture
def case(tmp_path, monkeypatch):
    (tmp_path / "some_case.py").write_text(CASE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_case"
    sys.modules.pop("some_case", None)


def test_a_report_is_printed_for_each_mode_and_verified(case, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lf_memory.gradients", "report", f"{case}:small", "--verify"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    for words in ("all-alive, by dry run", "fused, by", "bucket of 25 MiB, by", "One step, fused", "1.0000"):
        assert words in result.stdout


def test_json_says_what_is_counted(case, capsys):
    assert (
        main(["report", f"{case}:small", "--mode", "fused", "--verify", "--json", "--accumulation", "2"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    (plan,) = document["plans"]
    assert plan["policy"] == {"mode": "fused", "bucket_bytes": 25 << 20, "accumulation": 2}
    assert plan["parameter_peak_bytes"] == plan["arena_bound_bytes"] == (2 * 64 * 256 + 256 + 64) * 4
    assert "parameter gradients below 3 steps, share of slots" in plan["shares"]
    assert "activation gradients below 5 steps, share of buffers" in plan["shares"]
    (checked,) = document["verified"]
    assert checked["ratio"] == pytest.approx(1, abs=0.02)
    assert checked["same_graph"]
    assert checked["measured"]["saved_bytes"] == plan["saved_bytes"]


def test_a_model_larger_than_memory_is_planned(case, capsys):
    assert main(["report", f"{case}:huge", "--mode", "fused", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["parameter_peak_bytes"] == 65 * 2**36 * 4  # weight and bias of one layer


def test_plans_are_kept_and_rebuilt(case, capsys, tmp_path):
    arguments = ["report", f"{case}:small", "--mode", "fused", "--dag-cache-path", str(tmp_path / "dag.json")]
    for extra, origin in ([], "made: "), ([], "read from"), (["--rebuild-dag"], "made: asked to rebuild"):
        assert main(arguments + extra) == 0
        assert origin in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["some_case:nothing", "no_such_module:x", "some_case", "some_case:wrong", ":small"]
)
def test_a_case_that_is_none_is_named(case, capsys, name):
    assert main(["report", name]) == 1
    error = capsys.readouterr().err
    assert name.split(":")[0] in error
    assert "module:callable" in error or "return (fn, args)" in error


@pytest.mark.parametrize(
    ("name", "cause", "line"),
    [
        ("broken", "KeyError: 'no such width'", 'raise KeyError("no such width")'),
        ("broken_loss", "Error: ", "return x @ torch.ones(3)"),
    ],
)
def test_what_a_case_raises_is_a_message_with_its_line(case, capsys, name, cause, line):
    assert main(["report", f"{case}:{name}", "--mode", "fused"]) == 1
    error = capsys.readouterr().err
    assert f"error: {case}:{name} raised" in error
    assert cause in error
    assert "some_case.py:" in error
    assert line in error
    assert "Traceback" not in error


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_case.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["report", "failing_case:small"]) == 1
    error = capsys.readouterr().err
    assert "NameError" in error
    assert "failing_case.py:1" in error


def test_a_fault_of_our_own_keeps_its_traceback(case, monkeypatch):
    monkeypatch.setattr("lf_memory.gradients.__main__.predict", operator.index)  # raises in our frame
    with pytest.raises(TypeError, match="index"):
        main(["report", f"{case}:small"])
