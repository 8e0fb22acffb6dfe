"""The reading end: DCP metadata from a manifest, and read items as windows on shards."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..boxes import Box
from ..dtypes import ITEM_SIZE, dtype_of
from ..errors import CkptError, UnsupportedError
from ..filling import Filler
from ..loading import entries_by_name
from ..local import Window, batches, require_memory
from ..manifest import Manifest, TensorEntry
from ..opening import open as open_store
from ..reader import StepReader
from ..store import Store
from .naming import MAPPING, PICKLE, mapping_of, names_a_step, step_of
from .planners import LfLoadPlanner, to_json

_THREADS = 4
_GROUP_BYTES: Final = 256 << 20  # long enough that its end, where the threads run dry, costs nothing


class LfStorageReader(StorageReader):
    """Reads a step of a store, written by DCP or by `Store.save`, on any number of ranks; every byte is verified.

    The step is the number at the end of `checkpoint_id`, the newest committed one without it. Damage is CorruptError;
    DCP has then filled a part of the state dict, so load an earlier step before going on.
    """

    def __init__(self, store: str | os.PathLike[str] | Store, *, allow_pickle: bool = False) -> None:
        """store: an open one, or a path. allow_pickle: unpickle what a stock planner wrote; for trusted files only."""
        self._store = store if isinstance(store, Store) else open_store(store, read_only=True)
        self._allow_pickle = allow_pickle
        self._step: int | None = None
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load that step."""
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        self._manifest = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the step, from its manifest. NoCheckpointError and CorruptError."""
        with self._open() as reader:
            self._manifest = reader.manifest
        entries = entries_by_name(self._manifest)
        described: dict[str, Any] = {name: _described(entry) for name, entry in entries.items()}
        names = [*self._manifest.items, *(blob.name.removeprefix(PICKLE) for blob in self._manifest.blobs)]
        described |= {name: BytesStorageMetadata() for name in names if not name.startswith(MAPPING)}
        return Metadata(
            state_dict_metadata=described,
            planner_data=mapping_of(self._manifest.items),
            storage_meta=StorageMeta(checkpoint_id=self._store.path),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the manifest that made the metadata is kept."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the step that this rank has found."""
        found = None if self._manifest is None else (self._manifest.folder, self._manifest.root)
        return replace(plan, storage_data=found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are. CkptError when a writer has committed while the ranks looked for the newest step."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            steps = ", ".join(sorted(folder for folder, _ in found))
            raise CkptError(f"{self._store.path}: the ranks would load several steps ({steps}); name one")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank wants."""
        with self._open() as reader, Filler(reader, _THREADS, True) as filler:
            if self._manifest is not None and reader.manifest.root != self._manifest.root:
                raise CkptError(
                    f"{self._store.path}: step {self._manifest.step} was saved again while it was read"
                )
            entries = entries_by_name(reader.manifest)
            for group in _groups(plan.items, entries):
                _load_tensors(
                    [_target(i, planner, entries[i.storage_index.fqn]) for i in group], planner, filler
                )
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    self._load_value(item, planner, filler, reader.manifest)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id names a step."""
        return names_a_step(checkpoint_id)

    def _open(self) -> StepReader:
        step = self._manifest.step if self._manifest is not None else self._step
        return self._store._open_step("latest" if step is None else step)

    def _load_value(self, item: ReadItem, planner: LoadPlanner, filler: Filler, manifest: Manifest) -> None:
        name = item.storage_index.fqn
        blobs = {blob.name: blob for blob in manifest.blobs}
        if PICKLE + name in blobs:
            if not self._allow_pickle:
                raise UnsupportedError(
                    f"{name}: pickled by the planner that saved it; reading it runs code from the file: give the "
                    "reader allow_pickle=True if you trust it, or save with lf_ckpt.dcp.LfSavePlanner"
                )
            data = io.BytesIO(filler.blob(blobs[PICKLE + name]))
            (planner.load_pickle if isinstance(planner, LfLoadPlanner) else planner.load_bytes)(item, data)
            return
        if not isinstance(planner, LfLoadPlanner):
            raise UnsupportedError(
                f"{name}: stored as JSON, which {type(planner).__name__} cannot read; load with "
                "planner=lf_ckpt.dcp.LfLoadPlanner()"
            )
        value = filler.blob(blobs[name]) if name in blobs else manifest.items[name]
        planner.load_bytes(item, io.BytesIO(to_json(value, name)))


def _described(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(shard.box.offsets), torch.Size(shard.box.shape))
        for shard in entry.shards
    ]
    properties = TensorProperties(dtype=dtype_of(entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


class _Target(NamedTuple):
    """A part of a tensor of the state dict, the part of the saved one that goes there, and where it is decoded to: in
    place, or beside it where the dtypes differ."""

    item: ReadItem
    tensor: torch.Tensor
    entry: TensorEntry
    window: Window


def _groups(items: Sequence[ReadItem], entries: Mapping[str, TensorEntry]) -> Iterator[list[ReadItem]]:
    """Cut the tensors of a plan into runs to read at a time: a planner may make memory for each that it resolves."""
    group: list[ReadItem] = []
    held = 0
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            continue
        group.append(item)
        held += math.prod(item.lengths) * ITEM_SIZE[entries[item.storage_index.fqn].dtype]
        if held >= _GROUP_BYTES:
            yield group
            group, held = [], 0
    yield group


def _target(item: ReadItem, planner: LoadPlanner, entry: TensorEntry) -> _Target:
    tensor = planner.resolve_tensor(item).detach()
    require_memory(item.dest_index.fqn, tensor)
    offsets = item.storage_index.offset or (0,) * len(entry.shape)
    box = Box(tuple(a + b for a, b in zip(offsets, item.storage_offsets, strict=True)), tuple(item.lengths))
    dtype = dtype_of(entry.dtype)
    place = tensor if tensor.dtype == dtype else torch.empty(box.shape, dtype=dtype, device="cpu")
    return _Target(item, tensor, entry, Window(place, box))


def _load_tensors(targets: Sequence[_Target], planner: LoadPlanner, filler: Filler) -> None:
    """Fill parts of tensors of the state dict, many at once but for those that share memory; others are converted."""
    for batch in batches([target.tensor for target in targets]):
        with filler.together():
            for number in batch:
                filler.fill_window(targets[number].entry, targets[number].window)
        for number in batch:
            item, tensor, _, window = targets[number]
            if window.local is not tensor:
                tensor.copy_(window.local)
            planner.commit_tensor(item, tensor)
