"""``python -m lf_graph.tune._worker DEVICE [MODULE...]``: checks candidates named on stdin, one line per answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from lf_graph.kernels._tunable import TUNABLES, Config, Key, Problem
from lf_graph.tune._ahead import answer_line, question_from
from lf_graph.tune._run import load_kernels
from lf_graph.tune._search import SEED
from lf_graph.tune._verify import DeviceLostError, fault


def answer(tunable: str, key: Key, configs: Sequence[Config], device: torch.device) -> None:
    """Prints the reason against each configuration, or "", as soon as it is known.

    None for one that found no memory beside the other workers. Ends the process after one that broke the device.
    """
    torch.manual_seed(SEED)
    problem = TUNABLES[tunable].problem(key, device)
    print(answer_line(ready=True), flush=True)
    for config in configs:
        reason, lost = _judged(problem, config, device)
        print(answer_line(reason=reason, lost=lost), flush=True)
        if lost:
            raise SystemExit(1)


def _judged(problem: Problem, config: Config, device: torch.device) -> tuple[str | None, bool]:
    """The reason, and whether the device is lost."""
    try:
        return fault(problem, config, device), False
    except torch.OutOfMemoryError:
        return None, False
    except DeviceLostError as e:
        return f"lost the device: {e}", True


def main(argv: Sequence[str]) -> None:
    """Answer until stdin ends."""
    device = torch.device(argv[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    load_kernels(argv[1:])
    for line in sys.stdin:
        answer(*question_from(line), device)


if __name__ == "__main__":
    main(sys.argv[1:])
