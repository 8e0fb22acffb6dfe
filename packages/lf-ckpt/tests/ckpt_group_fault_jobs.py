"""What ranks do in tests of errors that only one rank of a group has; a module of its own, for the processes import it
by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ckpt_group_jobs import Bits, world
from ckpt_states import bits
from test_filling import FailsSecondRead, place_of, tensors

import lf_ckpt
from lf_ckpt.errors import CkptError


def open_what_cannot_be(rank: int, path: str, case: str, broken: int) -> tuple[str, int | None]:
    """An open that one rank cannot begin; the error of this rank, and what a good open finds then."""
    wrong: dict[str, dict[str, Any]] = {
        "option": {"io": "fast"},
        "timeout": {"group_timeout": float("inf")},
        "place": {"mode": "local", "path": "memory://nowhere"},
        "reader": {"read_only": True},
        "store": {"path": f"{path}/other"},
    }
    options: dict[str, Any] = {"path": path, "group_timeout": 600.0}
    bad = {**options, **(wrong[case] if rank == broken else {})}
    try:
        lf_ckpt.open(bad.pop("path"), group=world(), **bad).close()
        message = "opened"
    except (CkptError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    with lf_ckpt.open(options.pop("path"), group=world(), **options) as store:
        store.save(1, {"x": torch.ones(3)}).wait()
        return message, store.latest()


def fail_after_the_check(rank: int, path: str, strict: bool) -> tuple[str, str, Bits]:
    """The disk of rank 1 fails while tensors are being filled with step 2; the step loaded or the error of this rank,
    why it fell back, and the tensors now."""
    files = FailsSecondRead(place_of(Path(path), "t30", step=2) if rank == 1 else -1)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    why = ""
    with lf_ckpt.open(path, group=world(), files=files) as store:
        files.armed = True
        try:
            loaded = store.load(into=into, strict=strict, io="buffered")
            outcome, why = str(loaded.step), str(loaded.report.fallbacks)
        except CkptError as error:
            outcome = f"{type(error).__name__}: {error}"
    return outcome, why, {name: bits(tensor) for name, tensor in into.items()}
