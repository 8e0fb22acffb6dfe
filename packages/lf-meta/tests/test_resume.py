"""A run that was killed, stopped or moved to other ranks ends where an undisturbed one does."""

import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch


def _checkpointed(folder: Path, name: str, step: int) -> Callable[[], bool]:
    return lambda: (folder / "runs" / name / "ckpt" / "steps" / str(step) / "MANIFEST").exists()


def _more_rows(cli: Any, name: str, seen: int) -> bool:
    return len(cli.rows(name)) > seen


@pytest.mark.slow
def test_80_steps_equal_20_then_kill_9_then_resume(cli: Any, until: Any, small: list[str]) -> None:
    # The save of step 20 may last until that of step 40, which waits for it; 80 come after both.
    cli.train("straight", "run.steps=80")
    process = cli.start("train", "run.name=killed", *small, "run.steps=80")
    until(_checkpointed(cli.folder, "killed", 20), process)
    process.kill()
    process.wait()
    assert max(cli.losses("killed"), default=0) < 80
    cli.run("resume", "runs/killed")
    assert cli.digest("killed") == cli.digest("straight")
    assert cli.losses("killed") == cli.losses("straight")
    assert sorted(cli.losses("killed")) == list(range(1, 81))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_40_steps_equal_20_then_kill_9_then_resume(cli: Any, until: Any, small: list[str]) -> None:
    options = ["run.steps=40", "device.type=cuda", "device.deterministic=true"]
    cli.train("straight", *options)
    process = cli.start("train", "run.name=killed", *small, *options)
    until(_checkpointed(cli.folder, "killed", 20), process)
    process.kill()
    process.wait()
    cli.run("resume", "runs/killed")
    assert cli.digest("killed") == cli.digest("straight")
    assert cli.losses("killed") == cli.losses("straight")


@pytest.mark.slow
def test_digest_tells_runs_apart(cli: Any) -> None:
    cli.train("a", "run.steps=6")
    cli.train("b", "run.steps=6", "run.seed=1")
    cli.train("c", "run.steps=7")
    assert len({cli.digest(n) for n in "abc"}) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)  # it trains twelve times
def test_ten_sigterms_at_random_moments_change_nothing(cli: Any, until: Any, small: list[str]) -> None:
    # saves after every step and a long eval after every third: most signals land in one of them
    busy = ["run.steps=80", "ckpt.every=1", "eval.every=3", "eval.batches=0", "data.eval_fraction=0.15"]
    cli.train("straight", *busy)
    moments = random.Random(20261129)
    process = cli.start("train", "run.name=stopped", *small, *busy)
    seen, stops = 0, []
    for _ in range(10):
        until(functools.partial(_more_rows, cli, "stopped", seen), process)
        time.sleep(moments.uniform(0, 0.25))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143, cli.output()
        seen = len(cli.rows("stopped"))
        stops.append(max(cli.losses("stopped")))
        process = cli.start("resume", "runs/stopped")
    assert process.wait(timeout=120) == 0, cli.output()
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+)", cli.output())]
    assert resumed == stops, "the interrupted step is saved, and read again"
    assert cli.digest("stopped") == cli.digest("straight")
    assert cli.losses("stopped") == cli.losses("straight")
    evals = {r["step"]: r["eval_loss"] for r in cli.rows("stopped") if "eval_loss" in r}
    assert evals == {r["step"]: r["eval_loss"] for r in cli.rows("straight") if "eval_loss" in r}


