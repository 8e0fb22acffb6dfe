#!/usr/bin/env python3
"""What saves cost a training run on one GPU: an LM of 1.65 B parameters with Adam, 19.7 GB of float32 state.

    bench_device.py --json OUT.json [--tiny] [--batch 8] [--length 2048] [--steps 8] [--repeat 3] [--dir DIR]
                    [--no-peers | --no-ours]
    bench_device.py --show A.json B.json

Rows: training stopped by a save, what an overlapped save adds to its step, also to a short step of 1 x 512 tokens, the
steps during the background write, the first save and the page-locking apart, torch.save and DCP, restores. The model
is lf-meta's gr00t_n16_lm where that is installed, else a transformer of the same widths. --tiny runs everything on a
small model, on the host where there is no GPU; its numbers mean nothing. The JSON is written anew after every row, so
that a run that is cut short keeps what it measured; "complete" says that none was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scratch import scratch
from torch import nn

import lf_ckpt

COPY_SECONDS = 0.36  # research: 19.7 GB from an H200 into page-locked memory
LIMIT_STOPPED, LIMIT_OVERLAPPED, LIMIT_SHORT, LONG_STEP, LIMIT_DURING = 0.5, 0.05, 0.04, 0.42, 1.03
SHORT = (1, 512)


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class Rows(dict[str, Any]):
    """Measurements by name, printed and written to a file as they come."""

    def __init__(self, path: Path, **facts: Any) -> None:
        super().__init__(facts)
        self._path, self._began = path, time.perf_counter()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        shown = _cell(value)
        print(f"{time.perf_counter() - self._began:6.1f} s  {key}: {shown}", flush=True)
        self._path.write_text(json.dumps(self, indent=1))


class Stand(nn.Module):
    """A transformer of the widths of gr00t_n16_lm, for a machine without lf-meta; also gives (loss sum, count)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, heads, ffn * 3 // 2, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        out = self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(
            out[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
        )
        return loss, lengths.sum()


@dataclass
class Job:
    """One training run: `step` does forward, backward and the optimizer on one fixed batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    device: torch.device
    computing: list[float] = field(default_factory=list)  # seconds of forward and backward of each step

    def step(self) -> float:
        """Seconds of one step, the device idle before and after."""
        began = now(self.device)
        lengths = torch.full((len(self.tokens),), self.tokens.shape[1], device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, count = self.model(self.tokens, lengths, None)
        (loss / count).backward()
        self.computing.append(now(self.device) - began)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return now(self.device) - began

    def free_step(self) -> None:
        """The same without waiting for the device in between, as a training loop does."""
        lengths = torch.full((len(self.tokens),), self.tokens.shape[1], device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, count = self.model(self.tokens, lengths, None)
        (loss / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def now(device: torch.device) -> float:
    """The clock, once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_job(tiny: bool, batch: int, length: int) -> Job:
    """Model, fused AdamW and a batch; one step taken, so that the moments exist."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    vocab = 500 if tiny else 50257
    try:
        from lf_meta.models import build_model

        model = build_model("gr00t_n16_lm", "tiny" if tiny else "1.6b", vocab, {})
    except ImportError:
        model = Stand(vocab, *((128, 4, 4, 352) if tiny else (2048, 28, 32, 5632)))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")
    tokens = torch.randint(0, vocab, (batch, length), device=device)
    job = Job(model, optimizer, tokens, device)
    job.step()
    return job


def measure_ours(job: Job, folder: Path, rows: Rows, steps: int, repeat: int, short: torch.Tensor) -> None:
    """All rows of lf-ckpt; short: the tokens of the short step."""
    state = lf_ckpt.collect(job.model, job.optimizer)
    rows["state_bytes"] = sum(tensor.nbytes for tensor in state.tensors.values())
    plain, rows["forward+backward"] = step_time(job, steps)
    rows["step"] = plain
    with lf_ckpt.open(folder, keep=[lf_ckpt.Last(1)], compress="raw", full_every=0) as store:
        rows["first save: stopped"], handle = stopped(job, store, 0)
        report = handle.wait()
        rows["first save: slab"], rows["io"] = report.slab, report.io
        saves = []
        for number in range(1, 1 + repeat):
            seconds, handle = stopped(job, store, number)
            saves.append((seconds, handle.wait().seconds_durable))
        rows["stopped"], rows["durable"] = map(list, zip(*saves, strict=True))
        found = [overlap(job, store, 100 + n, plain) for n in range(repeat)]
        rows["overlapped: added to the step"] = [added for added, _ in found]
        rows["step during the background write / step"] = [ratio for _, ratio in found if ratio is not None]
        rows["restore in place, one pass"] = timed(
            job, lambda: store.load(into=state.tensors, precheck=False)
        )
        rows["restore in place, checked first"] = timed(job, lambda: store.load(into=state.tensors))
        job.tokens = short
        short_step, rows["short: forward+backward"] = step_time(job, steps)
        rows["short: step"] = short_step
        rows["short: overlapped: added to the step"] = [
            overlap(job, store, 200 + n, short_step)[0] for n in range(repeat)
        ]


def step_time(job: Job, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and of its forward and backward."""
    job.step()
    whole = statistics.median(job.step() for _ in range(steps))
    return whole, statistics.median(job.computing[-steps:])


