"""`loongforge train` and `resume` on a simulated device: the bits of a training on the host. contract-only."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from simulated import Simulated
from torch.nn.attention import SDPBackend, sdpa_kernel

import lf_ckpt
from lf_meta import jobs, load_config
from lf_meta.checkpoint import Restored, digest, open_checkpointer
from lf_meta.config import Config, DeviceSection, DistSection
from lf_meta.dist import World, choose_device, choose_precision
from lf_meta.errors import ConfigError
from lf_meta.feed import to_micro_batches
from lf_meta.infer import Sampling
from lf_meta.jobs import generate_text, resume_run, start_run
from lf_meta.metrics import MetricsFile
from lf_meta.rundir import RunDir
from lf_meta.signals import StopSignal

SMALL = [
    *("model.args.layers=1", "model.args.hidden=32", "model.args.ffn=48", "model.args.heads=2"),
    *("model.args.dropout=0.1", "data.max_len=32", "batch.size=4", "batch.accum=2"),
    *("metrics.every=2", "eval.every=0", "eval.batches=1", "ckpt.every=2", "run.steps=4"),
]


class Trainer:
    """Runs in one folder, all on one text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, folder / "text.txt"
        self.text.write_text("\n\n".join(f"record {i}, {i * i} and {'so on ' * (i % 9)}" for i in range(60)))

    def config(self, name: str, kind: str, *overrides: str) -> Config:
        fixed = [f"run.name={name}", f"data.path={self.text}", f"device.type={kind}", "device.precision=fp32"]
        return load_config(None, [*SMALL, *fixed, *overrides])

    def train(self, name: str, kind: str, *overrides: str) -> RunDir:
        with StopSignal() as signal, same_attention(), contextlib.chdir(self.folder):
            assert start_run(self.config(name, kind, *overrides), signal) == 0
        return RunDir(self.folder / "runs" / name)

    def resume(self, run: RunDir, kind: str) -> None:
        config = self.config(run.root.name, kind).anchored()
        with StopSignal() as signal, same_attention(), contextlib.chdir(self.folder):
            assert resume_run(config, run, signal) == 0

    def saved(self, run: RunDir) -> Restored:
        store = open_checkpointer(run.root, self.config("x", "cpu").ckpt, read_only=True)
        try:
            return store.load(None)
        finally:
            store.close()


@contextlib.contextmanager
def same_attention() -> Iterator[None]:
    """The host's fused attention is another sum than the one torch composes for a device without its own."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "Sampling", functools.partial(Sampling, tokens=2))  # of the text behind a run
        yield Trainer(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def straight(trainer: Trainer, simulated: Simulated) -> RunDir:
    """Four steps on the device."""
    since = simulated.log.mark()
    run = trainer.train("straight", simulated.name)
    assert not simulated.log.violations(since)
    assert not simulated.log.counted("cuda", since)
    assert simulated.log.counted("fallback", since)["aten::_fused_adamw_"] == 4 * 2  # groups of parameters
    return run


def losses(run: RunDir) -> list[float]:
    return [float(row["loss"]) for row in MetricsFile(run.metrics).rows() if "loss" in row]


def test_a_training_has_the_losses_and_weights_of_the_host(
    trainer: Trainer, straight: RunDir, device: torch.device
) -> None:
    host = trainer.train("host", "cpu")
    assert len(losses(straight)) == 4
    assert losses(straight) == losses(host)
    a, b = trainer.saved(straight).tensors, trainer.saved(host).tensors
    assert a.keys() == b.keys()
    assert f"rng.{device.type}.0" in a
    assert all(torch.equal(a[n], b[n]) for n in b if not n.startswith("rng."))


def test_resume_goes_on_to_the_same_bits_and_the_host_can_go_on_too(
    trainer: Trainer, straight: RunDir, device: torch.device
) -> None:
    cut = trainer.train("cut", device.type, "run.steps=2")
    moved = RunDir(shutil.copytree(cut.root, cut.root.with_name("moved")))
    whole = trainer.train("again", device.type, "run.steps=2")
    assert digest(trainer.saved(whole)) == digest(trainer.saved(cut))
    trainer.resume(cut, device.type)
    trainer.resume(moved, "cpu")
    first, second, third = (trainer.saved(run) for run in (straight, cut, moved))
    assert first.step == second.step == third.step == 4
    assert digest(first) == digest(second)
    assert losses(cut) == losses(straight)


def test_auto_takes_the_device_and_bf16_runs_on_it(
    trainer: Trainer, straight: RunDir, device: torch.device
) -> None:
    assert choose_device(DeviceSection(), 0) == device
    assert choose_precision(DeviceSection(), device) == "bf16"
    run = trainer.train("lower", "auto", "device.precision=auto", "run.steps=2", "ckpt.backend=torch")
    assert losses(run) != losses(straight)[:2]
    assert losses(run) == pytest.approx(losses(straight)[:2], rel=0.02)


def test_text_is_generated_on_the_device(straight: RunDir, device: torch.device) -> None:
    assert generate_text(str(straight.root), "record ", Sampling(tokens=3, temperature=1.0))


@pytest.mark.parametrize("asked", ["cuda", "npu", "mlu"])
def test_an_explicit_device_that_is_not_here_is_an_error(device: torch.device, asked: str) -> None:
    if asked == device.type:
        assert choose_device(DeviceSection(type=asked), 0) == device
    else:
        with pytest.raises(ConfigError, match=f"{asked} was asked for and torch sees {device.type} instead"):
            choose_device(DeviceSection(type=asked), 0)


@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl", "hccl", "cncl"])
def test_several_ranks_without_a_backend_for_the_device_are_refused_by_name(
    device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = {
        "auto": f"no backend for {device.type} tensors",
        "gloo": "gloo moves cpu and cuda tensors only",
        "nccl": "nccl moves cuda tensors only",
        "hccl": "torch has no hccl",
        "cncl": "torch has no cncl",
    }[backend]
    with pytest.raises(ConfigError, match=said):
        World.from_environment(DeviceSection(), DistSection(backend=backend))


class Rows:
    """A batch whose memory its loader takes back."""

    loss_mask = None

    def __init__(self) -> None:
        self.tokens = torch.arange(32, dtype=torch.uint8).view(4, 8)
        self.lengths = torch.tensor([8, 7, 6, 5], dtype=torch.int32)


def test_a_batch_is_on_the_device_before_its_memory_is_used_again(device: torch.device) -> None:
    batch = Rows()
    (tokens, lengths, _), _ = to_micro_batches(batch, 2, device)  # type: ignore[arg-type]
    batch.tokens.zero_()
    batch.lengths.zero_()
    assert tokens.cpu().tolist() == torch.arange(16).view(2, 8).tolist()
    assert lengths.cpu().tolist() == [8, 7]


def test_a_saved_generator_of_another_device_is_left_out(device: torch.device) -> None:
    state = lf_ckpt.rng_state()
    state.tensors["rng.other.0"] = state.tensors[f"rng.{device.type}.0"] + 0
    lf_ckpt.set_rng_state(state)
