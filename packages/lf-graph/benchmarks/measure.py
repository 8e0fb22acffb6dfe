"""The measuring frame: what a row is, and what is recorded about each.

Definitions, the same for stock rows and ours (and those of the baselines of DESIGN.md section 4):

- step_ms: median over windows between two CUDA events after warm-up, the device idle before each window; spread is
  (max - min) / median of them
- through_ms: many steps queued without waiting, total over number
- launches: launch calls of one profiled step; kernels: device events in it; busy_ms: the sum of their times, in which
  the profiler's own ranges (``Optimizer.step``) count as they did in the baselines; kernel_ms is the sum without them
- prep_s: from the first line of ``setup`` to the end of the first steps, compilation and capture included
- peak_gib: most memory allocated from then to the end of timing
- rows that launch much (``launches_matter``) are timed before their process first profiles anything. In the output of
  the baselines, eager steps timed after a profiled one took longer with fewer launches (VLA, batch 4: 145 ms with 8047
  launches before any profile, 191 ms with 4958 after); the likely cause is that the tracer stays attached
- losses: of three steps from the initial weights on the seeded batch; bench_step.py compares them with the eager row's
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from workloads import Workload

from lf_graph._cuda import peaks_before

LAUNCH_CALLS = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaLaunchKernelExC",
    "cudaGraphLaunch",
    "cudaMemsetAsync",
    "cudaMemcpyAsync",
)
# ranges that the profiler shows on the device's timeline; no work of their own
RANGES = ("Optimizer.", "ProfilerStep", "## ", "Torch-Compiled Region", "nccl:")
WARM_UP = 4
PARITY_SEED = 2


@dataclass(frozen=True)
class Case:
    """What a row is set up for."""

    workload: Workload
    batch: int
    device: torch.device
    seed: int = 0

    def model(self) -> torch.nn.Module:
        """The plain model with its initial weights."""
        return self.workload.model(self.device, self.seed)

    def inputs(self, seed: int = 1) -> Any:
        """The seeded batch."""
        return self.workload.batch(self.batch, self.device, seed)


@dataclass
class Prepared:
    """A row ready to run.

    ``step`` does one whole optimizer step and returns the loss of its forward, still on the device; ``restart`` puts
    the initial weights back and forgets the optimizer's moments, at unchanged addresses. ``feeds`` are the tensors
    that ``step`` reads its batch from (any nesting); curves.py copies every step's batch there. ``facts`` tells what
    the row chose by itself, once it ran.
    """

    step: Callable[[], Tensor]
    restart: Callable[[], None]
    close: Callable[[], None] = lambda: None
    trainable: int = 0
    facts: Callable[[], dict[str, Any]] = dict
    feeds: Any = None

    def feed(self, batch: Any) -> None:
        """Let the next steps compute ``batch``, which is nested as ``feeds``."""
        if self.feeds is None:
            raise TypeError("this row does not say where it reads its batch: give Prepared(feeds=...)")
        pairs = zip(pytree.tree_leaves(self.feeds), pytree.tree_leaves(batch), strict=True)
        for kept, given in pairs:
            kept.copy_(given)


@dataclass(frozen=True)
class Row:
    """One line of the table. ``setup`` must not keep anything alive after ``close``.

    ``expect_s`` is how long the row takes in all, for the time budget; ``urgent`` rows go first; a ``plain`` row
    is repeated in processes of its own on request; one whose ``launches_matter`` is timed where no profiler ran before;
    a row that changes the mathematics (``masters`` false: no float32
    master weights) is shown but never the best.
    """

    workload: Workload
    batch: int
    name: str
    source: str
    setup: Callable[[Case], Prepared]
    expect_s: float = 15.0
    urgent: bool = False
    plain: bool = False
    needs_gpu: bool = True
    masters: bool = True
    launches_matter: bool = False

    @property
    def key(self) -> str:
        """Names the row on the command line."""
        return f"{self.workload.name}|{self.batch}|{self.name}"


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    windows: int = 12
    window_steps: int = 1
    through_steps: int = 12
    profiled: bool = True


def count_trained(model: torch.nn.Module) -> int:
    """Number of values that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def reload_weights(model: torch.nn.Module, fresh: torch.nn.Module) -> None:
    """Copy the trainable values of ``fresh`` into ``model`` in place."""
    source = dict(fresh.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(source[name])


def forget_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero every state tensor of a torch optimizer in place, its step counts too."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds ``run`` takes, by CUDA events or, on a CPU, by its clock."""
    synchronize(device)
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1000
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last))


def repeat(prepared: Prepared, times: int) -> Callable[[], None]:
    """Many steps as one call."""

    def run() -> None:
        for _ in range(times):
            prepared.step()

    return run


