"""The job as a user meets it: default run, errors, full disks, twins, commands."""

import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch

import lf_ckpt
import lf_format as lff


@pytest.mark.slow
def test_the_default_run_learns_english_text(cli: Any) -> None:
    output = cli.run("train", cold=True)
    run = cli.folder / "runs" / "gr00t_n16_lm-tiny-001"
    losses = [loss for _, (loss, _) in sorted(cli.losses(run.name).items())]
    assert len(losses) == 300
    assert losses[0] == pytest.approx(math.log(256), abs=0.15)
    assert mean(losses[-20:]) < 2.6
    assert "packed Python's language reference" in output
    assert "sample after step 300" in output
    assert "next: loongforge infer" in output
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = cli.run(
        "infer", str(run), "--prompt", "Python ", "--tokens", "40", "--temperature", "0", cold=True
    )
    assert text.startswith("Python ")
    assert len(text) > 40
    assert "eval loss" in cli.run("eval", str(run))
    assert cli.run("eval", str(run)) == cli.run("eval", str(run), "loader.backend=torch")


def test_an_existing_run_is_never_overwritten(cli: Any) -> None:
    cli.train("mine", "run.steps=2")
    assert "loongforge resume runs/mine" in cli.train("mine", "run.steps=2", code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optim.lrr=1"], "optim.lrr: unknown setting; the nearest is optim.lr"),
        (["absent.yaml"], "absent.yaml"),
        (["batch.size=7", "batch.accum=2"], "batch.accum"),
        (["model.size=huge"], "model.size"),
        (["model.args.width=3"], "model.args.width"),
        (["data.path=/nonexistent.txt"], "data.path"),
        (["data.tokenizer=/nonexistent.json"], "tokenizer"),
        (["model.vocab_size=100"], "record"),
        (["device.type=cuda"], "device.type"),
        (["model.name=os:getcwd"], "model.name"),
        (["model.name=:x"], "model.name"),
        (["run.seed=99999999999999999999"], "run.seed"),
        (["run.name=a/b"], "run.name"),
        (["dist.backend=nccl"], "dist.backend"),
    ],
)
def test_errors_of_the_user_exit_2_before_the_first_step(cli: Any, arguments: list[str], says: str) -> None:
    output = cli.run("train", *arguments, code=2)
    assert says in output
    assert "Traceback" not in output
    assert not list(cli.folder.glob("runs/*/metrics.jsonl"))


def test_the_same_errors_exit_2_with_two_ranks(cli: Any) -> None:
    output = cli.run("train", "model.vocab_size=100", "--nproc", "2", code=2)
    assert "record" in output
    output = cli.run("train", "batch.size=9", "--nproc", "2", code=2)
    assert "batch.size" in output


def test_an_id_outside_the_vocabulary_names_file_record_and_id(cli: Any) -> None:
    data = cli.folder / "data"
    data.mkdir()
    tokenizer = lff.TokenizerInfo("none", "")
    with lff.Writer(data / "train.loongbin", vocab_size=300, tokenizer=tokenizer, buckets=(32, 64)) as writer:
        for i in range(64):
            ids = np.arange(20) % 250
            if i == 41:
                ids[7] = 299
            writer.append(ids)
    output = cli.train("bad", f"data.path={data}", "model.vocab_size=250", code=2)
    for needed in ("train.loongbin", "41", "299"):
        assert needed in output
    cli.train("good", f"data.path={data}", "run.steps=2")


def test_own_text_is_packed_trained_on_and_generated_from(cli: Any) -> None:
    texts = cli.folder / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i:02d}.txt").write_text(f"The answer to question {i} is {i * i}. " * 40)
    output = cli.train("mine", f"data.path={texts}", "run.steps=10", "data.eval_fraction=0.2", "eval.every=5")
    assert "packed" in output
    assert [r["step"] for r in cli.rows("mine") if "eval_loss" in r] == [5, 10]
    assert cli.run("infer", "runs/mine", "--tokens", "5").startswith("The ")


def test_a_checkpoint_in_one_file_is_taken_in_place_of_a_step(cli: Any) -> None:
    cli.train("mine", "run.steps=6", "ckpt.every=2", "ckpt.full_every=0", KEEP, "data.eval_fraction=0.2")
    store = lf_ckpt.open(cli.folder / "runs/mine/ckpt", read_only=True)
    assert store.steps() == (4, 6)  # the newest stays whatever the rules say
    lf_ckpt.export_file(store, 4, cli.folder / "four.lfckpt")
    store.close()

    for command in (["digest"], ["eval"], ["infer", "--tokens", "9"]):
        from_file = cli.run(command[0], "runs/mine", *command[1:], "--file", "four.lfckpt")
        assert from_file == cli.run(command[0], "runs/mine", *command[1:], "--step", "4")
    straight = cli.digest("mine")
    assert "later steps [6]" in cli.run("resume", "runs/mine", "--file", "four.lfckpt", code=1)
    shutil.rmtree(cli.folder / "runs/mine/ckpt")
    assert "step 4" in cli.run("digest", "runs/mine", "--file", "four.lfckpt")

    # as on a machine to which only the file and the run's folder came
    output = cli.run("resume", "runs/mine", "--file", "four.lfckpt", "ckpt.every=100", "--nproc", "2")
    assert "resumed at step 4" in output
    with lf_ckpt.open(cli.folder / "runs/mine/ckpt", read_only=True) as store:
        assert store.steps() == (4, 6)  # the one from the file became the run's own
    assert cli.rows("mine")[-1]["step"] == 6
    shutil.rmtree(cli.folder / "runs/mine/ckpt")
    cli.run("resume", "runs/mine", "--file", "four.lfckpt")
    assert cli.digest("mine") == straight


