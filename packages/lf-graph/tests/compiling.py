"""Functions run where Triton compiles instead of interpreting: in children of one process that serves all tests.

Starting torch, Triton and lf_graph takes more CPU than most of what is then compiled. So one process imports them,
without ``TRITON_INTERPRET``, and forks for each call: what a call patches, compiles or sets is gone with its child.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent / "kernels")]
PRELOADED = ("torch._dynamo", "torch._functorch.aot_autograd", "triton.compiler", "lf_graph.kernels")


def call(module: str, function: str, *arguments: Any) -> Any:
    """``module.function(*arguments)`` of a helper beside the tests; arguments and result travel as JSON.

    Raises:
        AssertionError: the function raised, or its process died; the message is the traceback.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([module, function, arguments]) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the process that compiles ended with {server.poll()}"
    result, problem = json.loads(line)
    assert not problem, problem
    return result


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a child prints is no answer
    sys.path[:0] = FOLDERS
    for name in PRELOADED:
        importlib.import_module(name)
    for request in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(request, theirs)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        died = json.dumps([None, f"{request.strip()[:500]}: its process ended with {status} and no answer"])
        print(answer or died, file=answers, flush=True)


def _answer(request: str, pipe: int) -> NoReturn:
    try:
        module, function, arguments = json.loads(request)
        found = json.dumps([getattr(importlib.import_module(module), function)(*arguments), ""])
    except BaseException:
        found = json.dumps([None, traceback.format_exc()])
    with os.fdopen(pipe, "w") as file:
        file.write(found)
    os._exit(0)


if __name__ == "__main__":
    _serve()
