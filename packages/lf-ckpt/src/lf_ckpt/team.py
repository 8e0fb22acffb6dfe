"""How a save becomes a step: by one process alone, or by the ranks of a group, of which rank 0 commits for all.

Both answer the same three questions: what does this process write (`begin`), is the step committed (`commit`), and
what if this process cannot do its part (`fail`, `refuse`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from .catalog import Catalog
from .errors import CkptError, RankFailedError, UnsupportedError
from .jsonio import Json, canonical, decode_item, encode_item
from .manifest import BlobEntry, DataFile, Manifest, Parent, Placed, TensorEntry, unsharded
from .merge import Layout, Merged, entries, layout_of, merge
from .peers import Peers
from .plan import Plan
from .ranked import owner_of


@dataclass(frozen=True)
class Begun:
    """An agreed save: what this process writes, in order; the step's folder; the id of the save, equal on all ranks."""

    step: int
    plan: Plan
    folder: str
    writer_id: bytes
    rank: int
    world: int
    use_base: bool


class Written(NamedTuple):
    """A durable data file: itself, the place of each stream, the base if it refers to it, seconds per state."""

    file: DataFile
    placed: list[Placed]
    parent: Parent | None
    seconds: dict[str, float]


class Outcome(NamedTuple):
    """A committed step."""

    folder: str
    root: str
    parent: Parent | None


class _Step(NamedTuple):
    """What the manifest says of the bytes."""

    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    blobs: tuple[BlobEntry, ...]
    items: dict[str, Json]
    parent: Parent | None


class Team(Protocol):
    """Who saves a step together. Every rank makes the same calls in the same order."""

    rank: int
    world: int

    def refuse(self, error: BaseException) -> None:
        """Say that this process cannot begin a save, so that the others do not wait for it."""

    def begin(self, step: int, plan: Plan, base: Parent | None) -> Begun:
        """Agree on a save and make its folder. base: what this process could refer to."""

    def commit(self, begun: Begun, written: Written, versions: dict[str, str]) -> Outcome:
        """Publish the step once every file is durable. On an error nothing of it stays."""

    def fail(self, begun: Begun, error: BaseException) -> None:
        """End a save that this process could not finish; nothing of it stays. Raises nothing."""


class Alone:
    """One process writes the whole step."""

    rank, world = 0, 1

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def refuse(self, error: BaseException) -> None:
        """Nobody waits."""

    def begin(self, step: int, plan: Plan, base: Parent | None) -> Begun:
        """The plan as it is. UnsupportedError for shards whose other parts no one writes."""
        for stream in plan.streams:
            if stream.offsets is not None:
                fix = "open the store with group= on every rank, or save full_tensor()"
                raise UnsupportedError(f"{stream.name}: a DTensor of which this rank has a part; {fix}")
        return Begun(step, plan, self._catalog.new_folder(step), uuid.uuid4().bytes, 0, 1, base is not None)

    def commit(self, begun: Begun, written: Written, versions: dict[str, str]) -> Outcome:
        """Publish the manifest."""
        placed = list(zip(begun.plan.streams, written.placed, strict=True))
        tensors = tuple(unsharded(s.name, s.dtype, s.shape, at) for s, at in placed if not s.is_item)
        blobs = tuple(BlobEntry(s.name, s.nbytes, at) for s, at in placed if s.is_item)
        step = _Step((written.file,), tensors, begun.plan.aliases, blobs, begun.plan.items, written.parent)
        try:
            return _publish(self._catalog, begun, step, written.seconds, versions)
        except BaseException:
            _remove_quietly(self._catalog, begun.folder)
            raise

    def fail(self, begun: Begun, error: BaseException) -> None:
        """Remove the folder; the next writer sweeps what stays."""
        _remove_quietly(self._catalog, begun.folder)


