"""Weights published step after step, for weight sync and serving: a store whose deltas form a chain.

A step of a training store is a delta on the last full step, so that loading reads two steps at most. Here each step is
a delta on the one before it, because a subscriber that follows has just that one: at small learning rates few bfloat16
numbers change per step. Files, commit, checks, retention and `lf-ckpt verify` are those of any other store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Final

import torch

from .catalog import Catalog
from .errors import CkptError, CorruptError, NoCheckpointError, UnsupportedError
from .handle import SaveHandle
from .jsonio import Json
from .loading import describe
from .manifest import Manifest, parse_folder
from .options import Options
from .places import locate
from .reader import MAX_CHAIN, StepReader, read_manifest
from .replica import Replica
from .report import SaveReport
from .retention import Last, Rule
from .storage import Storage
from .store import Store

_KEEP: Final = (Last(8),)


class Publisher:
    """Publishes weights to the store at `path`. A context manager; one thread at a time."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_full: int = 50,
        keep: Sequence[Rule] = _KEEP,
        dtype: torch.dtype | None = torch.bfloat16,
        threads: int = 1,
        files: Storage | None = None,
        **options: Any,
    ) -> None:
        """Open the store for writing.

        every_full: steps of a chain until a full step begins a new one, 1 to 200. keep: what stays, and the links that
        it needs. dtype: floating-point tensors are published as this; None leaves them as they are. Other options are
        those of `lf_ckpt.open`. The bytes of the last step stay in memory (twice), up to `parent_bytes`.
        """
        if not 1 <= every_full <= MAX_CHAIN:
            raise ValueError(f"every_full={every_full}: from 1 to {MAX_CHAIN}")
        self._dtype = dtype
        self._handle: SaveHandle | None = None
        settings = Options(
            keep=tuple(keep), full_every=every_full - 1, threads=threads, chain=True, **options
        )
        self._store = Store(path, settings, files)

    def publish(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        items: Mapping[str, Json] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Cast and save; the tensors may change again when this returns. Steps must ascend.

        Subscribers see the step once it is durable (`handle.wait()`). Errors are those of `Store.save`.
        """
        newest = self._newest()
        if newest is not None and step <= newest:
            raise CkptError(f"step {step}: {newest} is published already, and subscribers only go forward")
        self._handle = self._store.save(step, self._cast(tensors), items, metrics=metrics)
        return self._handle

    def _newest(self) -> int | None:
        """Newest step that is committed or on its way."""
        steps = [_key(folder)[0] for folder in self._store._catalog.folders()]
        if self._handle is not None and not self._handle.done:
            steps.append(self._handle.step)
        return max(steps, default=None)

    def wait(self) -> SaveReport | None:
        """Finish the step in flight; see `Store.wait`."""
        return self._store.wait()

    def close(self) -> None:
        """Finish and unlock; see `Store.close`."""
        self._store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.__exit__(kind, error, trace)

    def _cast(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors as they are published; names of the same memory stay tied."""
        if self._dtype is None:
            return dict(tensors)
        done: dict[
            object, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # the first ones keep their addresses taken
        cast: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                cast[name] = tensor
                continue
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which has no address of its own
            key = (_memory(local), tuple(tensor.shape)) if local.data_ptr() else object()
            if key not in done:
                done[key] = (tensor, tensor.detach().to(self._dtype))
            cast[name] = done[key][1]
        return cast


@dataclass(frozen=True)
class UpdateReport:
    """What one `update` did.

    step: the step that the tensors hold now, None when nothing is published. previous: the step before the update.
    links: deltas applied; 0 with `reloaded`, why everything was read anew, or when nothing is new. bytes_read: stored
    bytes read. bytes_changed: bytes copied into the tensors. fallbacks: (step, reason) of newer steps that are damaged.
    """

    step: int | None
    previous: int | None
    links: int
    reloaded: str | None
    bytes_read: int
    bytes_changed: int
    seconds: float
    fallbacks: tuple[tuple[int, str], ...] = ()
    items: dict[str, Json] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"version": 1, **asdict(self)}


@dataclass
class _Progress:
    """What an update has done so far."""

    previous: int | None
    links: int = 0
    reloaded: str | None = None
    read: int = 0
    changed: int = 0
    fallbacks: list[tuple[int, str]] = field(default_factory=list)

    def report(self, step: int | None, seconds: float, items: dict[str, Json]) -> UpdateReport:
        """The end of it."""
        return UpdateReport(
            step, self.previous, self.links, self.reloaded, self.read, self.changed, seconds,
            tuple(self.fallbacks), items,
        )  # fmt: skip


class Subscriber:
    """Follows a store of published weights. Needs no lock; keeps the published bytes in host memory once."""

    def __init__(self, path: str | os.PathLike[str], *, files: Storage | None = None) -> None:
        """Look at the store at `path`; CkptError when it is none."""
        storage, where = locate(path, files=files)
        self._catalog = Catalog(storage, where)
        self._catalog.identify()
        self._replica: Replica | None = None
        self._filled: dict[str, torch.Tensor] = {}

    @property
    def step(self) -> int | None:
        """The step that was received last."""
        return None if self._replica is None else self._replica.manifest.step

    def update(self, into: Mapping[str, torch.Tensor]) -> UpdateReport:
        """Bring `into` to the newest published step that verifies, in place.

        into: tensors of the published names, shapes and dtypes, any stride and device; nothing is written into them
        before everything new has passed its hashes. Between updates leave them alone: only what has changed is written,
        and the subscriber holds on to them. Steps that are missing or damaged are passed over and reported. Raises
        MismatchError, and NoCheckpointError when there are steps and none of them can be received.
        """
        began, done = time.perf_counter(), _Progress(self.step)
        for folder in reversed(self._catalog.folders()):
            if self._replica is not None and _key(folder) <= _key(self._replica.manifest.folder):
                break
            try:
                self._receive(folder, done)
                break
            except (CorruptError, OSError) as error:
                done.fallbacks.append((_key(folder)[0], describe(error)))
        if self._replica is None and done.fallbacks:
            raise NoCheckpointError(self._catalog.path, done.fallbacks, "step that can be received")
        items: dict[str, Json] = {}
        if self._replica is not None:
            done.changed = self._fill(self._replica, into)
            items = self._replica.items()
        return done.report(self.step, time.perf_counter() - began, items)

    def _receive(self, folder: str, done: _Progress) -> None:
        """Bring the replica to a step, by links if its chain leads there, else by reading all of it."""
        try:
            links = self._links_to(folder)
            for link in links or ():
                self._apply(link, done)
            if links is not None:
                return
            why = (
                "first update"
                if self._replica is None
                else "the step held is not in the chain of the new one"
            )
        except (CorruptError, OSError, UnsupportedError) as error:
            why = describe(error)
            if self._replica is not None and self._replica.broken:
                self._replica, self._filled = None, {}
        with StepReader(self._catalog.files, self._catalog.steps, folder) as reader:
            self._replica, self._filled = Replica.read(reader), {}
        done.links, done.reloaded = 0, why
        done.read += self._replica.bytes_read

    def _links_to(self, folder: str) -> list[Manifest] | None:
        """Links from the step we have to `folder`, oldest first; None when its chain does not lead there."""
        if self._replica is None:
            return None
        links: list[Manifest] = []
        manifest = read_manifest(self._catalog.files, self._catalog.steps, folder)
        while len(links) < MAX_CHAIN:
            links.append(manifest)
            if manifest.parent is None:
                return None
            if manifest.parent.root == self._replica.manifest.root:
                return links[::-1]
            root = manifest.parent.root
            manifest = read_manifest(self._catalog.files, self._catalog.steps, manifest.parent.folder)
            if manifest.root != root:
                raise CorruptError(self._catalog.path, f"{manifest.folder} is another save", expected=root)
        return None

    def _apply(self, link: Manifest, done: _Progress) -> None:
        """One link, or nothing of it."""
        assert self._replica is not None
        with StepReader(self._catalog.files, self._catalog.steps, link.folder, follow=False) as reader:
            if reader.manifest.root != link.root:
                raise CorruptError(self._catalog.path, f"{link.folder} is another save", expected=link.root)
            done.read += self._replica.apply(reader)
            done.links += 1

    def _fill(self, replica: Replica, into: Mapping[str, torch.Tensor]) -> int:
        """Copy what is new into the tensors; bytes copied."""
        replica.check(into)
        total = 0
        for name, tensor in into.items():
            last = self._filled.get(name)
            fresh = last is None or _memory(last) != _memory(tensor)
            total += replica.copy(name, tensor.detach(), everything=fresh)
        replica.settle()
        # Held on to: as long as they live, the same address is the same memory.
        self._filled = {name: tensor.detach() for name, tensor in into.items()}
        return total


def _key(folder: str) -> tuple[int, int]:
    """Order of step folders; all of a catalog have one."""
    return parse_folder(folder) or (-1, 0)


def _memory(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same elements of the same memory, while both live."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())