def stopped(job: Job, store: lf_ckpt.Store, step: int) -> tuple[float, lf_ckpt.SaveHandle]:
    """Seconds that a save without overlap stops training."""
    began = now(job.device)
    handle = store.save(step, *lf_ckpt.collect(job.model, job.optimizer))
    return now(job.device) - began, handle


def overlap(job: Job, store: lf_ckpt.Store, step: int, plain: float) -> tuple[float, float | None]:
    """(seconds that a fenced save adds to its step, mean ratio of the steps while it is being written)."""
    began = now(job.device)
    handle = store.save(step, *lf_ckpt.collect(job.model, job.optimizer), overlap=True, fence=job.optimizer)
    job.free_step()
    added = now(job.device) - began - plain
    during = []
    while not handle.done:
        during.append(job.step())
    handle.wait()
    return added, statistics.mean(during[:-1]) / plain if len(during) > 1 else None


def timed(job: Job, work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    began = now(job.device)
    work()
    return now(job.device) - began


def kept_stager(pinned: bool) -> Any:
    """DCP's stager with memory that is used again, which torch 2.11 gives back behind each save."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # not in torch 2.6

    stager = DefaultStager(StagingOptions(pinned, True, False, pinned))
    vars(stager._state_dict_stager)["close"] = lambda: None
    return stager


def measure_async(job: Job, tensors: dict[str, torch.Tensor], folder: Path, rows: Rows, repeat: int) -> None:
    """DCP's async_save: seconds that training stands still, and until each upload has ended; written save by save."""
    pinned = job.device.type == "cuda"
    stager = kept_stager(pinned)
    stopped: list[float] = []
    uploaded: list[float] = []
    for _ in range(repeat + 1):
        began = now(job.device)
        future = dcp.async_save(tensors, checkpoint_id=folder / "dcp", async_stager=stager)
        stopped.append(now(job.device) - began)
        rows["DCP async_save: stopped, memory fresh and then reused"] = list(stopped)
        getattr(future, "upload_completion", future).result()
        uploaded.append(now(job.device) - began)
        rows["DCP async_save: uploaded"] = list(uploaded)
        shutil.rmtree(folder / "dcp")


def measure_peers(job: Job, folder: Path, rows: Rows, repeat: int) -> None:
    """torch.save and DCP: how long training stands still, and the restore of torch.save."""
    tensors = {k: t.detach() for k, t in lf_ckpt.collect(job.model, job.optimizer).tensors.items()}
    path = folder / "state.pt"
    rows["torch.save: stopped"] = timed(job, lambda: torch.save(tensors, path))

    def restore() -> None:
        for name, tensor in torch.load(path, map_location="cpu", weights_only=True, mmap=True).items():
            tensors[name].copy_(tensor)

    rows["torch.load in place"] = timed(job, restore)
    path.unlink()
    rows["DCP save: stopped"] = timed(job, lambda: dcp.save(tensors, checkpoint_id=folder / "dcp"))
    rows["DCP load in place"] = timed(job, lambda: dcp.load(tensors, checkpoint_id=folder / "dcp"))
    shutil.rmtree(folder / "dcp")
    measure_async(job, tensors, folder, rows, repeat)


def bars(rows: Rows) -> list[dict[str, Any]]:
    """The bars of the issue, in seconds or as a ratio: medians of the saves behind the first."""
    found = [("training stopped, s", statistics.median(rows["stopped"]), LIMIT_STOPPED)]
    for short in ("", "short: "):
        long = rows[f"{short}step"] >= LONG_STEP
        least = max(0.0, COPY_SECONDS - rows[f"{short}forward+backward"]) + LIMIT_SHORT
        added = statistics.median(rows[f"{short}overlapped: added to the step"])
        found.append((f"{short}overlapped save adds, s", added, LIMIT_OVERLAPPED if long else least))
    during = rows["step during the background write / step"]
    if during:
        found.append(("step during the background write / step", statistics.median(during), LIMIT_DURING))
    return [{"bar": n, "value": v, "limit": limit, "holds": v <= limit} for n, v, limit in found]


def table(documents: list[dict[str, Any]]) -> str:
    """Seconds of several runs side by side, as Markdown; a row that a run did not come to is left blank."""
    facts = ("version", "tiny", "complete", "bars", "skipped")
    names = [n for n in dict.fromkeys(n for d in documents for n in d) if n not in facts]
    lines = ["| |" + " |" * len(documents), "|---" * (len(documents) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(_cell(d.get(name, "")) for d in documents) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return ", ".join(map(_shown, value)) if isinstance(value, list) else _shown(value)


def main() -> None:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--show", nargs="+", type=Path, help="print the table of these results, measure nothing"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that everything runs")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="steps that the plain step time is taken from")
    parser.add_argument("--repeat", type=int, default=3, help="saves of each kind behind the first")
    parser.add_argument("--dir", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-peers", action="store_true")
    which.add_argument("--no-ours", action="store_true")
    arguments = parser.parse_args()
    if arguments.show:
        print(table([json.loads(path.read_text()) for path in arguments.show]))
        return
    if arguments.json is None:
        parser.error("--json is needed")
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device; --tiny runs everything on the host, to no measure")
        arguments.json.write_text(json.dumps({"version": 1, "skipped": "no CUDA device"}))
        return
    size = (2, 64) if arguments.tiny else (arguments.batch, arguments.length)
    job = make_job(arguments.tiny, *size)
    name = torch.cuda.get_device_name() if job.device.type == "cuda" else "host, numbers mean nothing"
    print(f"{name}, torch {torch.__version__}, batch {size[0]} x {size[1]}, model {type(job.model).__name__}")
    rows = Rows(
        arguments.json,
        version=2,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        device=name,
        torch=str(torch.__version__),
        tiny=arguments.tiny,
        batch=list(size),
        model=type(job.model).__name__,
        complete=False,
    )
    short = job.tokens[:1, :32] if arguments.tiny else job.tokens[: SHORT[0], : SHORT[1]]
    with scratch(arguments.dir) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        if not arguments.no_ours:
            measure_ours(job, folder / "store", rows, arguments.steps, arguments.repeat, short)
            rows["bars"] = bars(rows)
        if not arguments.no_peers:
            measure_peers(job, folder, rows, arguments.repeat)
        dist.destroy_process_group()
    for bar in rows.get("bars", []):
        verdict = "holds" if bar["holds"] else "MISSED"
        print(f"bar {bar['bar']}: {bar['value']:.3f}, limit {bar['limit']:.3f}, {verdict}")
    rows["complete"] = True


if __name__ == "__main__":
    main()
