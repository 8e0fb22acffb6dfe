#!/usr/bin/env python3
"""Ranks under torchrun, one killed with its agent: how long until the others go on, how fast, and with which samples.

    bench_elastic.py --json OUT.json [--sleep 0.2] [--steps 30] [--kill-at 10] [--victim 3] [--ranks 4]

Agents on this machine stand for as many hosts; the rendezvous store is a process of its own, so any of them may die.
Each rank sleeps for every micro-batch, to stand for a device. Beside the sleep all is real: Gloo,
DistributedDataParallel, PeerWatch, a checkpoint after each step. The peer row (--stock) has torchrun's own
time-outs.
Checked: every step's samples are each summed once, and the weights at the end are those of one process that was never
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm

GLOBAL, MICRO = 48, 4  # 12 micro-batches: three on each of four ranks, four on each of three
STOCK = "--rdzv-conf=is_host=0"
PATIENCE_S = 90.0
RESTART_S, KEPT = 20.0, 0.70  # the bars of the issue


def samples(ids: list[int]) -> Tensor:
    """[n, 8] float32, a function of the ids."""
    return torch.sin(torch.tensor(ids, dtype=torch.float32)[:, None] * torch.arange(1, 9) * 0.7)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def step_loss(model: nn.Module, ids: list[int]) -> Tensor:
    loss: Tensor = (model(samples(ids)) - 1).square().mean()
    return loss


def work(folder: Path, steps: int, sleep: float) -> None:
    """A rank: from the last checkpoint to the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    watch = lf_comm.PeerWatch(interval_s=0.25)
    rank, agent = dist.get_rank(), os.environ["BENCH_AGENT"]
    (folder / f"pid{agent}").write_text(str(os.getpid()))
    model, optimizer = new_model()
    attempt, first = torch.zeros(1, dtype=torch.int64), 0
    saved = folder / "checkpoint.pt"
    if rank == 0:
        attempt += len(list(folder.glob("attempt*")))
        (folder / f"attempt{int(attempt)}").touch()
    dist.broadcast(attempt, 0)
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
    ddp = DistributedDataParallel(model)
    share = lf_comm.share_batch(GLOBAL, MICRO)
    for step in range(first, steps):
        done: list[int] = []
        with watch.step(ddp, step):
            for number, places in enumerate(share.micro_batches):
                ids = [step * GLOBAL + place for place in places]
                done += ids
                time.sleep(sleep)
                last = number + 1 == len(share.micro_batches)
                with contextlib.nullcontext() if last else ddp.no_sync():
                    (step_loss(ddp, ids) * share.weight(places)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
        told = {
            "attempt": int(attempt),
            "step": step,
            "rank": rank,
            "ranks": share.ranks,
            "ids": done,
            "at": time.time(),
        }
        with (folder / f"log{agent}").open("a") as log:
            log.write(json.dumps(told) + "\n")
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


def records(folder: Path) -> list[dict[str, Any]]:
    """What all ranks wrote so far; a line that is being written is left for the next time."""
    found = []
    for path in folder.glob("log*"):
        found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return found


def wait_for(what: str, ready: Any, agents: list[subprocess.Popen[bytes]]) -> float:
    """Time at which it was."""
    limit = time.time() + PATIENCE_S
    while not ready():
        if time.time() > limit or all(agent.poll() is not None for agent in agents):
            raise SystemExit(f"{what}: not in {PATIENCE_S:.0f} s, or all agents ended")
        time.sleep(0.02)
    return time.time()


@contextlib.contextmanager
def agents_of(folder: Path, options: argparse.Namespace) -> Iterator[list[subprocess.Popen[bytes]]]:
    """As many as ranks; ended in any case."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = f"127.0.0.1:{store.port}"
    arguments = list(
        lf_comm.torchrun_arguments((options.ranks - 1, options.ranks), endpoint, "bench", standing_store=True)
    )
    if options.stock:
        arguments = [STOCK if each.startswith("--rdzv-conf") else each for each in arguments]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "--local-addr=127.0.0.1", __file__]
    command += ["--worker", str(folder), "--steps", str(options.steps), "--sleep", str(options.sleep)]
    started = []
    for number in range(options.ranks):
        env = os.environ | lf_comm.TORCHRUN_ENVIRONMENT | {"BENCH_AGENT": str(number), "OMP_NUM_THREADS": "1"}
        with (folder / f"out{number}").open("wb") as out:
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        yield started
    finally:
        for agent in started:
            if agent.poll() is None:
                agent.terminate()  # it ends its worker
        for agent in started:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of it; the numbers."""
    with agents_of(folder, options) as agents:
        # A slow machine may begin with three, and begin again when the fourth has come.
        def attempt_of(ranks: int, step: int) -> int:
            """The latest in which so many ranks have made the step; -1: none."""
            found = {
                (r["attempt"], r["rank"])
                for r in records(folder)
                if r["step"] >= step and r["ranks"] == ranks
            }
            attempts = [attempt for attempt, _ in found]
            return max((a for a in attempts if attempts.count(a) == ranks), default=-1)

        wait_for("all ranks train", lambda: attempt_of(options.ranks, options.kill_at) >= 0, agents)
        before = attempt_of(options.ranks, options.kill_at)
        worker = int((folder / f"pid{options.victim}").read_text())
        agents[options.victim].kill()
        os.kill(worker, signal.SIGKILL)
        killed = time.time()
        back = wait_for("the others go on", lambda: attempt_of(options.ranks - 1, 0) > before, agents)
        after = attempt_of(options.ranks - 1, 0)
        left = [agent for number, agent in enumerate(agents) if number != options.victim]
        wait_for("the job ends", lambda: all(agent.poll() is not None for agent in left), agents)
        ended = [agent.returncode for agent in left]
    found = records(folder)
    speed = samples_per_second(found, before), samples_per_second(found, after)
    return {
        "restart_s": back - killed,
        "samples_per_s_before": speed[0],
        "samples_per_s_after": speed[1],
        "kept": speed[1] / speed[0],
        "kept_expected": lf_comm.throughput_kept(GLOBAL // MICRO, options.ranks, options.ranks - 1),
        "steps": options.steps,
        "attempts": 1 + max(each["attempt"] for each in found),
        "exit_codes": ended,
        "steps_with_their_samples": whole_steps(found),
        "weights_off": weights_off(folder, options.steps),
    }


def samples_per_second(found: list[dict[str, Any]], attempt: int) -> float:
    """From the end of the attempt's first step to that of its last, of rank 0."""
    at = sorted(each["at"] for each in found if each["attempt"] == attempt and each["rank"] == 0)
    return GLOBAL * (len(at) - 1) / (at[-1] - at[0])


def whole_steps(found: list[dict[str, Any]]) -> int:
    """Steps whose samples, in the last attempt that made them, are those they must have, each once."""
    whole = 0
    for step in {each["step"] for each in found}:
        last = max(each["attempt"] for each in found if each["step"] == step)
        ids = [i for each in found if (each["step"], each["attempt"]) == (step, last) for i in each["ids"]]
        whole += sorted(ids) == list(range(step * GLOBAL, (step + 1) * GLOBAL))
    return whole


def weights_off(folder: Path, steps: int) -> float:
    """Largest difference to the weights of one process that took all steps with whole batches."""
    model, optimizer = new_model()
    for step in range(steps):
        step_loss(model, list(range(step * GLOBAL, (step + 1) * GLOBAL))).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return max(float((saved[name] - value).abs().max()) for name, value in model.state_dict().items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sleep", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=10)
    parser.add_argument("--victim", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stock", action="store_true", help="torchrun's own time-outs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 2 <= options.ranks <= GLOBAL // MICRO or not 0 <= options.victim < options.ranks:
        parser.error("--ranks from 2 to 12, and a --victim below it, are wanted")
    if options.worker is not None:
        work(options.worker, options.steps, options.sleep)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(Path(folder), options)
        except SystemExit:
            for number in range(options.ranks):
                print(
                    f"agent {number}:\n{(Path(folder) / f'out{number}').read_text()[-3000:]}", file=sys.stderr
                )
            raise
    report = {"version": 1, "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    report |= {
        "ranks": options.ranks,
        "sleep_s": options.sleep,
        "victim": options.victim,
        "stock": options.stock,
    }
    report |= {"load": os.getloadavg(), "cores": os.cpu_count()} | found
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(
        "| time-outs | restart s | samples/s before | after | kept | steps with their samples | weights off |"
    )
    print("|---|---|---|---|---|---|---|")
    whose = "torchrun" if options.stock else "lf-comm"
    print(
        f"| {whose} | {found['restart_s']:.1f} | {found['samples_per_s_before']:.1f} "
        f"| {found['samples_per_s_after']:.1f} | {found['kept']:.2f} | {found['steps_with_their_samples']} of "
        f"{found['steps']} | {found['weights_off']:.1e} |"
    )
    fine = found["steps_with_their_samples"] == found["steps"] and found["weights_off"] < 1e-5
    return 0 if fine and (options.stock or (found["restart_s"] <= RESTART_S and found["kept"] >= KEPT)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
