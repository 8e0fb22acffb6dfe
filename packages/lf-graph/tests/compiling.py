"""Functions run where Triton compiles instead of interpreting: in children of one process that serves all tests.

It imports torch, Triton and lf_graph without ``TRITON_INTERPRET``, and forks for each call: what a call patches,
compiles or sets is gone with its child.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from warm_server import Server, fork, serve

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent / "kernels")]
PRELOADED = ("torch._dynamo", "torch._functorch.aot_autograd", "triton.compiler", "lf_graph.kernels")


def call(module: str, function: str, *arguments: Any) -> Any:
    """``module.function(*arguments)`` of a helper beside the tests; arguments and result travel as JSON.

    Raises:
        AssertionError: the function raised, or its process died; the message is the traceback.
    """
    result, problem = _server().ask([module, function, arguments])
    assert not problem, problem
    return result


@functools.cache
def _server() -> Server:
    return Server(__file__, {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})


def _answer(request: list[Any]) -> Any:
    """(what a child found, the problem it had)."""
    ours, theirs = os.pipe()
    child = fork()
    if child == 0:
        _find(request, theirs)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(found) if found else [None, f"{str(request)[:500]}: its process ended with {status}"]


def _find(request: list[Any], pipe: int) -> NoReturn:
    try:
        module, function, arguments = request
        found = json.dumps([getattr(importlib.import_module(module), function)(*arguments), ""])
    except BaseException:
        found = json.dumps([None, traceback.format_exc()])
    with os.fdopen(pipe, "w") as file:
        file.write(found)
    os._exit(0)


if __name__ == "__main__":
    sys.path[:0] = FOLDERS
    serve(PRELOADED, _answer)