def test_a_signal_before_the_first_step_saves_step_0(cli: Any, until: Any, small: list[str]) -> None:
    process = cli.start("train", "run.name=early", *small, "run.steps=2000")
    until(lambda: (cli.folder / "runs/early/config.yaml").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, cli.output()
    assert "loongforge resume runs/early" in cli.output()
    cli.run("resume", "runs/early", "run.steps=3")
    assert sorted(cli.losses("early"))[-1] >= 3


@pytest.mark.slow
def test_one_rank_two_ranks_one_rank_keep_samples_and_losses(cli: Any, until: Any, small: list[str]) -> None:
    options = ["run.steps=150", "ckpt.every=10", "metrics.sample_ids=true", "model.args.dropout=0"]
    cli.train("straight", *options)
    process = cli.start("train", "run.name=moved", *small, *options)
    until(_checkpointed(cli.folder, "moved", 20), process)
    process.kill()
    process.wait()
    process = cli.start("resume", "runs/moved", "--nproc", "2")
    until(functools.partial(_more_rows, cli, "moved", 60), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, cli.output()
    assert "2 rank(s)" in cli.output()
    cli.run("resume", "runs/moved")
    assert cli.sample_ids("moved") == cli.sample_ids("straight")
    assert sorted(cli.sample_ids("straight")) == list(range(1, 151))
    moved, straight = cli.losses("moved"), cli.losses("straight")
    assert sorted(moved) == sorted(straight)
    for step, (loss, lr) in straight.items():
        assert moved[step] == (pytest.approx(loss, rel=1e-3), lr)


def test_two_ranks_compute_what_one_rank_computes(cli: Any) -> None:
    options = ["run.steps=15", "model.args.dropout=0", "batch.accum=1"]
    cli.train("one", *options)
    cli.train("two", *options, "--nproc", "2")
    one, two = cli.losses("one"), cli.losses("two")
    assert sorted(one) == sorted(two) == list(range(1, 16))
    for step in one:
        assert two[step][0] == pytest.approx(one[step][0], rel=2e-5)


def _below(parent: int) -> list[int]:
    """Pids of the child processes."""
    return [child.pid for child in psutil.Process(parent).children()]


def _ranks(launcher: int) -> list[int]:
    """Pids of the training processes below a launcher."""
    return [rank for agent in _below(launcher) for rank in _below(agent)]


@pytest.mark.parametrize("target", ["one rank", "launcher"])
def test_with_two_ranks_one_signal_stops_both(cli: Any, until: Any, small: list[str], target: str) -> None:
    process = cli.start("train", "run.name=pair", *small, "run.steps=100000", "--nproc", "2")
    until(lambda: cli.rows("pair"), process)
    victims = _ranks(process.pid)
    assert len(victims) == 2
    os.kill(victims[1] if target == "one rank" else process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143, cli.output()
    assert f"step {max(cli.losses('pair'))}" in cli.run("digest", "runs/pair")


def _free_port() -> int:
    """A port that nobody listens at, below those that the kernel gives to whoever asks for any."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


@pytest.mark.slow
def test_two_launchers_make_one_job_and_stop_together(cli: Any, until: Any, small: list[str]) -> None:
    nodes = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    common = ["train", "run.name=nodes", *small, "run.steps=100000", *nodes]
    first, second = (cli.start(*common, "--node-rank", str(rank)) for rank in (0, 1))
    until(lambda: cli.rows("nodes"), first)
    assert "2 rank(s)" in cli.output()
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=60) == 143, cli.output()
    assert first.wait(timeout=60) == 143, cli.output()
    assert f"step {max(cli.losses('nodes'))}" in cli.run("digest", "runs/nodes")


SLOW_FSYNC = """
import os, time
if os.environ.get("RANK", "0") == "0":
    fsync, fdatasync = os.fsync, os.fdatasync
    def slow(fd, call=fsync):
        marker = os.environ.get("SLOW_MARKER")
        if marker and os.path.exists(marker):
            open(marker + ".used", "w").close()
            os.unlink(marker)
            time.sleep(float(os.environ["SLOW_SECONDS"]))
        return call(fd)
    os.fsync = slow
    os.fdatasync = lambda fd: slow(fd, fdatasync)
"""


def _slow_disk(folder: Path, seconds: float) -> dict[str, str]:
    """Environment under which the first fsync after ``marker`` appears takes ``seconds`` (rank 0 only)."""
    (folder / "hooks").mkdir()
    (folder / "hooks" / "sitecustomize.py").write_text(SLOW_FSYNC)
    marker = str(folder / "marker")
    return {"PYTHONPATH": str(folder / "hooks"), "SLOW_MARKER": marker, "SLOW_SECONDS": str(seconds)}


@pytest.mark.slow
def test_a_save_longer_than_torchruns_grace_completes(cli: Any, until: Any, small: list[str]) -> None:
    environment = _slow_disk(cli.folder, 35)  # torchrun kills its workers 30 s after a signal
    process = cli.start(
        "train", "run.name=slow", *small, "run.steps=100000", "ckpt.every=0", "--nproc", "2", **environment
    )
    until(lambda: cli.rows("slow"), process)
    Path(environment["SLOW_MARKER"]).touch()
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143, cli.output()
    assert time.monotonic() - start > 34, "the save was really slow"
    assert Path(environment["SLOW_MARKER"] + ".used").exists()
    assert f"step {max(cli.losses('slow'))}" in cli.run("digest", "runs/slow")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_second_sigterm_exits_at_once(cli: Any, until: Any, small: list[str], ranks: str) -> None:
    environment = _slow_disk(cli.folder, 600)
    process = cli.start(
        "train", "run.name=twice", *small, "run.steps=100000", "ckpt.every=0", "--nproc", ranks, **environment
    )
    until(lambda: cli.rows("twice"), process)
    Path(environment["SLOW_MARKER"]).touch()
    process.send_signal(signal.SIGTERM)
    until(lambda: Path(environment["SLOW_MARKER"] + ".used").exists(), process)
    time.sleep(1.3)  # later than what counts as one request
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143  # a save takes ten times as long


def test_resume_refuses_another_order_of_samples(cli: Any) -> None:
    cli.train("order", "run.steps=4")
    output = cli.run("resume", "runs/order", "batch.size=16", "run.steps=8", code=2)
    assert "batch.size" in output
    output = cli.run("resume", "runs/order", "run.seed=5", "run.steps=8", code=2)
    assert "run.seed" in output
    output = cli.run("resume", "runs/order", "data.max_len=32", code=2)
    assert "data.max_len" in output
    output = cli.run("resume", "runs/order", "model.args.layers=2", code=2)
    assert "model.args.layers" in output
    assert "Traceback" not in output


def test_a_signal_to_every_process_of_a_job_is_one_request(cli: Any, until: Any, small: list[str]) -> None:
    process = cli.start("train", "run.name=all", *small, "run.steps=100000", "--nproc", "2")
    until(lambda: cli.rows("all"), process)
    everyone = [process.pid, *_below(process.pid), *_ranks(process.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143, cli.output()
    assert f"step {max(cli.losses('all'))}" in cli.run("digest", "runs/all")


def test_ctrl_c_with_torch_workers_saves(cli: Any, until: Any, small: list[str]) -> None:
    options = ["run.steps=100000", "loader.backend=torch", "loader.threads=2"]
    process = cli.start("train", "run.name=workers", *small, *options)
    until(lambda: cli.rows("workers"), process)
    for pid in [*_below(process.pid), process.pid]:
        os.kill(pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130, cli.output()
    assert f"step {max(cli.losses('workers'))}" in cli.run("digest", "runs/workers")


def test_a_job_whose_torchrun_is_killed_leaves_no_ranks(cli: Any, until: Any, small: list[str]) -> None:
    process = cli.start("train", "run.name=orphan", *small, "run.steps=100000", "--nproc", "2")
    until(lambda: cli.rows("orphan"), process)
    ranks = _ranks(process.pid)
    os.kill(_below(process.pid)[0], signal.SIGKILL)
    process.wait(timeout=60)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert f"step {max(cli.losses('orphan'))}" in cli.run("digest", "runs/orphan")


def test_a_reader_that_leaves_costs_nothing(cli: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "lf_meta.cli",
        "train",
        "run.name=pipe",
        "run.steps=12",
        "metrics.every=1",
    ]
    process = subprocess.Popen(
        [*command, "model.args.layers=1"], cwd=cli.folder, env=cli.environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert sorted(cli.losses("pipe")) == list(range(1, 13))


def test_a_run_is_resumed_from_another_folder(cli: Any, make_cli: Any) -> None:
    (cli.folder / "own.txt").write_text("A text to learn from. " * 400)
    cli.train("here", "run.steps=4", "data.path=own.txt", "ckpt.dir=saved")
    elsewhere = make_cli(cli.folder / "runs")
    elsewhere.run("resume", "here", "run.steps=6")
    assert sorted(cli.losses("here")) == [1, 2, 3, 4, 5, 6]


def test_a_resume_is_journalled_with_what_it_changed(cli: Any) -> None:
    cli.train("diary", "run.steps=4")
    cli.run("resume", "runs/diary", "run.steps=6", "optim.clip=0.5")
    event = next(r for r in cli.rows("diary") if r.get("event") == "resume")
    assert event["step"] == 4
    assert event["ranks"] == 1
    assert event["changed"] == {"run.steps": [4, 6], "optim.clip": [1.0, 0.5]}


def test_a_run_that_is_being_trained_cannot_be_resumed(cli: Any, until: Any, small: list[str]) -> None:
    process = cli.start("train", "run.name=busy", *small, "run.steps=100000")
    until(lambda: cli.rows("busy"), process)
    assert "another process" in cli.run("resume", "runs/busy", code=2)
    output = cli.run("resume", "runs/busy", "--nproc", "2", code=2)
    assert "another process" in output
    assert "Traceback" not in output
    process.kill()
    process.wait()


def test_resume_of_a_finished_run_trains_nothing_more(cli: Any) -> None:
    cli.train("done", "run.steps=4")
    before = cli.digest("done")
    cli.run("resume", "runs/done")
    assert cli.digest("done") == before
    assert sorted(cli.losses("done")) == [1, 2, 3, 4]


def test_resume_falls_back_when_the_newest_checkpoint_is_damaged(cli: Any) -> None:
    cli.train("damaged", "run.steps=20", "ckpt.every=10")
    expected = cli.digest("damaged")
    newest = cli.folder / "runs/damaged/ckpt/steps/20"
    data = next(newest.glob("*.lfckpt"))
    blob = bytearray(data.read_bytes())
    blob[len(blob) // 2] ^= 1
    data.write_bytes(blob)
    output = cli.run("resume", "runs/damaged")
    assert "step 20" in output
    assert "resumed at step 10" in output
    assert cli.digest("damaged") == expected


def test_metrics_rows_are_json_with_the_documented_columns(cli: Any) -> None:
    cli.train("rows", "run.steps=5")
    row = next(r for r in cli.rows("rows") if r["step"] == 3)
    assert set(row) == {
        *("step", "epoch", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms", "wait_pct")
    }
    assert json.dumps(row)
