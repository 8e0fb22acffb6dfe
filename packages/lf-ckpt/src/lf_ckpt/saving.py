"""One save from staged bytes to a committed step; everything here runs in the store's writer thread."""

from __future__ import annotations

import errno
import logging
import os
import platform
import queue
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import zstandard

from .catalog import Catalog
from .errors import DiskFullError
from .format import CODEC_NAMES, Header, align
from .handle import SaveHandle
from .manifest import PUBLISH, DataFile, Parent
from .parents import ParentBytes, StoredBase, stored_parents
from .plan import Plan
from .report import SaveReport
from .sink import Sink, Writing
from .slab import Slab
from .staging import Staged
from .team import Begun, Outcome, Team, Written
from .writer import Base, DataFileWriter

_log = logging.getLogger("lf_ckpt")
_SMALL_EXTENT = 64 << 10
_DELTA_WORTH = (
    0.95  # of a full step: a delta that takes more is not worth tying the next one to the same base
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class SaveJob:
    """What the caller's thread hands to the writer thread. `incoming` ends with None, or with the error of staging."""

    begun: Begun
    team: Team
    handle: SaveHandle
    sink: Sink
    writing: Writing
    base: Base | None
    keeping: ParentBytes | None
    compress: str
    slab: Slab
    slab_note: str
    incoming: queue.SimpleQueue[Staged | BaseException | None] = field(default_factory=queue.SimpleQueue)

    @property
    def plan(self) -> Plan:
        """What this process writes."""
        return self.begun.plan

    @property
    def folder(self) -> str:
        """The step's folder."""
        return self.begun.folder


@dataclass(frozen=True)
class Committed:
    """A finished save: its report, the base of the next one, None when that must be full, and the folder of a base
    that was found damaged."""

    report: SaveReport
    base: Base | None
    damaged: str = ""


def run(job: SaveJob, catalog: Catalog, pool: Executor | None) -> Committed:
    """Write, fsync, commit. On any error the folder is removed; a full disk is raised as DiskFullError."""
    needed = align(job.plan.raw_bytes)
    try:
        writer, file = _write_file(job, catalog, pool)
    except BaseException as error:
        job.slab.abort()
        named = translate(error, catalog, needed)
        job.team.fail(job.begun, named)
        if named is error:
            raise
        raise named from error
    parent = Parent(job.base.folder, job.base.root) if job.base and writer.refers else None
    seconds = {state: round(job.handle._seconds(state), 6) for state in ("staged", "written")}
    try:
        written = Written(file, writer.placed(job.begun.rank), parent, seconds)
        outcome = job.team.commit(job.begun, written, versions())
    except OSError as error:
        raise translate(error, catalog, needed) from error
    job.handle._mark("durable")
    base, why = _next_base(job, writer, outcome, catalog)
    failed = job.base is not None and job.base.parents is not None and job.base.parents.failed is not None
    damaged = job.base.folder if job.base is not None and failed else ""
    return Committed(_report(job, writer, file, outcome, why), base, damaged)


def _write_file(job: SaveJob, catalog: Catalog, pool: Executor | None) -> tuple[DataFileWriter, DataFile]:
    """The data file, durable, and what has written it. The sink is closed, whatever happens."""
    try:
        writer = _new_writer(job, catalog, pool)
        _write_data(job, writer)
        file = writer.finish()
        job.sink.flush()
        job.handle._mark("written")
        job.sink.sync()
        return writer, file
    finally:
        try:
            job.sink.close()
        finally:
            if job.base is not None and job.base.parents is not None:
                job.base.parents.close()


def translate(error: BaseException, catalog: Catalog, needed: int) -> BaseException:
    """DiskFullError for a full disk, quota or file-size limit, after what was written is gone; others as they are."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return error
    try:
        free = catalog.files.free(catalog.path)
    except OSError:
        free = -1
    return DiskFullError(os.path.join(catalog.path), max(needed, 0), free)


def _new_writer(job: SaveJob, catalog: Catalog, pool: Executor | None) -> DataFileWriter:
    begun, store_id = job.begun, bytes.fromhex(catalog.store_id)
    header = Header(begun.step, begun.rank, begun.world, store_id, begun.writer_id)
    # A counter or generator state that happens to be unchanged should not make a whole step depend on another.
    smallest = min(_SMALL_EXTENT, job.plan.raw_bytes // 1000)
    return DataFileWriter(
        job.sink, header, job.plan.streams, job.base, job.compress, pool, smallest, job.keeping
    )


def _write_data(job: SaveJob, writer: DataFileWriter) -> None:
    writer.start()
    while (staged := _next_staged(job)) is not None:
        if isinstance(staged, BaseException):
            raise staged
        if staged.ready is not None:
            staged.ready.synchronize()
        piece = staged.piece
        writer.add(staged.chunk, job.slab.room(piece), partial(job.slab.release, piece))


def _next_staged(job: SaveJob) -> Staged | BaseException | None:
    if job.incoming.empty():
        job.sink.relieve()
    return job.incoming.get()


def versions() -> dict[str, str]:
    """Libraries that shaped the bytes."""
    from . import __version__

    return {
        "lf_ckpt": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "zstandard": zstandard.__version__,
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
    }


def _next_base(
    job: SaveJob, writer: DataFileWriter, step: Outcome, catalog: Catalog
) -> tuple[Base | None, str]:
    """The base of the next save, None when that must be full, and what the report says of it.

    A step that refers to nothing is the base of those that follow; a delta that is hardly smaller is the last on its.
    """
    failed = job.base is not None and job.base.parents is not None and job.base.parents.failed is not None
    is_link = job.plan.profile == PUBLISH and writer.worth < _DELTA_WORTH and not failed
    if step.parent is None or is_link:
        parents = job.keeping
        at = (catalog.files, catalog.steps, step.folder, step.root)
        if parents is not None:
            parents.bind(StoredBase(*at, job.begun.rank))
        elif job.base is not None and job.base.parents is not None:
            parents = stored_parents(*at, job.begun.rank)
        if failed and job.base is not None and job.base.parents is not None:
            return None, f"{job.base.parents.note()}; this and the next save are full"
        note = "" if parents is None else f"base: {parents.kept_bytes} bytes kept in memory"
        return Base(step.folder, step.root, writer.table(), parents), note
    base = job.base
    if base is None or base.parents is None:
        return base, ""
    if base.parents.failed is None and writer.worth < _DELTA_WORTH:
        return base, base.parents.note()
    why = "failed" if base.parents.failed else f"this delta takes {writer.worth:.2f} of a full step"
    return None, f"{base.parents.note()}; the next save is full: {why}"


def _report(job: SaveJob, writer: DataFileWriter, file: DataFile, step: Outcome, deltas: str) -> SaveReport:
    handle = job.handle
    return SaveReport(
        step=handle.step,
        folder=job.folder,
        kind="delta" if step.parent else "full",
        base=step.parent.folder if step.parent else None,
        bytes_raw=job.plan.raw_bytes,
        bytes_written=file.size,
        bytes_shared=writer.shared_bytes,
        seconds_staged=handle._seconds("staged"),
        seconds_written=handle._seconds("written"),
        seconds_durable=handle._seconds("durable"),
        codecs={CODEC_NAMES[codec]: size for codec, size in sorted(writer.codec_bytes.items())},
        codecs_stored={CODEC_NAMES[codec]: size for codec, size in sorted(writer.codec_stored.items())},
        deltas=deltas,
        slab=f"{job.slab_note}; {job.slab.memory.note()}",
        io=job.sink.note,
        priority=job.writing.priority_note,
        predicted_stall=handle.predicted_stall,
    )


def failed_report(handle: SaveHandle, folder: str, plan: Plan, error: BaseException) -> SaveReport:
    """What `wait` returns for a failed save with on_error="warn"."""
    times = (handle._seconds("staged"), handle._seconds("written"), handle._seconds("durable"))
    return SaveReport(
        handle.step, folder, "failed", None, plan.raw_bytes, 0, 0, *times, {}, "", "", error=str(error)
    )