def time_steps(prepared: Prepared, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Milliseconds per step, in windows and in one long queue."""
    windows = [
        timed(repeat(prepared, effort.window_steps), device) / effort.window_steps
        for _ in range(effort.windows)
    ]
    through = timed(repeat(prepared, effort.through_steps), device) / effort.through_steps
    median = statistics.median(windows)
    return {
        "step_ms": median,
        "spread": (max(windows) - min(windows)) / median,
        "through_ms": through,
        "windows_ms": [round(ms, 4) for ms in windows],
    }


def is_range(event: Any) -> bool:
    """Whether a device event of the profiler is a named range and no kernel or copy."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(RANGES)


def count_events(events: list[Any], averages: list[Any]) -> dict[str, Any]:
    """Launches, kernels and their time from one profiled step."""
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    work = [e for e in on_device if not is_range(e)]
    return {
        "launches": sum(e.count for e in averages if e.key in LAUNCH_CALLS),
        "kernels": len(on_device),
        "busy_ms": sum(e.device_time for e in on_device) / 1000,
        "kernel_ms": sum(e.device_time for e in work) / 1000,
    }


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What one step launches; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize(device)
    return count_events(list(trace.events()), list(trace.key_averages()))


def first_losses(prepared: Prepared, seed: int, steps: int = 3) -> list[float]:
    """Losses of the first steps from the initial weights, with the dropout of ``seed``."""
    prepared.restart()
    torch.manual_seed(seed)
    return [float(prepared.step().detach().clone()) for _ in range(steps)]


def clean(device: torch.device) -> None:
    """Drop compiled code and free memory of the row before."""
    if (
        "torch._dynamo" in sys.modules
    ):  # importing it takes seconds, and rows that do not compile need not pay
        torch._dynamo.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_gib(device: torch.device) -> float:
    """Most memory allocated since the last reset, in GiB; captures of lf-graph reset torch's count in between."""
    if device.type != "cuda":
        return 0.0
    forgotten = peaks_before.get(torch.cuda.current_device() if device.index is None else device.index, 0)
    return max(torch.cuda.max_memory_allocated(device), forgotten) / 2**30


def reset_peak(device: torch.device) -> None:
    """Start counting the peak anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        peaks_before.clear()


def _measure(row: Row, case: Case, effort: Effort) -> dict[str, Any]:
    device = case.device
    reset_peak(device)
    start = time.perf_counter()
    prepared = row.setup(case)
    try:
        repeat(prepared, WARM_UP)()
        synchronize(device)
        result: dict[str, Any] = {"prep_s": time.perf_counter() - start, "trainable": prepared.trainable}
        peak = peak_gib(device)
        result["losses"] = first_losses(prepared, PARITY_SEED)
        if row.name == "eager":  # how far another dropout seed moves the losses
            result["losses_reseeded"] = first_losses(prepared, PARITY_SEED + 1)
        reset_peak(device)  # restarting builds a second model for a moment
        result |= time_steps(prepared, device, effort)
        result["peak_gib"] = max(peak, peak_gib(device))
        result["units_per_s"] = case.workload.units(case.batch) / result["step_ms"] * 1000
        if effort.profiled:
            result |= profile_step(repeat(prepared, 1), device)
        return result | {"facts": prepared.facts()}  # read before close
    finally:
        prepared.close()


def profile_again(row: Row, device: torch.device) -> dict[str, Any]:
    """Set a row that was timed before up again, and count what one step launches; an error is what was found."""
    clean(device)
    try:
        prepared = row.setup(Case(row.workload, row.batch, device))
        try:
            repeat(prepared, WARM_UP)()
            return profile_step(repeat(prepared, 1), device)
        finally:
            prepared.close()
    except Exception as e:  # the times of the row stay
        return {"profile_error": f"{type(e).__name__}: {str(e)[:300]}"}
    finally:
        clean(device)


def identity(row: Row) -> dict[str, Any]:
    """What says which row a result is of."""
    return {
        "workload": row.workload.name,
        "batch": row.batch,
        "row": row.name,
        "source": row.source,
        "masters": row.masters,
        "unit": row.workload.unit,
    }


def not_measured(row: Row, status: str, why: str) -> dict[str, Any]:
    """The result of a row that has no numbers."""
    return identity(row) | {"status": status, "error": why}


def measure(row: Row, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Set a row up and measure it; an error becomes the row's result."""
    if row.needs_gpu and device.type != "cuda":
        return not_measured(row, "skipped", "needs a GPU")
    clean(device)
    start = time.perf_counter()
    try:
        result = (
            identity(row) | {"status": "ok"} | _measure(row, Case(row.workload, row.batch, device), effort)
        )
    except Exception as e:  # one row must not cost the others their device time
        result = not_measured(row, "failed", f"{type(e).__name__}: {str(e)[:600]}")
    clean(device)
    return result | {"seconds": time.perf_counter() - start}


def driver() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None
    return next((word for word in line.split() if word[0].isdigit() and "." in word), line)


def installed(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """Where this ran."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "transformers": installed("transformers"),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
