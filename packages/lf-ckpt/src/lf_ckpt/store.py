"""`Store`: save in the background, commit atomically, load the newest step that verifies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch

from .catalog import Catalog
from .errors import CkptError, NoCheckpointError, UploadError
from .fetch import ReadIo
from .handle import SaveHandle
from .jsonio import Json
from .loading import Wanted, verified_base
from .lock import LOCK, StoreLock
from .manifest import PUBLISH
from .mirror import Mirror
from .naming import MapNames
from .options import Options
from .peers import join
from .places import locate
from .plan import Plan, make_plan
from .ranked import stored_name
from .reader import StepReader
from .report import Loaded, SaveReport
from .saver import Saver
from .step_loader import StepLoader
from .storage import Storage
from .team import Alone, Together
from .turns import Turn
from .voting import agree, telling, together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("lf_ckpt")
STEP_LIMIT = 10**18
OPENING = ("opening for writing", "opening for reading")  # what all ranks of a group must want alike


class Store:
    """A checkpoint directory; made by `open`. Saves of several threads take turns; handles are thread-safe."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Options,
        files: Storage | None,
        group: ProcessGroup | None = None,
    ) -> None:
        with telling(group, options.group_timeout, OPENING[bool(options.read_only)]):
            if sys.byteorder != "little":
                raise CkptError("lf-ckpt stores little-endian bytes and needs a little-endian machine")
            storage, where = locate(path, options.mode, files)
        self.path = where if "://" not in os.fspath(path) else os.fspath(path)
        self.options = options
        self._catalog = Catalog(storage, where)
        self._pid = os.getpid()
        self._closed = False
        self._over = False
        self._turn = Turn(self.path)
        self._lock: StoreLock | None = None
        self._saver: Saver | None = None
        self._mirror: Mirror | None = None
        self._damaged: set[str] = set()  # folders that loads or uploads could not read; no base for a save
        self._peers = join(group, options.group_timeout)
        self._loader = StepLoader(self.path, self._catalog, self._peers, self._damaged, self._offer_base)
        try:
            if self._peers is None:
                self._open()
            else:
                agree(self._peers, OPENING[bool(options.read_only)], None, lambda: None)
                together(self._peers, f"{self.path} was not opened", self._open)
                agree(self._peers, f"use of store {self._catalog.store_id}", None, lambda: None)
        except BaseException:
            self._let_go()
            raise

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        items: Mapping[str, Json] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        overlap: bool = False,
        fence: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        per_rank: Collection[str] = ("rng",),
    ) -> SaveHandle:
        """Start a save of `step` and return when `tensors` may change again (overlap=True: at once).

        tensors: any dtype of `lf_ckpt.DTYPES`, shape, stride and device; names of the same memory stay tied.
        items: JSON data and bytes. metrics: numbers that retention (`Best`) and the tools may use.

        overlap=True copies behind the next forward and backward. With `fence`, the
        optimizer(s) of the tensors, in the order in which they step, that is all: what only they write is copied before
        each one's next `step()`, by a hook that stays on it, and everything else (buffers such as running statistics,
        tensor learning rates, averages, frozen parameters) before this returns. A step that fires no hook, as a
        captured one, comes after `handle.fence()`. Without `fence` nothing may change before `handle.wait_staged()` or
        `handle.fence()`, not even running statistics. One save is in flight at a time; a second one waits for it.
        Saving a step again makes a new attempt that supersedes the old one.

        In a group every rank calls this with the same step and its own state: local shards of DTensors are stored as
        parts of the whole, tensors that several ranks have under one name once, items as rank 0 has them. Names in
        `per_rank`, and dotted names below them, are values that each rank keeps of its own.

        Raises UnsupportedError before anything is written, the error of the save before (on_error="raise"),
        RankFailedError and PeerLostError in a group, and CkptError on a closed or read-only store or in a forked child.
        """
        self._writable()
        try:
            name = str if self._peers is None else stored_name(per_rank, self._peers.rank)
            optimizers = _checked(step, overlap, fence)
        except BaseException as error:
            with self._turn:
                self._writable().refuse(error)
            raise

        return self._start(step, lambda: make_plan(tensors, items or {}, metrics, name), overlap, optimizers)

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        only: str | Sequence[str] | None = None,
        map_names: MapNames | None = None,
        reshape: bool = False,
        cast: bool = False,
        device: str | torch.device | None = None,
        strict: bool = True,
        verify: bool = True,
        io: ReadIo = "auto",
        precheck: bool = True,
        rank: int | None = None,
    ) -> Loaded:
        """Load a step; "latest" is the newest one that verifies, and falling back to it is reported and logged.

        into: tensors to fill in place (any stride, device); touched only after all that is needed has verified. strict:
        raise MismatchError unless names, shapes and dtypes of `into` and the step agree. only: names or shell globs of
        the tensors to load, as saved ("model.*"); the others are not read. map_names: saved -> present names. reshape,
        cast: fill tensors of `into` of another shape and as many elements, of another dtype when a conversion only
        rounds. device: where fresh tensors go (the host when None), streamed there without a whole copy on the host.
        verify=False skips the hashes, not the structure. io: "direct" reads past the page cache (CkptError with the
        reason where that is refused), "auto" does so where it is allowed and the file is not cached. precheck=False
        reads once, not twice: `into` is filled while it is verified, so its content is undefined after an error; a
        fallback overwrites all of it, which is why it needs strict=True. An explicit step that is damaged raises
        CorruptError; NoCheckpointError when there is nothing to load. HalfLoadedError when the disk fails between
        the check and the end of filling: it names the tensors of `into` that may hold a mixture, and with strict=True
        "latest" overwrites them with an older step instead. A save in flight is waited for.

        DTensors in `into` get their local shards, whatever number of ranks saved the step. In a group every rank calls
        this and all load the same step or none does. rank: whose values that are kept per rank to take; by default this
        rank's, those of 0 without a group. They are absent when that rank did not exist.
        """
        self._check_open()
        if self._saver is not None and self._saver.current is not None and os.getpid() == self._pid:
            self._saver.current._over.wait()
        return self._loader.load(
            step,
            lambda: Wanted.of(
                device, into=into, only=only, map_names=map_names, reshape=reshape, cast=cast, strict=strict,
                verify=verify, io=io, precheck=precheck, rank=self._rank if rank is None else rank,
            ),
        )  # fmt: skip

    def steps(self) -> tuple[int, ...]:
        """Committed steps, ascending: whole manifests whose files have their full length."""
        self._check_open()
        return self._loader.steps()

    def latest(self) -> int | None:
        """Newest committed step, or None. `load` may still fall back from it when its bytes are damaged."""
        return max(self.steps(), default=None)

    def pin(self, step: int) -> None:
        """Keep `step` whatever the retention rules say, until `unpin`; NoCheckpointError when it is not committed."""
        self._quiet()
        self._catalog.pin(self._loader.newest_attempt(step))

    def unpin(self, step: int) -> bool:
        """Leave `step` to the rules again; whether it was pinned."""
        self._quiet()
        return self._catalog.unpin(self._loader.newest_attempt(step))

    def info(self) -> dict[str, str]:
        """What the store lies on and what was chosen for it: place, mode with its reason, commit, lock."""
        traits = self._catalog.files.traits
        return {
            "path": self.path,
            "storage": traits.kind,
            "mode": "object" if traits.whole else "shared" if traits.shared else "local",
            "why": traits.why,
            "commit": self._catalog.commits.note,
            "lock": self._lock.kind if self._lock is not None else "none",
        }

    def wait(self) -> SaveReport | None:
        """Finish the save in flight and return its report, None when nothing was saved yet. Raises its error."""
        if self._saver is None:
            self._check_open()
            return None
        saver = self._writable()
        report = saver.current.wait() if saver.current is not None else None
        saver.raise_undelivered()
        return report

    def wait_uploaded(self, timeout: float | None = None) -> None:
        """Finish the save in flight, then block until every step is uploaded that the copy shall have.

        UploadError after `timeout` seconds, or with what went wrong; CkptError without `upload`. In a group rank 0
        uploads and waits, the others return at once.
        """
        self._quiet()
        if self.options.upload is None:
            raise CkptError(f"{self.path}: opened without upload=")
        if self._mirror is not None:
            self._mirror.wait(timeout)

    def close(self) -> None:
        """Finish the save in flight, wait for uploads, unlock; then raise an error that nobody has seen yet."""
        if os.getpid() != self._pid:
            self._closed = True
            return
        with self._turn:
            if self._over:
                return
            self._closed = True
        # Ctrl-C in here leaves the lock held, for the writer may be at work: closing again goes on from here.
        if self._saver is not None:
            self._saver.shut_down()
        self._over = True
        try:
            if self._mirror is not None:
                self._mirror.close()
        except UploadError as error:
            self._report_upload_error(error)
        finally:
            self._let_go()
        if self._saver is not None:
            self._saver.raise_undelivered()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:
            _log.error("%s: also failed while closing: %s", self.path, late)

    def _start(
        self,
        step: int,
        make: Callable[[], Plan],
        overlap: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> SaveHandle:
        """Start a save of a plan; raises first what went wrong in the background and nobody has seen."""

        def plan() -> Plan:
            self._raise_upload_error()
            made = make()
            return replace(made, profile=PUBLISH) if self.options.chain else made

        with self._turn:
            return self._writable().start(step, plan, overlap, optimizers)

    def _open(self, ready: Callable[[], None] = lambda: None) -> None:
        """Open as reader, or as writer: rank 0 takes the lock and makes what is missing, then come the others."""
        if not self.options.read_only and self._rank == 0:
            self._take()
        ready()
        self._catalog.identify()
        if not self.options.read_only:
            team = Alone(self._catalog) if self._peers is None else Together(self._catalog, self._peers)
            self._saver = Saver(self._catalog, self.options, team, self._damaged)

    def _take(self) -> None:
        catalog = self._catalog
        try:
            catalog.stand_alone()
            catalog.make_folder(catalog.path)
            self._lock = StoreLock(catalog.files, os.path.join(catalog.path, LOCK))
            if self.options.upload is not None:
                self._mirror = Mirror(self.options.upload, self._damaged)
            self._catalog.create(self._mirror.store_id if self._mirror else None)
            self._catalog.identify()
            swept = self._catalog.sweep()
            if self._mirror is not None:
                self._mirror.follow(self._catalog)
        except OSError as error:
            raise CkptError(f"{self.path}: cannot be opened for writing: {error}") from error
        if swept:
            _log.warning("%s: removed unfinished saves %s", self.path, ", ".join(swept))

    @property
    def _rank(self) -> int:
        return 0 if self._peers is None else self._peers.rank

    def _open_step(self, step: int | Literal["latest"]) -> StepReader:
        """A committed step, opened for tools that stream it; a damaged one raises, whichever was asked for."""
        self._check_open()
        if self._saver is not None and self._saver.current is not None:
            self._saver.current._over.wait()
        newest = self.latest() if step == "latest" else step
        if newest is None:
            raise NoCheckpointError(self.path, ())
        return self._loader.open(newest)

    def _quiet(self) -> None:
        """Let the save in flight end: its retention must not run while pins change."""
        current = self._writable().current
        if current is not None:
            current._over.wait()

    def _offer_base(self, reader: StepReader) -> None:
        """Extents that have just been verified may serve as base of later deltas of this writer."""
        saver = self._saver
        if saver is None or self.options.chain:
            return
        if saver.base is not None and saver.base.folder not in self._damaged:
            return
        base = verified_base(reader, self._catalog.store_id, self._rank)
        if base is not None:
            saver.adopt(base, (m.parent.folder for m in self._catalog.summaries() if m.parent))

    def _raise_upload_error(self) -> None:
        error = self._mirror.take_error() if self._mirror is not None else None
        if error is not None:
            self._report_upload_error(error)

    def _report_upload_error(self, error: UploadError) -> None:
        if self.options.on_error == "raise":
            raise error
        _log.warning("%s: an upload failed and training goes on: %s", self.path, error)

    def _check_open(self) -> None:
        if self._closed:
            raise CkptError(f"{self.path}: the store is closed")

    def _writable(self) -> Saver:
        self._check_open()
        if self._saver is None:
            raise CkptError(f"{self.path}: opened with read_only=True")
        if os.getpid() != self._pid:
            raise CkptError(f"{self.path}: opened by process {self._pid}; a forked child cannot save to it")
        return self._saver

    def _let_go(self) -> None:
        """Finish the save in flight, unlock, leave the group."""
        if self._saver is not None:
            self._saver.shut_down()
        self._unlock()
        self._peers = None

    def _unlock(self) -> None:
        if self._mirror is not None:
            self._mirror.abandon()
        if self._lock is not None:
            try:
                self._lock.release()
            except OSError as error:
                _log.warning("%s: lock not released cleanly: %s", self.path, error)
            self._lock = None


def _checked(
    step: int, overlap: bool, fence: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of `fence`; ValueError for what `Store.save` does not take."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEP_LIMIT:
        raise ValueError(f"step {step!r}: a whole number from 0 to 10**18 - 1")
    optimizers = (fence,) if isinstance(fence, torch.optim.Optimizer) else tuple(fence)
    if optimizers and not overlap:
        raise ValueError("fence= belongs to overlap=True")
    return optimizers
