"""Metrics stay on the device until a log line is due; one copy then brings all of them to the host."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lf_meta.errors import NonFiniteLossError

Row = dict[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves behind; the tensors are still on the device."""

    step: int
    epoch: int
    lr: float
    totals: Tensor  # [2]: loss sum, token count, over all ranks
    grad_norm: Tensor  # []


class StepMetrics:
    """Collects steps and turns them into rows.

    A row has step, epoch, loss (nats per token), grad_norm, lr, tokens (predicted, this step), and, equal for
    all rows of one flush, tokens_per_s, step_ms and wait_pct (share of the time the loop waited for data).
    """

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._since = time.perf_counter()
        self._waited = 0.0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: StepRecord, waited: float) -> None:
        """Keep one step; ``waited`` is the seconds its batch took to arrive."""
        self._records.append(record)
        self._waited += waited

    def restart_clock(self) -> None:
        """Leave out time that is not training (eval, start-up)."""
        self._since, self._waited = time.perf_counter(), 0.0

    def flush(self) -> list[Row]:
        """One device-to-host copy for all collected steps.

        Raises:
            NonFiniteLossError: naming the first step whose loss or gradient norm is not finite.
        """
        records, self._records = self._records, []
        if not records:
            return []
        columns = torch.stack([torch.cat((r.totals.double(), r.grad_norm.double().view(1))) for r in records])
        values = columns.cpu().tolist()
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        shared = {
            "tokens_per_s": round(sum(v[1] for v in values) / elapsed, 1),
            "step_ms": round(1000 * elapsed / len(records), 3),
            "wait_pct": round(100 * self._waited / elapsed, 2),
        }
        self.restart_clock()
        return [{**self._row(r, *v), **shared} for r, v in zip(records, values, strict=True)]

    @staticmethod
    def _row(record: StepRecord, loss_sum: float, count: float, grad_norm: float) -> Row:
        loss = loss_sum / max(count, 1)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteLossError(record.step, loss, grad_norm)
        own: Row = {"step": record.step, "epoch": record.epoch, "loss": loss, "grad_norm": grad_norm}
        return {**own, "lr": record.lr, "tokens": int(count)}


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line; a row with ``step`` and ``loss`` a step, others are events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._complained = False

    def rows(self) -> Iterator[Row]:
        """Every complete row; a torn last line (a killed process) is left out."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row

    def append(self, rows: list[Row]) -> None:
        """Add rows. A full disk is reported once and does not stop training."""
        text = "".join(json.dumps(r) + "\n" for r in rows)
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(text)
        except OSError as e:
            if not self._complained:
                print(f"warning: cannot write {self.path}: {e}; training goes on", file=sys.stderr)
            self._complained = True

    def truncate_after(self, step: int) -> None:
        """Drop rows of steps later than ``step``, so that a resume leaves no step twice. Atomic."""
        if not self.path.exists():
            return
        kept = [r for r in self.rows() if isinstance(at := r.get("step"), int) and at <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(temporary, self.path)
