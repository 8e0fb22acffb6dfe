"""The writing end: a DCP save plan becomes a save of the store, which decides, writes and commits as ever."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..boxes import Box, whole
from ..dtypes import ITEM_SIZE, name_of
from ..errors import CkptError, UnsupportedError
from ..jsonio import Json
from ..opening import open as open_store
from ..plan import Plan, Stream, identity, stream_of, untie
from ..report import SaveReport
from ..store import Store
from .naming import MAPPING, PICKLE, mapping_item, names_a_step, step_of
from .planners import LfSavePlanner, from_json


class LfStorageWriter(StorageWriter):
    """Writes each checkpoint as a step of one store; keep it for all saves, so that deltas have their base.

    With torch.distributed every rank makes one, in the same order: the store is opened for the group of all ranks (or
    for the `group` of a given store). The step is the number at the end of `checkpoint_id`, one more than the latest
    without it. `dcp.save` returns when the step is durable, `dcp.async_save` (type THREAD) saves in the background.
    """

    def __init__(
        self, store: str | os.PathLike[str] | Store, *, allow_pickle: bool = False, **options: Any
    ) -> None:
        """store: an open one, which the caller closes, or a path; options go to `lf_ckpt.open`.

        allow_pickle: store what a stock planner has pickled; without it that is UnsupportedError.
        """
        if isinstance(store, Store):
            if options:
                raise ValueError(f"options {sorted(options)} belong to a path; this store is open")
            self._store, self._owned = store, False
        else:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
            self._store, self._owned = open_store(store, **{"group": group, **options}), True
        self._allow_pickle = allow_pickle
        self._step: int | None = None
        self.report: SaveReport | None = None
        """How the last save of this rank went."""

    def close(self) -> None:
        """Close the store, if this writer has opened it."""
        if self._owned:
            self._store.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin the checkpoint of that step."""
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: rank 0 of the store's group commits, whichever rank coordinates the plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are; replicas have been taken out by the planner."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part; done when the step is durable on all ranks. Raises what `Store.save` raises."""
        step = self._step
        if step is None:
            newest = self._store.latest()
            step = 0 if newest is None else newest + 1
        self.report = self._store._start(step, lambda: self._plan(plan, planner)).wait()
        if self.report.error is not None:
            raise CkptError(self.report.error)
        results: Future[list[WriteResult]] = Future()
        results.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the step is committed, and its manifest holds what the metadata says."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id names a step."""
        return names_a_step(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Where this checkpoint goes."""
        return StorageMeta(checkpoint_id=self._store.path)

    def __getstate__(self) -> None:
        raise UnsupportedError(
            "a store belongs to its process; use dcp.async_save with AsyncCheckpointerType.THREAD, which copies in "
            "the background as well"
        )

    def _plan(self, plan: SavePlan, planner: SavePlanner) -> Plan:
        """This rank's streams and items."""
        streams: list[Stream] = []
        blobs: list[Stream] = []
        items: dict[str, Json] = {}
        for item in plan.items:
            name = item.index.fqn
            if item.type != WriteItemType.BYTE_IO:
                stream = _stream(item, planner)
                streams += [stream] if stream is not None else []
                continue
            data = cast(io.BytesIO, planner.resolve_data(item)).getvalue()
            if isinstance(planner, LfSavePlanner):
                items[name] = from_json(data)
            elif self._allow_pickle:
                blobs.append(Stream(PICKLE + name, "U8", (), len(data), data))
            else:
                raise UnsupportedError(
                    f"{name}: {type(planner).__name__} pickles values that are no tensors; save with "
                    "planner=lf_ckpt.dcp.LfSavePlanner(), or give the writer allow_pickle=True"
                )
        mapping = mapping_item(plan.planner_data)
        if mapping:
            items[f"{MAPPING}{self._store._rank}"] = mapping
        alone, tied = untie(streams, {} if self._store._peers is None else _first_names(planner))
        return Plan(
            (*alone, *blobs),
            {stream.name: first for first, stream in tied},
            items,
            tied=tuple(stream for _, stream in tied),
            of_all_ranks=True,
        )


def _first_names(planner: SavePlanner) -> dict[object, str]:
    """The first name of the memory of each tensor of the state dict: of tied tensors that all ranks have, DCP leaves
    one name to this rank and another to the next, which alone look like two. Nothing for planners that may change
    what they are given.
    """
    names: dict[object, str] = {}
    if type(planner) is LfSavePlanner:
        for name, value in planner.state_dict.items():
            with contextlib.suppress(UnsupportedError):  # also for what is no tensor
                key = identity(stream_of(name, value))
                names.setdefault(key, name)
    names.pop(None, None)
    return names


def _stream(item: WriteItem, planner: SavePlanner) -> Stream | None:
    """The chunk of a tensor; None for an empty chunk of one that is not empty."""
    tensor, data = cast(torch.Tensor, planner.resolve_data(item)).detach(), item.tensor_data
    assert data is not None  # as for every item that is no BYTE_IO
    full = tuple(data.size)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if whole(full).volume == 0:
        box = whole(full)
    elif box.volume == 0:
        return None
    if tensor.numel() != box.volume:
        raise UnsupportedError(
            f"{item.index.fqn}: {tensor.numel()} elements for a chunk of {list(box.shape)}"
        )
    dtype = name_of(tensor.dtype)
    size = box.volume * ITEM_SIZE[dtype]
    if box == whole(full):
        return Stream(item.index.fqn, dtype, full, size, tensor)
    return Stream(item.index.fqn, dtype, box.shape, size, tensor, full, box.offsets)


def _nbytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
