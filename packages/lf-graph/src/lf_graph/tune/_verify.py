"""What a configuration has to prove before its time counts.

Compilers have made kernels wrong or unrepeatable for some numbers of warps (flash-linear-attention#1228 and #945,
ROCm/triton#953), and a tuner that only times prefers them if they are fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lf_graph._errors import GraphError
from lf_graph.kernels._tunable import Config, Problem

RUNS = 30


class DeviceLostError(GraphError):
    """A candidate broke the device context of this process (an illegal address, an endless loop that was killed).

    It is recorded, so a new process will not try it again.
    """


def fault(problem: Problem, config: Config, device: torch.device, runs: int = RUNS) -> str:
    """Why a configuration may not win; "" if nothing speaks against it.

    Raises:
        DeviceLostError: nothing more can run in this process.
        torch.OutOfMemoryError: that says more about what else is allocated than about the candidate.
    """
    try:
        _poison(problem.reference)
        first = problem.run(config)
        return _wrong(first, problem) or _unrepeatable(problem, config, first, device, runs)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        _require_alive(device, e)
        return f"does not run: {_brief(e)}"


def _wrong(found: Sequence[Tensor], problem: Problem) -> str:
    shapes, wanted = [tuple(t.shape) for t in found], [tuple(t.shape) for t in problem.reference]
    if shapes != wanted:
        return f"wrong: outputs of shape {shapes}, not {wanted}"
    for i, (output, reference, allowed) in enumerate(
        zip(found, problem.reference, problem.tolerance, strict=True)
    ):
        off = distance(output, reference)
        if not off <= allowed:
            return f"wrong: output {i} is {off:.1e} from its reference, and {allowed:.0e} is allowed"
    return ""


def distance(output: Tensor, reference: Tensor) -> float:
    """``max|output - reference| / max|reference|``; NaN if there is one in the output."""
    if reference.numel() == 0:
        return 0.0
    wide = reference.double()
    scale = float(wide.abs().max()) or 1.0
    return float((output.double() - wide).abs().max()) / scale


def _unrepeatable(
    problem: Problem, config: Config, first: Sequence[Tensor], device: torch.device, runs: int
) -> str:
    """Runs again and again, every other time beside other work, as races show when programs are delayed."""
    differs = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(runs - 1):
        _poison(problem.reference)
        with _busy(device, i % 2 == 1):
            again = problem.run(config)
        changed = [(_bits(a) != _bits(b)).any() for a, b in zip(first, again, strict=True) if a.numel()]
        if changed:
            differs += torch.stack(changed).any()
    count = int(differs)
    return f"not repeatable: {count} of {runs} runs on the same inputs gave other bits" if count else ""


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def _poison(outputs: Sequence[Tensor]) -> None:
    """Leaves NaN in the memory that the next outputs will get, or a kernel that writes nothing would look right."""
    if outputs and outputs[0].is_cuda:
        dtypes = (torch.bfloat16, torch.float32)  # the allocator goes by size
        kept = [torch.full(t.shape, float("nan"), dtype=d, device=t.device) for t in outputs for d in dtypes]
        del kept


@contextmanager
def _busy(device: torch.device, really: bool) -> Iterator[None]:
    """Copies on another stream meanwhile."""
    if not really or device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(4):
            torch.ones(1 << 22, device=device).mul_(2)
    yield
    torch.cuda.current_stream(device).wait_stream(side)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_alive(device: torch.device, error: Exception) -> None:
    try:
        _wait(device)
    except RuntimeError:
        raise DeviceLostError(f"a candidate broke the device context: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
