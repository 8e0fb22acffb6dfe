"""The saving half of a store: slab, writer thread, base of the deltas, and the errors nobody has seen yet."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from .catalog import Catalog
from .errors import CkptError
from .format import ALIGN
from .handle import SaveHandle
from .manifest import data_file_name
from .options import Options
from .plan import Plan
from .report import SaveReport
from .saving import SaveJob, failed_report, run, translate
from .sizing import available_memory, choose_slab, chunk_bytes_for
from .slab import Slab, StagingAbortedError
from .staging import side_streams, stage
from .writer import Base

_log = logging.getLogger("lf_ckpt")


class Saver:
    """Saves plans one after another. Executor threads are joined at interpreter exit, so no save is cut off there."""

    def __init__(self, catalog: Catalog, options: Options) -> None:
        self._catalog, self._options = catalog, options
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lf-ckpt-write")
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="lf-ckpt-stage")
        threads = options.threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lf-ckpt-encode") if threads > 1 else None
        self._slab: Slab | None = None
        self._slab_note = ""
        self._undelivered: BaseException | None = None
        self._deltas = 0
        self.base: Base | None = None
        self.current: SaveHandle | None = None
        self.damaged: set[str] = set()

    def start(self, step: int, plan: Plan, overlap: bool) -> SaveHandle:
        """Begin a save after the one before has ended; its error, if nobody has seen it, is raised here."""
        self.settle()
        handle = SaveHandle(step, self._delivered)
        self.current = handle
        try:
            job = self._prepare(handle, plan)
        except OSError as error:
            self._fail(handle, "", plan, translate(error, self._catalog, plan.raw_bytes))
            return handle
        except BaseException as error:
            handle._finish(None, error)
            raise
        if overlap:
            streams = side_streams(plan)
            self._writer.submit(self._run, job)
            self._stager.submit(lambda: streams.run(lambda: self._stage(job)))
        elif plan.slab_bytes > job.slab.size:
            self._writer.submit(self._run, job)
            self._stage(job)
        else:
            # The caller stands still: the writer would only compete for memory bandwidth until all is copied.
            try:
                self._stage(job)
            finally:
                self._writer.submit(self._run, job)
        return handle

    def settle(self) -> None:
        """Wait for the save in flight and raise or log its error."""
        if self.current is not None:
            self.current._over.wait()
        self.raise_undelivered()

    def raise_undelivered(self) -> None:
        """Raise or log, as configured, an error that no wait on a handle has shown."""
        error, self._undelivered = self._undelivered, None
        if error is None:
            return
        if self._options.on_error == "raise" or not isinstance(error, Exception):
            raise error
        _log.warning("%s: the last save failed and training goes on: %s", self._catalog.path, error)

    def adopt(self, base: Base, folders_of_deltas: Iterable[str]) -> None:
        """Use a step that has just been verified as base; `folders_of_deltas` are the bases of all committed deltas."""
        self.base = base
        self._deltas = sum(folder == base.folder for folder in folders_of_deltas)

    def shut_down(self) -> None:
        """Finish the save in flight and free threads and slab."""
        for pool in (self._stager, self._writer, self._pool):
            if pool is not None:
                pool.shutdown(wait=True)
        self._slab = self.base = None

    def _prepare(self, handle: SaveHandle, plan: Plan) -> SaveJob:
        """Slab, base, folder and open data file of a save; OSError when the store cannot be written."""
        slab = self._ensure_slab(plan)
        base = self._usable_base()
        folder = self._catalog.new_folder(handle.step)
        fd, direct, io_note = self._open_files(os.path.join(self._catalog.steps, folder), slab)
        return SaveJob(
            plan=plan,
            handle=handle,
            folder=folder,
            fd=fd,
            direct=direct,
            io_note=io_note,
            writer_id=uuid.uuid4().bytes,
            base=base,
            compress=self._options.compress,
            slab=slab,
            slab_note=self._slab_note,
        )

    def _open_files(self, folder: str, slab: Slab) -> tuple[int, int | None, str]:
        """The new data file, the same past the page cache, and how it will be written; no trace when that fails."""
        files, path = self._catalog.files, os.path.join(folder, data_file_name(0))
        fd = None
        try:
            fd = files.create(path)
            if self._options.io == "buffered":
                return fd, None, "buffered, as asked"
            if slab.array.ctypes.data % ALIGN:
                return fd, None, "buffered, the slab is not page-aligned"
            direct = files.open_direct(path)
            return fd, direct, "buffered, the file system refuses O_DIRECT" if direct is None else "direct"
        except OSError:
            if fd is not None:
                files.close(fd)
                files.unlink(path)
            files.rmdir(folder)
            raise

    def _ensure_slab(self, plan: Plan) -> Slab:
        """The slab, empty; made at the first save and again only when the state has outgrown it."""
        pinned = plan.on_device and torch.cuda.is_available()
        held = self._slab.size if self._slab is not None else 0
        free = available_memory()
        asked = self._options.slab_bytes
        size, note = choose_slab(plan.slab_bytes, asked, None if free is None else free + held)
        if self._slab is None or size > held or (pinned and not self._slab.pinned):
            self._slab = None  # the old one goes first, so that both are never held
            self._slab = Slab(size, pinned)
            self._slab_note = note + (", page-locked" if pinned else "")
            _log.info("%s: staging slab: %s", self._catalog.path, self._slab_note)
        self._slab.reset()
        return self._slab

    def _usable_base(self) -> Base | None:
        """The base for the next save, or None when it must be full."""
        if self.base is not None:
            gone = self.base.folder not in self._catalog.folders()
            if gone or self._deltas >= self._options.full_every:
                self.base = None
        return self.base

    def _stage(self, job: SaveJob) -> None:
        """Copy into the slab; what goes wrong reaches the caller through the handle."""
        try:
            stage(job.plan, job.slab, chunk_bytes_for(job.slab.size), job.incoming.put)
        except StagingAbortedError:
            return
        except Exception as error:
            job.incoming.put(error)
            return
        except BaseException as error:  # Ctrl-C: the caller gets it here, the writer an error of its own
            job.incoming.put(
                CkptError(f"step {job.handle.step} was interrupted while being copied: {error!r}")
            )
            raise
        job.handle._mark("staged")
        job.incoming.put(None)

    def _run(self, job: SaveJob) -> None:
        """Writer thread: finish one save and end its handle, whatever happens."""
        try:
            report = self._save(job)
        except BaseException as error:
            self._fail(job.handle, job.folder, job.plan, error)
            return
        _log.info("%s: step %d durable: %s", self._catalog.path, report.step, report)
        job.handle._finish(report, None)

    def _save(self, job: SaveJob) -> SaveReport:
        """Write and commit, then retire old steps."""
        done = run(job, self._catalog, self._pool)
        self._deltas = self._deltas + 1 if done.report.kind == "delta" else 0
        self.base = done.base
        return replace(done.report, removed=tuple(self._retire(job.folder)))

    def _retire(self, saved: str) -> list[str]:
        protect = {saved} | ({self.base.folder} if self.base else set())
        try:
            self._catalog.point_head(saved)
            return self._catalog.retain(self._options.keep, protect, self.damaged)
        except Exception as error:  # the step is durable: whatever fails here must not make it look lost
            _log.warning("%s: old steps not removed: %s", self._catalog.path, error)
            return []

    def _fail(self, handle: SaveHandle, folder: str, plan: Plan, error: BaseException) -> None:
        """End a save with an error, to be raised once more at the next call if nobody waits for the handle."""
        _log.error("%s: save of step %d failed: %s", self._catalog.path, handle.step, error)
        self.base = None
        self._undelivered = error
        warn = self._options.on_error == "warn" and isinstance(error, Exception)
        handle._finish(failed_report(handle, folder, plan, error) if warn else None, error)

    def _delivered(self, handle: SaveHandle) -> None:
        if handle is self.current:
            self._undelivered = None
