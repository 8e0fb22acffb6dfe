"""Run the real command line in real processes, on a job small enough to be started dozens of times."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import warm

SMALL = [
    "model.args.layers=1",
    "model.args.hidden=32",
    "model.args.ffn=48",
    "model.args.heads=2",
    "model.args.dropout=0.1",
    "data.max_len=64",
    "batch.size=8",
    "batch.accum=2",
    "metrics.every=5",
    "eval.every=0",
    "eval.batches=2",
]
Popen = subprocess.Popen[str]


@dataclass
class Cli:
    """``loongforge`` inside one folder."""

    folder: Path
    environment: dict[str, str]
    started: list[Popen] = field(default_factory=list)

    def start(self, *arguments: str, **environment: str) -> Popen:
        """Start a command; its output goes to ``out`` in the folder."""
        out = (self.folder / "out").open("a")
        with out:
            process = subprocess.Popen(
                [sys.executable, "-m", "lf_meta.cli", *arguments],
                cwd=self.folder,
                env={**self.environment, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    def clean_up(self) -> None:
        """End what a failed test left running, with everything below it."""
        for process in self.started:
            if process.poll() is None:
                below = psutil.Process(process.pid).children(recursive=True)
                for victim in [process, *below]:
                    victim.kill()
                process.wait()

    def run(self, *arguments: str, code: int = 0, cold: bool = False, **environment: str) -> str:
        """Run a command to its end, check its exit code, return its output.

        Args:
            cold: start an interpreter for it, as a user does; else torch is there already.
            environment: further variables; they are for a start of its own.
        """
        out = self.folder / "out"
        out.unlink(missing_ok=True)
        if cold or environment:
            process = self.start(*arguments, **environment)
            found = process.wait(timeout=240)
        else:
            found = warm.run(list(arguments), self.folder, self.environment, out, timeout=240)
        assert found == code, self.output()
        return self.output()

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def train(self, name: str, *overrides: str, code: int = 0, **environment: str) -> str:
        """A small run to its end."""
        return self.run("train", f"run.name={name}", *SMALL, *overrides, code=code, **environment)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Complete metric rows of a run."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self, name: str) -> dict[int, tuple[float, float]]:
        """step -> (loss, lr); fails on a step that appears twice."""
        rows = [r for r in self.rows(name) if "loss" in r]
        found = {r["step"]: (r["loss"], r["lr"]) for r in rows}
        assert len(found) == len(rows), "a step appears twice"
        return found

    def digest(self, name: str, step: int | None = None) -> str:
        """sha256 of a checkpoint."""
        at = [] if step is None else ["--step", str(step)]
        return self.run("digest", f"runs/{name}", *at).split()[0]

    def sample_ids(self, name: str) -> dict[int, list[int]]:
        """step -> record ids of the global batch, in order of the ranks."""
        by_step: dict[int, dict[int, list[int]]] = {}
        for path in sorted((self.folder / "runs" / name).glob("ids-rank-*.jsonl")):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                by_step.setdefault(row["step"], {})[int(path.stem.split("-")[-1])] = row["ids"]
        return {s: [i for r in sorted(ranks) for i in ranks[r]] for s, ranks in by_step.items()}


def _cli(folder: Path) -> Cli:
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    environment.pop("LOONGFORGE_EXIT_FILE", None)
    return Cli(folder, environment)


@pytest.fixture(scope="session")
def make_cli() -> Callable[[Path], Cli]:
    """``loongforge`` for a folder of the test's choice."""
    return _cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """``loongforge`` in a fresh folder."""
    made = _cli(tmp_path)
    yield made
    made.clean_up()


def wait_until(condition: Callable[[], object], process: Popen | None = None, timeout: float = 120) -> None:
    """Poll a condition; fail when it does not come true or the process ends first."""
    end = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, f"ended early with {process and process.returncode}"
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def small() -> list[str]:
    return SMALL
