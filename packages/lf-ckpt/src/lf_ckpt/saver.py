"""The saving half of a store: slab, writer thread, base of the deltas, and the errors nobody has seen yet."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import torch

from .accelerators import DeviceEvent
from .catalog import Catalog
from .crew import Crew
from .errors import CkptError
from .fence import Gate, ends_in, gate_of, in_order_of_change
from .handle import SaveHandle
from .manifest import Parent, data_file_name
from .options import Options
from .parents import ParentBytes, new_parents, stored_parents
from .plan import Plan
from .report import SaveReport
from .saving import SaveJob, failed_report, run, translate
from .sink import Sink, Writing
from .sizing import chunk_bytes_for, predict_stall
from .slab import Slab, StagingAbortedError
from .staging import Staging, side_streams
from .staging_slab import StagingSlab
from .team import Begun, Team
from .writer import Base

_log = logging.getLogger("lf_ckpt")
# Host tensors beside those of a device are counters and generators; more than this is copied by the staging thread.
QUEUED_HOST_BYTES = 4 << 20
Events: TypeAlias = list[DeviceEvent]


class Saver:
    """Saves plans one after another. Executor threads are joined at interpreter exit, so no save is cut off there."""

    def __init__(self, catalog: Catalog, options: Options, team: Team, damaged: set[str]) -> None:
        """damaged: folders that cannot be read, to be base of nothing; others add to it at any time."""
        self._catalog, self._options, self._team = catalog, options, team
        self._writing = Writing(catalog.files, options)
        settle = self._writing.settle_thread
        self._writer = ThreadPoolExecutor(1, "lf-ckpt-write", initializer=settle)
        self._stager = ThreadPoolExecutor(1, "lf-ckpt-stage")
        threads = options.threads
        self._pool = Crew(threads, "lf-ckpt-encode", settle) if threads > 1 else None
        self._slab = StagingSlab(catalog.path, options.slab_bytes, self._writing.let_go)
        self._staging: Future[None] | None = None
        self._copies: Staging | None = None
        self._undelivered: BaseException | None = None
        self._deltas = 0
        self._rate: float | None = None  # raw bytes per second of the last save, from its start to "written"
        self._parents: ParentBytes | None = None
        self._spent: ParentBytes | None = None
        self.base: Base | None = None
        self.current: SaveHandle | None = None
        # Of the save being started; kept as soon as they are made, for Ctrl-C may come before they are returned.
        self._begun: Begun | None = None
        self._sink: Sink | None = None
        self._down = False
        self._damaged = damaged
        if options.expected_bytes is not None:
            self._slab.expect(options.expected_bytes, self._stager)

    def start(
        self,
        step: int,
        make: Callable[[], Plan],
        overlap: bool,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> SaveHandle:
        """Begin a save after the one before has ended; its error, if nobody has seen it, is raised here."""
        try:
            self.settle()
            gates = [gate_of(optimizer) for optimizer in optimizers]
            plan = in_order_of_change(make(), optimizers)[0] if gates else make()
        except BaseException as error:
            self._team.refuse(error)
            raise
        handle, job, self._begun, self._sink = SaveHandle(step, self._delivered), None, None, None
        try:
            self.current = handle
            begun = self._begin(handle, plan)
            job = self._prepare(handle, begun) if begun is not None else None
            if job is not None and overlap:
                self._stage_behind(job)
                self._arm(job, optimizers, gates)
            elif job is not None:
                self._stage_now(job)
        except BaseException as error:
            self._withdraw(handle, job, error)
            raise
        return handle

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, if any, that this one cannot begin a save, once the one in flight has ended."""
        if self.current is not None and self._team.world > 1:
            self.current._over.wait()
        self._team.refuse(error)

    def settle(self) -> None:
        """Wait for the save in flight and raise or log its error."""
        if self.current is not None:
            self.current._over.wait()
        if self._staging is not None:
            # After a failure the stager may still be in the slab, which the next save will empty and fill.
            self._staging.exception()
            self._staging = None
        if self._copies is not None:
            with contextlib.suppress(RuntimeError):  # a device that is lost copies nothing any more
                self._copies.arrive()
            self._copies = None
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
        if self._options.deltas:
            at = (self._catalog.files, self._catalog.steps, base.folder, base.root)
            base = replace(base, parents=stored_parents(*at, self._team.rank))
        self.base = base
        self._deltas = sum(folder == base.folder for folder in folders_of_deltas)

    def shut_down(self) -> None:
        """Finish the save in flight and free threads and slab. Idempotent."""
        if self._down:
            return
        for pool in (self._stager, self._writer, self._pool):
            if pool is not None:
                pool.shutdown(wait=True)
        self._writing.close()
        self._slab.close()
        self.base = self._parents = self._spent = None
        self._down = True  # last: after a Ctrl-C in here the next call waits for the rest

    def _begin(self, handle: SaveHandle, plan: Plan) -> Begun | None:
        """Agree with the other ranks, if any; None when that failed and the handle knows.

        What fails in a group raises on every rank at once: one that trains on would wait for those that stopped.
        """
        try:
            return self._agree(handle.step, plan)
        except Exception as error:
            later = isinstance(error, OSError) if self._team.world == 1 else self._options.on_error == "warn"
            said = translate(error, self._catalog, plan.raw_bytes)
            if not later:
                raise said from (error if said is not error else None)
            self._fail(handle, "", plan, said)
            return None

    def _agree(self, step: int, plan: Plan) -> Begun:
        try:
            base = self._usable_base()
        except BaseException as error:
            self._team.refuse(error)
            raise
        parent = Parent(base.folder, base.root) if base else None
        self._begun = self._team.begin(step, plan, parent)
        self.base = base if self._begun.use_base else None
        return self._begun

    def _prepare(self, handle: SaveHandle, begun: Begun) -> SaveJob | None:
        """Slab and open data file of a save; None when the store cannot be written and the handle knows."""
        try:
            if self._pool is not None:
                self._pool.start()
            on_device = begun.plan.on_device and torch.cuda.is_available()
            slab = self._slab.fit(begun.plan.slab_bytes, on_device)
            if self.base is None or self._options.chain:
                self._renew_parents(begun.plan)
            handle.predicted_stall = self._predict(begun.plan, slab)
            path = os.path.join(self._catalog.steps, begun.folder, data_file_name(begun.rank))
            self._sink = self._writing.open(path, slab, begun.plan.slab_bytes)
        except OSError as error:
            named = translate(error, self._catalog, begun.plan.raw_bytes)
            self._abandon(handle, begun, named, lambda: self._fail(handle, begun.folder, begun.plan, named))
            return None
        return SaveJob(
            begun=begun,
            team=self._team,
            handle=handle,
            sink=self._sink,
            writing=self._writing,
            base=self.base,
            keeping=self._parents if self.base is None or self._options.chain else None,
            compress=self._options.compress,
            slab=slab,
            slab_note=self._slab.note,
        )

    def _abandon(
        self, handle: SaveHandle, begun: Begun | None, error: BaseException, end: Callable[[], None]
    ) -> None:
        """End a save, unless another thread has begun to.

        In a group the writer thread does: others hear of it when they have written, which is not the caller's time.
        """

        def fail() -> None:
            if not handle._claim():
                return
            try:
                if begun is not None:
                    self._team.fail(begun, error)
            finally:
                end()

        if self._team.world > 1:
            with contextlib.suppress(RuntimeError):  # no thread to be had, or an interpreter that exits
                self._writer.submit(fail)
                return
        fail()

    def _withdraw(self, handle: SaveHandle, job: SaveJob | None, error: BaseException) -> None:
        """End a save that the caller could not hand over: Ctrl-C, no thread to be had, an interpreter that exits."""
        cut = CkptError(f"step {handle.step} was interrupted before it was all copied: {error!r}")
        sink = self._sink

        def end() -> None:
            if sink is not None:
                with contextlib.suppress(OSError):
                    sink.close()
            if job is not None:
                job.slab.abort()
            if job is None or isinstance(error, Exception):
                handle._finish(None, error)
            else:  # as from the writer thread: a loop that survives Ctrl-C hears of it at the next call
                self._fail(handle, job.folder, job.plan, cut)

        if job is not None:  # if the writer thread has it, this is what ends it
            job.incoming.put(cut)
        self._abandon(handle, self._begun, error, end)

    def _hand_over(self, job: SaveJob) -> None:
        """Give the job to the writer thread; RuntimeError where there is none."""
        self._writer.submit(self._run, job)

    def _renew_parents(self, plan: Plan) -> None:
        """Memory for the bytes that this save leaves to the next one. In a chain those of the step before are in use,
        and the ones before that are free."""
        free = self._spent if self._options.chain else self._parents
        self._spent = self._parents if self._options.chain else None
        self._parents = new_parents(self._options, plan.raw_bytes, free)

    def _predict(self, plan: Plan, slab: Slab) -> float | None:
        """Seconds that the caller, or its optimizer, will wait for the disk; logged when there are any."""
        stall = predict_stall(plan.slab_bytes, slab.size, self._rate)
        if stall != 0:
            known = "unknown, nothing has been written yet" if stall is None else f"about {stall:.1f} s"
            _log.warning(
                "%s: the slab holds %d of %d bytes; staging waits for the disk, %s",
                self._catalog.path, slab.size, plan.slab_bytes, known,
            )  # fmt: skip
        return stall

    def _usable_base(self) -> Base | None:
        """The base for the next save, or None when it must be full."""
        if self.base is not None:
            gone = self.base.folder in self._damaged or self.base.folder not in self._catalog.folders()
            if gone or self._deltas >= self._options.full_every:
                self.base = None
        return self.base

    def _arm(self, job: SaveJob, optimizers: Sequence[torch.optim.Optimizer], gates: Sequence[Gate]) -> None:
        """Wait for what no optimizer owns to be copied; each optimizer will wait for what it is to change."""
        if not gates:
            return
        ends = ends_in(job.plan, optimizers)
        job.handle._progress.fence(ends[0])
        for gate, end in zip(gates, ends[1:], strict=True):
            gate.arm(job.handle._progress, end)

    def _stage_now(self, job: SaveJob) -> None:
        """Copy while the caller stands still."""
        if job.plan.slab_bytes > job.slab.size:
            self._hand_over(job)
            self._finish_staging(job, self._stage(job, self._copies_of(job)))
            return
        # The writer would only compete for memory bandwidth until all is copied.
        try:
            self._finish_staging(job, self._stage(job, self._copies_of(job)))
        finally:
            self._hand_over(job)

    def _stage_behind(self, job: SaveJob) -> None:
        """Copy while the caller goes on: begun here where that takes no time, the rest by the staging thread."""
        streams = side_streams(job.plan)
        self._hand_over(job)
        copies = self._copies_of(job)
        host_bytes = sum(s.nbytes for s in job.plan.streams if not s.on_device)
        if job.plan.on_device and job.plan.slab_bytes <= job.slab.size and host_bytes <= QUEUED_HOST_BYTES:
            # A second thread fights the forward pass for the interpreter lock: of a small state it gets nothing.
            streams.run(copies.begin)
        self._staging = self._stager.submit(
            lambda: self._finish_staging(job, streams.run(lambda: self._stage(job, copies)))
        )

    def _copies_of(self, job: SaveJob) -> Staging:
        """The copies of a save, none of them made yet."""
        chunk_bytes = chunk_bytes_for(job.slab.size)
        self._copies = Staging(job.plan, job.slab, chunk_bytes, job.incoming.put, job.handle._progress)
        return self._copies

    def _stage(self, job: SaveJob, copies: Staging) -> Events | None:
        """Copy into the slab, or queue the copies; None when that failed and the writer knows."""
        try:
            return copies.finish()
        except StagingAbortedError:
            return None
        except Exception as error:
            job.incoming.put(error)
            return None
        except BaseException as error:  # Ctrl-C: the caller gets it here, the writer an error of its own
            job.incoming.put(
                CkptError(f"step {job.handle.step} was interrupted while being copied: {error!r}")
            )
            raise
        finally:
            job.handle._progress.finish()

    def _finish_staging(self, job: SaveJob, events: Events | None) -> None:
        """The caller's tensors are free once the events have fired."""
        if events is None:
            return
        try:
            for event in events:
                event.synchronize()
        except Exception as error:
            job.incoming.put(error)
            return
        job.handle._mark("staged")
        job.incoming.put(None)

    def _run(self, job: SaveJob) -> None:
        """Writer thread: finish one save and end its handle, whatever happens."""
        if not job.handle._claim():
            return  # withdrawn while it was handed over
        try:
            report = self._save(job)
        except BaseException as error:
            self._fail(job.handle, job.folder, job.plan, error)
            return
        job.handle._finish(report, None)  # before the log line: a handler of the user may fail
        _log.info("%s: step %d durable: %s", self._catalog.path, report.step, report)

    def _save(self, job: SaveJob) -> SaveReport:
        """Write and commit, then retire old steps."""
        done = run(job, self._catalog, self._pool)
        if done.report.seconds_written > 0:
            self._rate = done.report.bytes_raw / done.report.seconds_written
        self._deltas = self._deltas + 1 if done.report.kind == "delta" else 0
        self.base = done.base
        if done.damaged:
            self._damaged.add(done.damaged)
        return replace(done.report, removed=tuple(self._retire(job.folder)))

    def _retire(self, saved: str) -> list[str]:
        if self._team.rank != 0:
            return []
        protect = {saved} | ({self.base.folder} if self.base else set())
        try:
            self._catalog.point_head(saved)
            return self._catalog.retain(self._options.keep, protect, frozenset(self._damaged))
        except Exception as error:  # the step is durable: whatever fails here must not make it look lost
            _log.warning("%s: old steps not removed: %s", self._catalog.path, error)
            return []

    def _fail(self, handle: SaveHandle, folder: str, plan: Plan, error: BaseException) -> None:
        """End a save with an error, to be raised once more at the next call if nobody waits for the handle."""
        self.base = None
        self._undelivered = error
        warn = self._options.on_error == "warn" and isinstance(error, Exception)
        handle._finish(failed_report(handle, folder, plan, error) if warn else None, error)
        _log.error("%s: save of step %d failed: %s", self._catalog.path, handle.step, error)

    def _delivered(self, handle: SaveHandle) -> None:
        if handle is self.current:
            self._undelivered = None
