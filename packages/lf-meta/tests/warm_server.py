"""A process that has made slow imports once, and forks for each call of a test; each package has its copy.

Starting torch takes more CPU than most of what tests start it for. A script asks a :class:`Server` for answers, and is
itself that server when it is run: :func:`serve` imports, then answers requests by what their forked children found.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

_answers: list[TextIO] = []


class Server:
    """A running script that serves until this process ends.

    Attributes:
        process: what runs it.
    """

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def ask(self, request: Any) -> Any:
        """The answer to a request; both travel as JSON.

        Raises:
            AssertionError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{self.process.args} ended with {self.process.poll()}"
        return json.loads(line)

    def _end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(modules: Iterable[str], answer: Callable[[Any], Any]) -> None:
    """Import the modules, then answer requests until nobody can ask any more; what is printed goes to stderr."""
    _answers.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=_answers[0], flush=True)


def fork() -> int:
    """``os.fork`` whose child cannot answer, so that its end does not count on what it leaves running."""
    child = os.fork()
    if child == 0:
        _answers[0].close()
    return child
