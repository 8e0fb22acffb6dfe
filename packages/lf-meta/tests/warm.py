"""``loongforge`` without its start: runs to the end as children of one process that has imported torch already.

The tests of a package run the command about a hundred times, most of them for a second of work behind five of imports.
What signals, kills or hooks a process starts it for itself (``Cli.start``); so do the first runs a user makes.
"""

from __future__ import annotations

import functools
import os
import random
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import psutil
from warm_server import Server, fork, serve

PRELOADED = ("torch.distributed", "lf_meta.cli", "lf_meta.jobs", "lf_meta.models", "matplotlib.figure")


def run(arguments: list[str], folder: Path, environment: dict[str, str], out: Path, timeout: float) -> int:
    """Runs ``loongforge`` to its end in a folder; its output is appended to a file.

    Returns:
        The exit code, -signal where one ended it.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed with what it had started.
    """
    request = {"arguments": arguments, "folder": str(folder), "environment": environment, "out": str(out)}
    code: int | None = _server().ask({**request, "timeout": timeout})
    if code is None:
        raise subprocess.TimeoutExpired(arguments, timeout)
    return code


@functools.cache
def _server() -> Server:
    return Server(__file__, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"})


def _answer(request: dict[str, Any]) -> int | None:
    child = fork()
    if child == 0:
        _become(request)  # ends as any process does, by SystemExit
    return _wait(child, request["timeout"])


def _wait(child: int, timeout: float) -> int | None:
    """Exit code, or None for what had to be killed."""
    watch = os.pidfd_open(child)
    try:
        ended = bool(select.select([watch], [], [], timeout)[0])
    finally:
        os.close(watch)
    if not ended:
        for victim in [*psutil.Process(child).children(recursive=True), psutil.Process(child)]:
            victim.kill()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(request: dict[str, Any]) -> NoReturn:
    """Everything that a start by ``python -m lf_meta.cli`` would have set."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for ours, standard in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(ours, standard)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["loongforge", *request["arguments"]]
    sys.path[0] = request["folder"]
    random.seed()
    from lf_meta.cli import main

    sys.exit(main())


if __name__ == "__main__":
    serve(PRELOADED, _answer)
