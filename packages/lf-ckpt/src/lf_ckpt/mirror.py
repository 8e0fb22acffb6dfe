"""Local disk first, then upload: a background thread copies durable steps to a second store.

What to copy is a pure function of both stores, so an upload that was cut off goes on in the next process. A step is
verified before it is copied, its base goes before it, its MANIFEST last: the second store is one like any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from .catalog import Catalog, candidate_of
from .errors import CkptError, CorruptError, UploadError
from .files import read_all
from .format import TRAILER_BYTES, parse_trailer
from .loading import folder_of, verify_step
from .lock import LOCK, StoreLock
from .manifest import MANIFEST_LIMIT, DataFile, Manifest, parse_folder
from .places import locate
from .reader import MANIFEST, StepReader
from .retention import Candidate
from .upload import Upload, needed_bases, to_upload

_log = logging.getLogger("lf_ckpt")
_PIECE_BYTES = 8 << 20


class Mirror:
    """The second store, locked, and the thread that fills it. One pass at a time; a pass copies all that is missing."""

    def __init__(self, upload: Upload, suspects: set[str]) -> None:
        """Open the place. LockedError, CkptError, OSError as `lf_ckpt.open`.

        suspects: gets the local folders whose files do not verify.
        """
        files, where = locate(upload.url, upload.mode, upload.files)
        self.url, self._options = os.fspath(upload.url), upload
        self._remote = Catalog(files, where)
        self._local: Catalog | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lf-ckpt-upload")
        self._passes: list[Future[None]] = []
        self._state = threading.Lock()
        self._waiting: set[str] = set()
        self._there: set[str] = set()  # every folder name that the copy has
        self._copies: dict[str, Candidate] = {}  # its sound steps; this is their only writer
        self._damaged: set[str] = set()  # local steps that did not verify
        self._suspects = suspects
        self._bases: dict[str, str | None] = {}  # of the local steps in the plan
        self._error: UploadError | None = None
        self._stop = threading.Event()
        self._remote.make_folder(where)
        self._lock = StoreLock(files, os.path.join(where, LOCK))
        try:
            self.store_id = self._known_id()
        except BaseException:
            self._lock.release()
            raise

    def follow(self, local: Catalog) -> None:
        """Copy what is missing, and every step from now on. CkptError when the copy is of another store."""
        self._local = local
        self._remote.create(local.store_id)
        self._remote.identify()
        if self._remote.store_id != local.store_id:
            raise CkptError(
                f"{self.url}: holds copies of another store than {local.path}; choose another place"
            )
        self._there = set(self._remote.folders())
        self._copies = {c.folder: c for c in self._remote.candidates()}
        self._clean(set(local.folders()))
        with self._state:
            self._waiting = set(self._plan())
        local.follower = self
        self._submit()

    def taken(self) -> Collection[str]:
        """Folder names that the copy has used: a new step must not be mistaken for one of them."""
        with self._state:
            return set(self._there)

    def held(self) -> Collection[str]:
        """Local folders that must stay until they are uploaded."""
        with self._state:
            return set(self._waiting) if self._options.hold else ()

    def committed(self, folder: str) -> None:
        """A local step has become durable."""
        with self._state:
            self._waiting.add(folder)
        self._submit()

    def pending(self) -> tuple[int, ...]:
        """Steps that are not uploaded yet."""
        with self._state:
            return tuple(sorted({(parse_folder(folder) or (0, 0))[0] for folder in self._waiting}))

    def wait(self, timeout: float | None) -> None:
        """Until all is uploaded. UploadError names what is not after `timeout` seconds, or what went wrong."""
        if self.pending():
            self._submit()
        with self._state:
            passes = list(self._passes)
        if wait_for(passes, timeout).not_done:
            raise UploadError(
                self.url, self.pending(), f"not done after {timeout} s; the next writer goes on with it"
            )
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> UploadError | None:
        """The error that nobody has seen yet."""
        with self._state:
            error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait as configured, end the thread, unlock; then raise an error that nobody has seen."""
        try:
            self.wait(self._options.timeout)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the thread after the piece it is sending, and unlock. Idempotent."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._local is not None:
            self._local.follower = None
        try:
            self._lock.release()
        except OSError as error:
            _log.warning("%s: lock not released cleanly: %s", self.url, error)

    def _known_id(self) -> str | None:
        if not self._remote.files.exists(os.path.join(self._remote.path, "FORMAT")):
            return None
        self._remote.identify()
        return self._remote.store_id

    def _submit(self) -> None:
        with self._state:
            self._passes = [p for p in self._passes if not p.done()]
            if sum(not p.running() for p in self._passes) == 0:  # a pass that has not begun will see it all
                self._passes.append(self._pool.submit(self._pass))

    def _pass(self) -> None:
        with self._state:
            known = set(self._waiting)
        folder, damage = "", []
        try:
            plan = self._plan()
            with self._state:
                self._waiting -= known - set(plan)
            for folder in plan:
                if not self._stop.is_set() and (problem := self._try_sound(folder)):
                    damage.append(problem)
            folder = ""
            self._retire()
        except Exception as error:
            if not self._stop.is_set():
                self._fail([*damage, f"step {folder}: {error}" if folder else str(error)], error)
        else:
            if damage:
                self._fail(damage, None)

    def _fail(self, reasons: list[str], cause: Exception | None) -> None:
        """Keep an error for the next caller. Damaged steps are named once and waited for no more."""
        reason = "; ".join(reasons)
        _log.error("%s: upload failed: %s", self.url, reason)
        failure = UploadError(self.url, self.pending(), reason)
        failure.__cause__ = cause
        with self._state:
            self._error = failure
            self._waiting -= self._damaged

    def _plan(self) -> list[str]:
        local = [c for c in self._source.candidates() if c.folder not in self._damaged]
        self._bases = {c.folder: c.parent for c in local}
        return to_upload(local, list(self._copies.values()), self._options.keep)

    def _try_sound(self, folder: str) -> str | None:
        """Copy a step; what is wrong when it is damaged, or its base is, which is no reason to keep others waiting."""
        base = self._bases[folder]
        try:
            if base in self._damaged:
                raise CorruptError(os.path.join(self._source.steps, folder), f"its base {base} is damaged")
            self._try(folder)
        except CorruptError as error:
            self._damaged.add(folder)
            self._suspects |= {folder, folder_of(error)} - {""}
            return f"step {folder}: {error}"
        return None

    def _try(self, folder: str) -> None:
        """Copy a step, again after a pause when the network fails. A damaged step is not tried again."""
        for attempt in range(self._options.attempts):
            try:
                manifest = self._copy(folder)
            except CorruptError:
                raise
            except OSError as error:
                if folder not in self._source.folders():
                    _log.warning("%s: step %s was removed before its upload", self.url, folder)
                    break
                if attempt + 1 == self._options.attempts or self._stop.wait(self._options.pause * 2**attempt):
                    raise
                _log.warning("%s: upload of step %s is tried again: %s", self.url, folder, error)
            else:
                with self._state:
                    self._there.add(folder)
                self._copies[folder] = candidate_of(manifest)
                _log.info("%s: step %s uploaded", self.url, folder)
                break
        with self._state:
            self._waiting.discard(folder)

    def _copy(self, folder: str) -> Manifest:
        source, target = self._source, os.path.join(self._remote.steps, folder)
        with StepReader(source.files, source.steps, folder) as reader:
            verify_step(reader)
            manifest = reader.manifest
        data = read_all(source.files, os.path.join(source.steps, folder, MANIFEST), MANIFEST_LIMIT)
        assert data is not None  # the reader has parsed it
        with contextlib.suppress(FileExistsError):
            self._remote.files.mkdir(target)
        for file in manifest.files:
            if not self._has(os.path.join(target, file.name), file):
                self._copy_file(
                    os.path.join(source.steps, folder, file.name), os.path.join(target, file.name)
                )
        self._remote.place(manifest, data)
        return manifest

    def _has(self, path: str, file: DataFile) -> bool:
        """Whether an upload that was cut off has left this file whole: length and hash of the index agree.

        Only where files appear whole: elsewhere the middle of a file may be missing in spite of its end.
        """
        files = self._remote.files
        if not files.traits.whole or not files.exists(path):
            return False
        fd = files.open(path)
        try:
            size = files.size(fd)
            if size != file.size:
                return False
            end = bytearray(TRAILER_BYTES)
            files.read(fd, memoryview(end), size - TRAILER_BYTES)
            return parse_trailer(bytes(end), size, path).index_hash.hex() == file.index_hash
        except CorruptError:
            return False
        finally:
            files.close(fd)

    def _copy_file(self, source: str, target: str) -> None:
        files, remote = self._source.files, self._remote.files
        piece = memoryview(bytearray(_PIECE_BYTES))
        with contextlib.ExitStack() as stack:
            incoming = files.open(source)
            stack.callback(files.close, incoming)
            outgoing = remote.create(target)
            stack.callback(remote.close, outgoing)
            size, at = files.size(incoming), 0
            while at < size:
                if self._stop.is_set():
                    raise InterruptedError("the store was closed")
                got = files.read(incoming, piece, at)
                remote.write(outgoing, [piece[:got]], at)
                at += got
            remote.sync(outgoing)

    def _retire(self) -> None:
        """Retention of the copy; what deltas to come may need stays."""
        if self._options.keep:
            bases = needed_bases(self._source.candidates())
            removed = self._remote.retain(self._options.keep, bases, ())
            with self._state:
                self._there.difference_update(removed)
            for folder in removed:
                self._copies.pop(folder, None)

    def _clean(self, local: set[str]) -> None:
        """Remove unfinished uploads of steps that are not here any more."""
        for folder in self._remote.unfinished():
            if folder not in local:
                self._remote.remove(folder)

    @property
    def _source(self) -> Catalog:
        assert self._local is not None, "follow() comes first"
        return self._local
