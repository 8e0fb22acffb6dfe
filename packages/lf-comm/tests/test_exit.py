"""Threads of this package end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time, torch
from lf_comm import _worker

def work():
    time.sleep(0.5)
    print("summed", flush=True)
    return torch.ones(3)

_worker.EXIT_PATIENCE_S = {patience}
future = _worker.Behind().run(work, torch.device("cpu"), 0)
{main}
"""


def run(main: str, patience: float) -> str:
    program = PROGRAM.format(main=main, patience=patience)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_sum_that_runs_at_exit_ends_first() -> None:
    assert run("", 60) == "summed\n"


def test_a_sum_that_a_lost_peer_holds_does_not_hold_the_exit() -> None:
    assert run("_worker.Behind().run(lambda: time.sleep(600), torch.device('cpu'), 0)", 1.5) == "summed\n"
