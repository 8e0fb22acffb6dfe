"""Saving and restoring a run, through lf-ckpt or through torch.save; both keep the same state.

State: parameters and optimizer moments by parameter name, generator states, and items (step, tokens seen,
loader position, configuration). Learning rate, sample order and per-step seeds are functions of the step and
need no state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import lf_ckpt
from lf_meta.config import CkptSection
from lf_meta.errors import CheckpointError, NoCheckpointError

log = logging.getLogger(__name__)
Items = dict[str, Any]


@dataclass(frozen=True)
class Restored:
    """What a load found."""

    step: int
    tensors: Mapping[str, Tensor]
    items: Items
    notes: tuple[str, ...] = ()


class Checkpointer(Protocol):
    """A place for checkpoints; only rank 0 saves, every rank loads."""

    def save(self, step: int, tensors: Mapping[str, Tensor], items: Items) -> None: ...

    def load(self, step: int | None) -> Restored: ...

    def steps(self) -> tuple[int, ...]: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except lf_ckpt.NoCheckpointError as e:
        # with fallbacks there were checkpoints, all of them damaged: never to be taken for a fresh start
        kind = CheckpointError if e.fallbacks else NoCheckpointError
        raise kind(f"checkpoint: {e}") from e
    except lf_ckpt.CkptError as e:
        raise CheckpointError(f"checkpoint: {e}") from e


def _rules(section: CkptSection) -> Sequence[lf_ckpt.retention.Rule]:
    if isinstance(section.keep, int):
        return [lf_ckpt.Last(section.keep)]
    return lf_ckpt.keep_from_json(section.keep)


class LfCheckpointer:
    """lf-ckpt: asynchronous, checked, incremental."""

    def __init__(self, path: Path, section: CkptSection, read_only: bool = False) -> None:
        with _as_checkpoint_error():
            self._store = lf_ckpt.open(
                path,
                keep=_rules(section),
                on_error=section.on_error,
                full_every=section.full_every,
                compress=section.compress,
                read_only=read_only,
            )

    def save(self, step: int, tensors: Mapping[str, Tensor], items: Items) -> None:
        with _as_checkpoint_error():
            self._store.save(step, tensors, items)

    def load(self, step: int | None) -> Restored:
        with _as_checkpoint_error():
            loaded = self._store.load(step="latest" if step is None else step)
        notes = tuple(f"step {s} was skipped: {why}" for s, why in loaded.report.fallbacks)
        return Restored(loaded.step, loaded.tensors, dict(loaded.items), notes)

    def steps(self) -> tuple[int, ...]:
        """Steps that can be loaded, ascending."""
        return self._store.steps()

    def wait(self) -> None:
        with _as_checkpoint_error():
            self._store.wait()

    def close(self) -> None:
        with _as_checkpoint_error():
            self._store.close()


def _sync_folder(path: Path) -> None:
    """A rename is durable once its folder is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TorchCheckpointer:
    """The plain twin: torch.save, made atomic by a temporary name, fsync and rename; blocks while it writes."""

    def __init__(self, path: Path, section: CkptSection, read_only: bool = False) -> None:
        self._path, self._section = path, section
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)

    def steps(self) -> tuple[int, ...]:
        """Steps that were saved, ascending."""
        return tuple(sorted(int(p.stem.removeprefix("step-")) for p in self._path.glob("step-*.pt")))

    def _file(self, step: int) -> Path:
        return self._path / f"step-{step:09d}.pt"

    def save(self, step: int, tensors: Mapping[str, Tensor], items: Items) -> None:
        temporary = self._path / f".step-{step}.tmp"
        try:
            with temporary.open("wb") as f:
                torch.save({"tensors": dict(tensors), "items": json.dumps(items)}, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, self._file(step))
            _sync_folder(self._path)
        except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
            temporary.unlink(missing_ok=True)
            if self._section.on_error == "raise":
                raise CheckpointError(f"checkpoint of step {step}: {e}") from e
            log.warning("checkpoint of step %d failed: %s; training goes on", step, e)
            return
        assert isinstance(self._section.keep, int)  # the configuration refuses rules here
        for old in self.steps()[: -self._section.keep]:
            self._file(old).unlink()

    def load(self, step: int | None) -> Restored:
        steps = self.steps()
        wanted = tuple(reversed(steps)) if step is None else tuple(s for s in steps if s == step)
        if not wanted:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise NoCheckpointError(f"{self._path}: {what}; it has {list(steps)}")
        notes: list[str] = []
        for chosen in wanted:
            try:
                data = torch.load(self._file(chosen), map_location="cpu", weights_only=True)
                return Restored(chosen, data["tensors"], json.loads(data["items"]), tuple(notes))
            except Exception as e:  # torch.load raises many kinds for a damaged file
                notes.append(f"step {chosen} was skipped: {e}")
        raise CheckpointError(f"{self._path}: no checkpoint can be read: {'; '.join(notes)}")

    def wait(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held open."""


def open_checkpointer(run: Path, section: CkptSection, read_only: bool = False) -> Checkpointer:
    """The store of a run, chosen by ``ckpt.backend``."""
    path = Path(section.dir) if section.dir else run / "ckpt"
    kind = LfCheckpointer if section.backend == "lf" else TorchCheckpointer
    return kind(path, section, read_only)


def load_bundle(path: Path) -> Restored:
    """The checkpoint in one file that ``lf-ckpt export --lfckpt`` has written from a run's store, every byte verified.

    Raises:
        CheckpointError: unreadable, damaged, or not of a run.
    """
    with _as_checkpoint_error():
        try:
            loaded = lf_ckpt.load_file(path)
        except ValueError as e:  # no path at all: a zero byte in it
            raise CheckpointError(f"{path}: {e}") from e
    if not _is_of_a_run(loaded.items):
        raise CheckpointError(f"{path}: holds no checkpoint of a run, only {len(loaded.tensors)} tensors")
    return Restored(loaded.step, loaded.tensors, dict(loaded.items))


def _is_of_a_run(items: Mapping[str, Any]) -> bool:
    """Whether the items that every reader needs are there and of their kinds."""
    train, config = items.get("train"), items.get("config")
    counts = (
        [train.get(key) for key in ("step", "tokens_seen", "vocab_size")]
        if isinstance(train, dict)
        else [None]
    )
    model = config.get("model") if isinstance(config, dict) else None
    return (
        all(type(n) is int for n in counts)
        and isinstance(model, dict)
        and isinstance(items.get("data"), dict)
    )


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Items]:
    """Everything a resume needs of model, optimizer and generators: (tensors, items)."""
    tensors, items = lf_ckpt.collect(model, optimizer)
    rng_tensors, rng_items = lf_ckpt.rng_state()
    return {**tensors, **rng_tensors}, {**items, **rng_items}


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, restored: Restored) -> None:
    """Inverse of :func:`collect_state`, in place."""
    with _as_checkpoint_error():
        lf_ckpt.restore(model, optimizer, restored)
        lf_ckpt.set_rng_state(restored)


def digest(restored: Restored) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, and over all items of a checkpoint.

    Two runs with equal digests have the same weights, moments, generator states and data position, bit for bit.
    """
    h = hashlib.sha256()
    for name in sorted(restored.tensors):
        t = restored.tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        if t.numel():
            h.update(t.view(-1).view(torch.uint8).numpy().data)
    comparable = {k: v for k, v in restored.items.items() if k != "config"}
    h.update(json.dumps(comparable, sort_keys=True).encode())
    return h.hexdigest()
