"""Compiling and checking candidates in other processes, side by side, before any is timed.

Compilation takes a second or more and one core; Triton's disk cache is shared, so what a worker compiled is only
loaded later. A candidate that breaks its device context ends its worker; the next one goes on with the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lf_graph.kernels._tunable import Config, Key, Tunable
from lf_graph.tune._search import configs_of
from lf_graph.tune._table import config_from, config_json, key_from

Findings = dict[tuple[str, Key, Config], str]
_PORTION = 16  # candidates for which a worker makes the inputs once
_ANSWER = "lf_graph.tune: "
_SILENCE_S = 120.0  # a candidate that compiles or runs longer is not worth it


class _Worker:
    """One process that checks candidates; started when it is first needed."""

    def __init__(self, device: torch.device, imports: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "lf_graph.tune._worker", str(device), *imports]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def check(self, tunable: str, key: Key, configs: Sequence[Config], until: float) -> Iterator[str | None]:
        """A reason, "", or None (no memory) for each in order; ends early without time, or without the problem."""
        left = list(configs)
        while left:
            self._ask({"tunable": tunable, "key": list(key), "configs": [config_json(c) for c in left]})
            if not (self._answer(until) or {}).get("ready"):
                self.stop()  # it could not make the inputs; the search itself will meet the error and name it
                return
            while left:
                answer = self._answer(until)
                if answer is None and time.monotonic() >= until:
                    self.stop()
                    return
                left.pop(0)
                yield answer["reason"] if answer else f"ended its process: {self._ended()}"
                if answer is None or answer["lost"]:
                    self.stop()
                    break

    def _ask(self, question: dict[str, Any]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then no answer will come, which says so
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        self._lines = queue.SimpleQueue()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()

    def _answer(self, until: float) -> dict[str, Any] | None:
        """The next line; None if the process ended or is silent for too long."""
        patience = min(_SILENCE_S, max(0.0, until - time.monotonic()))
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            return None
        return None if line is None else dict(json.loads(line))

    def _ended(self) -> str:
        """How the process ended."""
        assert self._process is not None
        try:
            return f"exit status {self._process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            return f"no answer within {_SILENCE_S:.0f} s"

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_ANSWER):  # libraries print too
            lines.put(line.removeprefix(_ANSWER))
    lines.put(None)
    process.stdout.close()


def _parts(jobs: Sequence[tuple[Tunable, Key]]) -> list[tuple[str, Key, list[Config]]]:
    """Portions of candidates: the first of every job, then the second of every job..."""
    parts = []
    for number, (tunable, key) in enumerate(jobs):
        configs = configs_of(tunable, key)
        for start in range(0, len(configs), _PORTION):
            parts.append((start, number, (tunable.name, key, configs[start : start + _PORTION])))
    return [part for _, _, part in sorted(parts, key=lambda p: p[:2])]


def check_ahead(
    jobs: Sequence[tuple[Tunable, Key]],
    device: torch.device,
    workers: int,
    until: float,
    imports: Sequence[str] = (),
) -> Findings:
    """Reasons against candidates by (tunable, key, configuration), "" for those that passed.

    Those that were not reached in time are absent, and so are all of a key whose inputs could not be made.
    """
    todo: queue.SimpleQueue[tuple[str, Key, list[Config]]] = queue.SimpleQueue()
    for part in _parts(jobs):
        todo.put(part)
    found: Findings = {}

    def serve() -> None:
        worker = _Worker(device, imports)
        try:
            while time.monotonic() < until:
                name, key, configs = todo.get_nowait()
                for config, reason in zip(configs, worker.check(name, key, configs, until), strict=False):
                    if reason is not None:
                        found[name, key, config] = reason
        except queue.Empty:
            pass
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(min(workers, todo.qsize()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def question_from(line: str) -> tuple[str, Key, list[Config]]:
    """A question as a worker reads it: tunable, key, configurations."""
    question = json.loads(line)
    return question["tunable"], key_from(question["key"]), [config_from(c) for c in question["configs"]]


def answer_line(**fields: Any) -> str:
    """An answer as a worker prints it: ``ready``, or ``reason`` and ``lost``."""
    return _ANSWER + json.dumps(fields)