def test_a_file_that_holds_no_checkpoint_of_this_run_is_an_error_that_says_so(cli: Any) -> None:
    cli.train("small", "run.steps=2")
    cli.train("wide", "run.steps=2", "model.args.hidden=64")
    with lf_ckpt.open(cli.folder / "other") as store:
        store.save(1, {"x": torch.ones(3)}).wait()
        lf_ckpt.export_file(store, 1, cli.folder / "other.lfckpt")
    with lf_ckpt.open(cli.folder / "runs/wide/ckpt", read_only=True) as store:
        lf_ckpt.export_file(store, 2, cli.folder / "wide.lfckpt")
    data = bytearray((cli.folder / "wide.lfckpt").read_bytes())
    data[5000] ^= 1
    (cli.folder / "bad.lfckpt").write_bytes(data)

    for file, says in (
        ("other.lfckpt", "no checkpoint of a run"),
        ("wide.lfckpt", "does not fit the model"),
        ("bad.lfckpt", "hash"),
        ("absent.lfckpt", "cannot be read"),
    ):
        assert says in cli.run("infer", "runs/small", "--file", file, code=1), file


KEEP = "ckpt.keep=[{every: 4}]"
TWINS = ["loader.backend=torch", "ckpt.backend=torch", "loader.engine=pread", "loader.engine=python"]
TWIN_STEPS = ["run.steps=12", "ckpt.every=4", "metrics.sample_ids=true"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, make_cli: Any) -> Any:
    """A finished and resumed run with our own parts."""
    cli = make_cli(tmp_path_factory.mktemp("ours"))
    cli.train("run", *TWIN_STEPS)
    cli.run("resume", "runs/run", "run.steps=14")
    return cli


@pytest.mark.parametrize("twin", TWINS)
def test_twins_give_the_same_run_bit_for_bit(cli: Any, ours: Any, twin: str) -> None:
    cli.train("run", *TWIN_STEPS, twin)
    cli.run("resume", "runs/run", "run.steps=14")
    assert sorted(ours.losses("run")) == list(range(1, 15))
    assert cli.losses("run") == ours.losses("run")
    assert cli.sample_ids("run") == ours.sample_ids("run")


MODEL = """
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab_size, poison):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.poison, self.calls = poison, 0

    def forward(self, tokens, lengths, loss_mask):
        logits = self.table(tokens[:, :-1])
        keep = torch.arange(1, tokens.shape[1]) < lengths[:, None]
        loss = nn.functional.cross_entropy(logits[keep], tokens[:, 1:][keep], reduction="sum")
        self.calls += 1
        if self.calls > self.poison > 0:
            loss = loss + torch.where(loss > 0, 0.0, (self.table.weight.sum() * 0).sqrt())  # gradient NaN, loss not
        return loss, keep.sum()

def build(size, vocab_size, poison=0):
    return Bigram(vocab_size, poison)
"""


@pytest.mark.slow
def test_a_model_of_ones_own_trains_resumes_and_evaluates(cli: Any) -> None:
    (cli.folder / "mymodel.py").write_text(MODEL)
    options = ["run.name=own", "run.steps=6", "model.name=mymodel:build", "ckpt.every=2", "batch.size=8"]
    cli.run("train", *options)
    cli.run("resume", "runs/own", "run.steps=8")
    assert "eval loss" in cli.run("eval", "runs/own")
    assert "logits" in cli.run("infer", "runs/own", code=2)


def test_a_gradient_that_is_not_finite_is_never_saved(cli: Any) -> None:
    (cli.folder / "mymodel.py").write_text(MODEL)
    options = [
        "run.steps=20",
        "model.name=mymodel:build",
        "model.args.poison=5",
        "ckpt.every=2",
        "batch.size=8",
    ]
    output = cli.run("train", "run.name=nan", *options, code=1)
    assert "gradient norm nan" in output
    saved = int(cli.run("digest", "runs/nan").split()[-1])
    assert saved == 4  # the sixth call of the model is poisoned; saves are at 2, 4, 6


def test_runs_in_a_place_that_cannot_be_written_fail_at_once(cli: Any) -> None:
    assert "/etc/passwd" in cli.run("train", "run.dir=/etc/passwd", code=2)


