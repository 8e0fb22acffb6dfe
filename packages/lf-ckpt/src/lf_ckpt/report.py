"""What saves and loads tell the caller; frozen, printable, and `as_json()` for logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .jsonio import Json


@dataclass(frozen=True)
class SaveReport:
    """One finished save.

    bytes_raw: state, aliases counted once. bytes_written: data file. bytes_shared: raw bytes that the base already had.
    seconds_*: since `save` was called, until the caller's tensors were free, the data was with the kernel, and the
    step was durable. codecs: raw bytes per codec; codecs_stored: what they take in the file. deltas: where the base's
    bytes came from and why the next save will be full, if it will.
    slab, io and priority: how the staging memory, the way of writing and
    the standing of the background threads were chosen. predicted_stall: seconds that `save` was expected to wait for
    the disk (0.0: the slab holds the state; None: nothing measured yet). removed: steps that retention took away.
    error: set only with on_error="warn", when the save failed.
    """

    step: int
    folder: str
    kind: str
    base: str | None
    bytes_raw: int
    bytes_written: int
    bytes_shared: int
    seconds_staged: float
    seconds_written: float
    seconds_durable: float
    codecs: dict[str, int]
    slab: str
    io: str
    codecs_stored: dict[str, int] = field(default_factory=dict)
    deltas: str = ""
    removed: tuple[str, ...] = ()
    error: str | None = None
    priority: str = ""
    predicted_stall: float | None = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"version": 1, **asdict(self)}


@dataclass(frozen=True)
class LoadReport:
    """How a load went.

    fallbacks: (step, reason) of each newer step that was tried and is damaged. taken: present names of the tensors that
    were loaded. missing: names in `into` that the step lacks. unexpected: names of the step that `into` lacks.
    mismatched, reshaped, cast: "name: saved -> wanted" of other shape or dtype, not loaded and loaded. renamed:
    (saved, present) name. left_out: tensors that `only` did not ask for. devices: how each accelerator was reached.
    io: how the files were read, and why.
    """

    folder: str
    kind: str
    bytes_read: int
    seconds: float
    verified: bool
    fallbacks: tuple[tuple[int, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    left_out: int = 0
    devices: tuple[str, ...] = ()
    io: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"version": 1, **asdict(self)}


@dataclass(frozen=True)
class Loaded:
    """A loaded step: tensors by name (tied names give the same tensor), items by name, and the report."""

    step: int
    tensors: dict[str, torch.Tensor]
    items: dict[str, Json]
    report: LoadReport
