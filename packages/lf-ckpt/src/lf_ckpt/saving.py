"""One save from staged bytes to a committed step; everything here runs in the store's writer thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import queue
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import zstandard

from .catalog import Catalog
from .errors import CkptError, DiskFullError
from .format import CODEC_NAMES, Header, align
from .handle import SaveHandle
from .manifest import BlobEntry, DataFile, Manifest, Parent, unsharded
from .plan import Plan
from .report import SaveReport
from .sink import Sink, Writing
from .slab import Slab
from .staging import Staged
from .writer import Base, DataFileWriter

_log = logging.getLogger("lf_ckpt")
_SMALL_EXTENT = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class SaveJob:
    """What the caller's thread hands to the writer thread. `incoming` ends with None, or with the error of staging."""

    plan: Plan
    handle: SaveHandle
    folder: str
    sink: Sink
    writing: Writing
    writer_id: bytes
    base: Base | None
    compress: str
    slab: Slab
    slab_note: str
    incoming: queue.SimpleQueue[Staged | BaseException | None] = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True)
class Committed:
    """A finished save: its report, and the base it is, or stays, for later deltas."""

    report: SaveReport
    base: Base | None


def run(job: SaveJob, catalog: Catalog, pool: Executor | None) -> Committed:
    """Write, fsync, commit. On any error the folder is removed; a full disk is raised as DiskFullError."""
    writer = _new_writer(job, catalog, pool)
    try:
        try:
            _write_data(job, writer)
            file = writer.finish()
            job.sink.flush()
            job.handle._mark("written")
            job.sink.sync()
        finally:
            job.sink.close()
        manifest = _manifest(job, writer, file, catalog.store_id)
        root = catalog.commit(manifest)
    except BaseException as error:
        job.slab.abort()
        _remove_quietly(catalog, job.folder)
        named = translate(error, catalog, align(job.plan.raw_bytes))
        if named is error:
            raise
        raise named from error
    job.handle._mark("durable")
    return Committed(
        _report(job, writer, file, manifest), _next_base(job, writer, replace(manifest, root=root))
    )


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
    header = Header(job.handle.step, 0, 1, bytes.fromhex(catalog.store_id), job.writer_id)
    # A counter or generator state that happens to be unchanged should not make a whole step depend on another.
    smallest = min(_SMALL_EXTENT, job.plan.raw_bytes // 1000)
    return DataFileWriter(job.sink, header, job.plan.streams, job.base, job.compress, pool, smallest)


def _write_data(job: SaveJob, writer: DataFileWriter) -> None:
    writer.start()
    while (staged := job.incoming.get()) is not None:
        if isinstance(staged, BaseException):
            raise staged
        if staged.ready is not None:
            staged.ready.synchronize()
        piece = staged.piece
        writer.add(staged.chunk, job.slab.room(piece), partial(job.slab.release, piece))


def _manifest(job: SaveJob, writer: DataFileWriter, file: DataFile, store_id: str) -> Manifest:
    placed = list(zip(job.plan.streams, writer.placed(), strict=True))
    parent = Parent(job.base.folder, job.base.root) if job.base and writer.shared_bytes else None
    return Manifest(
        store=store_id,
        step=job.handle.step,
        folder=job.folder,
        created=int(time.time()),
        parent=parent,
        files=(file,),
        tensors=tuple(unsharded(s.name, s.dtype, s.shape, at) for s, at in placed if not s.is_item),
        aliases=job.plan.aliases,
        blobs=tuple(BlobEntry(s.name, s.nbytes, at) for s, at in placed if s.is_item),
        items=job.plan.items,
        versions=versions(),
        metrics=job.plan.metrics,
        seconds={state: round(job.handle._seconds(state), 6) for state in ("staged", "written")},
    )


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


def _next_base(job: SaveJob, writer: DataFileWriter, manifest: Manifest) -> Base | None:
    """A step that refers to nothing is the base of those that follow."""
    return Base(manifest.folder, manifest.root, writer.table()) if manifest.parent is None else job.base


def _report(job: SaveJob, writer: DataFileWriter, file: DataFile, manifest: Manifest) -> SaveReport:
    handle = job.handle
    return SaveReport(
        step=handle.step,
        folder=job.folder,
        kind="delta" if manifest.parent else "full",
        base=manifest.parent.folder if manifest.parent else None,
        bytes_raw=job.plan.raw_bytes,
        bytes_written=file.size,
        bytes_shared=writer.shared_bytes,
        seconds_staged=handle._seconds("staged"),
        seconds_written=handle._seconds("written"),
        seconds_durable=handle._seconds("durable"),
        codecs={CODEC_NAMES[codec]: size for codec, size in sorted(writer.codec_bytes.items())},
        slab=f"{job.slab_note}; {job.slab.memory.note()}",
        io=job.sink.note,
        priority=job.writing.priority_note,
        predicted_stall=handle.predicted_stall,
    )


def failed_report(handle: SaveHandle, folder: str, plan: Plan, error: BaseException) -> SaveReport:
    """What `wait` returns for a failed save with on_error="warn"."""
    times = (handle._seconds("staged"), handle._seconds("written"), handle._seconds("durable"))
    return SaveReport(
        handle.step, folder, "failed", None, plan.raw_bytes, 0, 0, *times, {}, "", "", (), str(error)
    )


def _remove_quietly(catalog: Catalog, folder: str) -> None:
    """Clean up after a failed save without hiding its error; the next writer sweeps what stays."""
    with contextlib.suppress(OSError, CkptError):
        catalog.remove(folder)