def test_two_runs_never_share_a_checkpoint_folder(cli: Any) -> None:
    cli.train("first", "run.steps=2", "ckpt.dir=shared")
    assert "ckpt.dir" in cli.train("second", "run.steps=2", "ckpt.dir=shared", code=2)
    cli.train("second", "run.steps=2")  # the refused start has not taken the name


def test_data_without_anything_to_predict_is_refused(cli: Any) -> None:
    ones = cli.folder / "ones"
    ones.mkdir()
    for i in range(10):
        (ones / f"{i}.txt").write_text("x")
    assert "nothing to predict" in cli.train("ones", f"data.path={ones}", code=2)


@pytest.mark.slow
def test_eval_refuses_other_data_than_the_run_was_trained_on(cli: Any) -> None:
    cli.train("moved", "run.steps=2")
    cli.train("other", "run.steps=2", "data.max_len=32")
    shutil.rmtree(cli.folder / "runs/moved/data")
    assert "eval split is not there" in cli.run("eval", "runs/moved", code=2)
    shutil.copytree(cli.folder / "runs/other/data", cli.folder / "runs/moved/data")
    assert "trained on other data" in cli.run("eval", "runs/moved", code=2)


def test_a_config_that_is_not_whole_is_refused(cli: Any) -> None:
    cli.train("torn", "run.steps=2")
    (cli.folder / "runs/torn/config.yaml").write_text("")
    assert "not a whole configuration" in cli.run("resume", "runs/torn", code=2)


@pytest.mark.slow
def test_the_torch_twin_falls_back_from_a_damaged_file(cli: Any) -> None:
    cli.train("twin", "run.steps=6", "ckpt.every=2", "ckpt.backend=torch")
    newest = cli.folder / "runs/twin/ckpt/step-000000006.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    output = cli.run("resume", "runs/twin", "run.steps=8")
    assert "step 6 was skipped" in output
    assert "resumed at step 4" in output


def test_a_loss_that_explodes_stops_the_run_and_keeps_good_checkpoints(cli: Any) -> None:
    output = cli.train(
        "boom", "run.steps=60", "optim.lr=1e20", "optim.clip=0", "ckpt.every=1", "metrics.every=7", code=1
    )
    assert "loss at step" in output
    assert "Traceback" not in output
    assert "step" in cli.run("digest", "runs/boom")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: two or three checkpoints of the small model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_full_disk_in_a_save_goes_on_or_stops_as_configured(
    cli: Any, small_disk: Path, policy: str
) -> None:
    options = [
        "ckpt.every=2",
        "ckpt.keep=100",
        "ckpt.full_every=0",
        f"ckpt.dir={small_disk}",
        f"ckpt.on_error={policy}",
    ]
    output = cli.train("full", "run.steps=40", *options, code=0 if policy == "warn" else 1)
    assert "space" in output.lower() or "full" in output.lower()
    assert "Traceback" not in output
    assert (40 in cli.losses("full")) == (policy == "warn")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    saved = int(cli.run("digest", "runs/full").split()[-1])
    assert 0 < saved < 40
    assert not [p for p in small_disk.rglob("*") if p.suffix == ".tmp"]
    cli.run("resume", "runs/full")
    assert 40 in cli.losses("full")


def test_a_killed_peer_ends_the_job_with_an_error(cli: Any, until: Any, small: list[str]) -> None:
    import signal

    process = cli.start("train", "run.name=lost", *small, "run.steps=100000", "--nproc", "2")
    until(lambda: cli.rows("lost"), process)
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()[1:]]
    agents = {p for p, parent in pairs if parent == process.pid}
    rank = max(p for p, parent in pairs if parent in agents)
    os.kill(rank, signal.SIGKILL)
    assert process.wait(timeout=90) == 1
    cli.run("resume", "runs/lost", "run.steps=5")


def test_a_run_that_saved_nothing_resumes_at_step_0(cli: Any, until: Any, small: list[str]) -> None:
    process = cli.start("train", "run.name=early", *small, "run.steps=100000", "ckpt.every=0")
    until(lambda: cli.rows("early"), process)
    process.kill()
    process.wait()
    assert "no loadable checkpoint" in cli.run("digest", "runs/early", code=2)
    assert "starting at step 0" in cli.run("resume", "runs/early", "run.steps=5")
    assert sorted(cli.losses("early")) == [1, 2, 3, 4, 5]


def test_config_show_names_the_origin_of_each_value(cli: Any) -> None:
    (cli.folder / "c.yaml").write_text("optim:\n  warmup: 7\n")
    output = cli.run("config", "show", "c.yaml", "run.steps=9")
    assert "optim.warmup = 7  # c.yaml" in output
    assert "run.steps = 9  # command line" in output
    assert "optim.clip = 1.0  # default" in output
    assert '"RunSection"' in cli.run("config", "schema")
