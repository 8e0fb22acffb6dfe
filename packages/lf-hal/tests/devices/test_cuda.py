"""The CUDA probe and the load of GPUs where there are any."""

import os
import subprocess
import sys

import pytest
import torch

from lf_hal.evidence import Evidence
from lf_hal.probe import Devices, State, probe
from lf_hal.top import Monitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_gpus_are_ready_with_the_names_that_torch_gives() -> None:
    (found,) = probe(120.0, ["cuda"])
    assert found.state is State.READY, found.line()
    assert list(found.devices) == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert found.versions["torch cuda"] == torch.version.cuda
    assert Devices(lambda: [found]).require("cuda:0").torch_device() == torch.device("cuda:0")


def test_hidden_gpus_are_invisible_and_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        (found,) = probe(120.0, ["cuda"])
        assert found.state is State.INVISIBLE, found.line()
        assert "CUDA_VISIBLE_DEVICES" in found.reason


def test_probing_leaves_this_process_without_a_context() -> None:
    code = "import lf_hal, sys; lf_hal.probe(120.0, ['cuda']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=180).returncode == 0


def test_the_load_of_each_gpu_is_shown() -> None:
    rows = {row.device: row for row in Monitor().look().rows}
    for index in range(torch.cuda.device_count()):
        row = rows[f"cuda:{index}"]
        assert row.total
        assert row.evidence is Evidence.NEEDS_GPU
