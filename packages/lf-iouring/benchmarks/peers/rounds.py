"""Drives the processes of a benchmark in rounds, so that every row sees the same state of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_S = 120.0  # a peer that takes longer is ended, and its rows say so
BENCHMARKS = Path(__file__).resolve().parents[1]


class Peer:
    """One running process `python -m peers.NAME ROOT`; what it prints goes to ROOT/NAME.log."""

    def __init__(self, python: str, name: str, root: Path) -> None:
        self.name = name
        self.log = root / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", f"peers.{name}", str(root)], cwd=BENCHMARKS, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        hello = self._answer()
        self.error: str | None = hello.get("error")
        self.cases: list[dict[str, Any]] = hello.get("cases", [])
        self.versions: dict[str, str] = hello.get("versions", {})

    def timed(self, case: int, epoch: int, seconds: float) -> dict[str, Any]:
        """Items, wall and CPU seconds of one pass, or `error`."""
        assert self.process.stdin is not None
        request = {"case": case, "epoch": epoch, "seconds": seconds}
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"error": self._last_words()}
        return self._answer()

    def close(self) -> None:
        """End the process and every worker it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            self.close()
            return {"error": f"no answer within {ANSWER_S:.0f} s"}
        line = self.process.stdout.readline()
        if not line:
            return {"error": self._last_words()}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "ended without a word")[:300]


@dataclass
class Row:
    """Rates of one case, one of each a round: items a second of wall time and of CPU time."""

    name: str
    peer: str
    group: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float:
        """Items a second of wall time; 0 for a row that failed."""
        return statistics.median(self.wall) if self.wall else 0.0

    @property
    def best(self) -> float:
        return max(self.wall, default=0.0)

    @property
    def core(self) -> float:
        """Items a second of CPU time, median."""
        return statistics.median(self.cpu) if self.cpu else 0.0

    def add(self, answer: dict[str, Any]) -> None:
        self.error = answer.get("error")
        if self.error is None:
            self.wall.append(answer["items"] / answer["wall"])
            self.cpu.append(answer["items"] / max(answer["cpu"], 1e-3))


def measure(peers: Sequence[Peer], repeat: int, seconds: float, tried: bool) -> list[Row]:
    """One pass of every case a round, in turns; a short first round warms caches up and is not counted."""
    timed = [
        (peer, index, Row(case["name"], peer.name, case["group"]))
        for peer in peers
        for index, case in enumerate(peer.cases)
        if tried or not case["tried"]
    ]
    for number in range(repeat + 1):
        for peer, index, row in timed:
            if row.error is None:
                answer = peer.timed(index, number, seconds if number else seconds / 5)
                if number or "error" in answer:
                    row.add(answer)
    failed = [Row("all", peer.name, "failed", error=peer.error) for peer in peers if peer.error]
    return [row for _, _, row in timed] + failed