class Together:
    """Every rank writes its file; rank 0 makes the folder, decides who writes what, and commits."""

    def __init__(self, catalog: Catalog, peers: Peers) -> None:
        self._catalog, self._peers = catalog, peers
        self.rank, self.world = peers.rank, peers.world
        self._digest = ""  # of the layouts for which `_merged` and `_writes` hold
        self._writes: list[int] = []
        self._merged: Merged | None = None
        self._told: list[str] = []

    def refuse(self, error: BaseException) -> None:
        """The others raise RankFailedError."""
        with contextlib.suppress(CkptError):
            self._peers.round({"step": None, "error": _text(error)}, self._greet)

    def begin(self, step: int, plan: Plan, base: Parent | None) -> Begun:
        """Agree. RankFailedError when a rank cannot, saves another step, or holds parts that fit no whole."""
        plan = self._own_part(plan)
        layout = canonical(layout_of(plan).as_json())
        digest = hashlib.sha256(layout).hexdigest()
        mine = {"step": step, "error": None, "digest": digest, "base": _parent_json(base)}
        mine["known"] = digest == self._digest
        answer = _unless_failed(step, self._peers.round(mine, self._greet))
        if answer["layout"]:
            answer |= self._peers.round({"layout": layout.decode()}, lambda told: self._divide(step, told))
            self._digest, self._writes = digest, answer["writes"]
        tensors = [*(s for s in plan.streams if not s.is_item), *plan.tied]
        blobs = [s for s in plan.streams if s.is_item]
        agreed = replace(plan, streams=(*(tensors[i] for i in self._writes), *blobs), tied=())
        writer_id = bytes.fromhex(answer["writer"])
        return Begun(step, agreed, answer["folder"], writer_id, self.rank, self.world, answer["base"])

    def commit(self, begun: Begun, written: Written, versions: dict[str, str]) -> Outcome:
        """Report, and learn what rank 0 has made of it."""
        report = {
            "error": None,
            "file": vars(written.file),
            "counts": [placed.count for placed in written.placed],
            "parent": _parent_json(written.parent),
            "items": {name: encode_item(value, name) for name, value in begun.plan.items.items()},
        }

        def decide(reports: list[Any]) -> list[Json]:
            failed = _reasons(reports)
            if failed:
                _remove_quietly(self._catalog, begun.folder)
                return [{"failed": failed}] * self.world
            try:
                step = self._whole_step(reports)
                outcome = _publish(self._catalog, begun, step, written.seconds, versions)
            except BaseException:
                _remove_quietly(self._catalog, begun.folder)
                raise
            return [{"root": outcome.root, "parent": _parent_json(outcome.parent)}] * self.world

        answer = _unless_failed(begun.step, self._peers.round(report, decide))
        return Outcome(begun.folder, answer["root"], _parent_from(answer["parent"]))

    def fail(self, begun: Begun, error: BaseException) -> None:
        """Tell; rank 0 removes the folder when all have stopped writing in it."""

        def decide(reports: list[Any]) -> list[Json]:
            _remove_quietly(self._catalog, begun.folder)
            return [{"failed": _reasons(reports)}] * self.world

        with contextlib.suppress(CkptError):  # the error of this rank is the one to show
            self._peers.round({"error": _text(error)}, decide)

    def _greet(self, told: list[Any]) -> list[Json]:
        """Rank 0: may all begin, must layouts be sent, do all have the same base?"""
        failed = _reasons(told)
        steps = {rank: value["step"] for rank, value in enumerate(told)}
        if not failed and len(set(steps.values())) > 1:
            failed = {rank: f"saves step {step}" for rank, step in steps.items()}
        if failed:
            return [{"failed": failed}] * self.world
        digests = [value["digest"] for value in told]
        layout = digests != self._told or not all(value["known"] for value in told)
        self._told = digests
        bases = {canonical(value["base"]) for value in told}
        answer = {"layout": layout, "base": bases != {b"null"} and len(bases) == 1}
        return [answer | ({} if layout else self._new_folder(told[0]["step"]))] * self.world

    def _divide(self, step: int, told: list[Any]) -> list[Json]:
        """Rank 0: who writes what."""
        layouts = [Layout.from_json(json.loads(value["layout"])) for value in told]
        self._merged = merge(layouts)
        folder = self._new_folder(step)
        return [{"writes": numbers} | folder for numbers in self._merged.writes]

    def _new_folder(self, step: int) -> dict[str, Json]:
        return {"folder": self._catalog.new_folder(step), "writer": uuid.uuid4().hex}

    def _own_part(self, plan: Plan) -> Plan:
        """Without the items that rank 0 gives for all."""
        if self.rank == 0 or plan.of_all_ranks:
            return plan
        streams = tuple(s for s in plan.streams if not s.is_item or owner_of(s.name) == self.rank)
        items = {name: value for name, value in plan.items.items() if owner_of(name) == self.rank}
        return replace(plan, streams=streams, items=items)

    def _whole_step(self, reports: Sequence[Any]) -> _Step:
        assert self._merged is not None
        tensors, blobs = entries(self._merged, [report["counts"] for report in reports])
        items = {name: decode_item(v) for report in reports for name, v in report["items"].items()}
        parents = [parent for report in reports if (parent := _parent_from(report["parent"]))]
        files = tuple(DataFile(**report["file"]) for report in reports)
        return _Step(files, tensors, self._merged.aliases, blobs, items, parents[0] if parents else None)


def _publish(
    catalog: Catalog, begun: Begun, step: _Step, seconds: dict[str, float], versions: dict[str, str]
) -> Outcome:
    manifest = Manifest(
        store=catalog.store_id,
        step=begun.step,
        folder=begun.folder,
        created=max(int(time.time()), 0),  # a clock that was never set must not spoil the step
        versions=versions,
        metrics=begun.plan.metrics,
        profile=begun.plan.profile,
        seconds=seconds,
        **step._asdict(),
    )
    return Outcome(begun.folder, catalog.commit(manifest), step.parent)


def _unless_failed(step: int, answer: Any) -> Any:
    """The answer of rank 0; RankFailedError when it lists ranks that failed."""
    if "failed" in answer:
        reasons = {int(rank): text for rank, text in answer["failed"].items()}
        raise RankFailedError(f"step {step} was not saved on any rank", reasons)
    return answer


def _reasons(told: Sequence[Any]) -> dict[int, str]:
    return {rank: value["error"] for rank, value in enumerate(told) if value["error"] is not None}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _parent_json(parent: Parent | None) -> Json:
    return None if parent is None else [parent.folder, parent.root]


def _parent_from(value: Any) -> Parent | None:
    return None if value is None else Parent(*value)


def _remove_quietly(catalog: Catalog, folder: str) -> None:
    """Clean up after a failed save without hiding its error; the next writer sweeps what stays."""
    with contextlib.suppress(OSError, CkptError):
        catalog.remove(folder)
