"""Where the bytes of one data file go: short runs through the page cache, long ones past it by an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .codec import Bytes
from .crew import Crew
from .engines import Engine, Ring, RingEngine, ThreadEngine, find_ring, require_ring
from .errors import CkptError
from .format import ALIGN, EXTENT_BYTES
from .options import Options
from .priority import lower_priority
from .rate import Throttle
from .slab import Slab
from .storage import Buffer, Storage

_log = logging.getLogger("lf_ckpt")
# A direct write waits for the disk: worth it for long runs, while small tensors are gathered by the page cache.
LONG_BYTES = EXTENT_BYTES


class Sink:
    """An open, empty data file. One thread calls it; `close` always, after an error too."""

    def __init__(
        self,
        files: Storage,
        fds: Sequence[int],
        engine: Engine | None = None,
        note: str = "buffered, by the calling thread",
        throttle: Throttle | None = None,
    ) -> None:
        """fds: the first is the file through the page cache; all are closed with the sink. engine: for long runs."""
        self._files, self._fds, self._engine, self._throttle = files, list(fds), engine, throttle
        self._note = note

    @property
    def note(self) -> str:
        """How it is written and why."""
        return self._note + (", in part buffered: refused" if self._engine and self._engine.refused else "")

    def put(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write at once, through the page cache."""
        self._pace(sum(len(buffer) for buffer in buffers))
        self._files.write(self._fds[0], buffers, offset)

    def submit(self, memory: Bytes, offset: int, landed: Callable[[], None]) -> None:
        """Begin to write whole 4 KiB blocks from page-aligned memory, which is free again when `landed` is called."""
        if self._engine is None or memory.size < LONG_BYTES:
            self.put([memory.data], offset)
            landed()
            return
        self._pace(memory.size)
        self._engine.submit(memory, offset, landed)

    def relieve(self) -> None:
        """Before waiting for more to be staged: staging may be waiting for memory that is still to be written."""
        if self._engine is not None:
            self._engine.relieve()

    def flush(self) -> None:
        """Return when every byte is with the kernel; raises the first error."""
        if self._engine is not None:
            self._engine.flush()

    def sync(self) -> None:
        """Make the file durable; only after `flush`."""
        self._files.sync(self._fds[0])

    def close(self) -> None:
        """Wait until no memory is in use and close the descriptors."""
        if self._engine is not None:
            self._engine.close()
        with ExitStack() as stack:  # the others too when one fails
            while self._fds:
                stack.callback(self._files.close, self._fds.pop(0))

    def _pace(self, count: int) -> None:
        if self._throttle is not None:
            self._throttle.take(count)


class Writing:
    """How a store writes its data files, for its life: the engine, its threads, their priority and the rate limit."""

    def __init__(self, files: Storage, options: Options) -> None:
        """CkptError for an engine that was asked for and cannot be had."""
        self._files, self._options = files, options
        self._ring, self._why_not = _choose_ring(files, options)
        self.priority_note = ""
        self._pool = Crew(options.writers, "lf-ckpt-pwrite", self.settle_thread)
        self._throttle = Throttle(options.rate_limit) if options.rate_limit is not None else None

    def settle_thread(self) -> None:
        """Lower the calling background thread, as the options say; once per thread."""
        if self._options.priority == "normal":
            self.priority_note = "normal, as asked"
            return
        self.priority_note = lower_priority()

    def open(self, path: str, slab: Slab, state_bytes: int) -> Sink:
        """Create the data file `path`; no trace of it when that fails. RuntimeError where no thread can be started."""
        self._pool.start()
        fds = [self._files.create(path)]
        try:
            engine, note = self._engine(path, slab, state_bytes, fds)
        except BaseException:
            for fd in fds:
                self._files.close(fd)
            self._files.unlink(path)
            raise
        return Sink(self._files, fds, engine, note, self._throttle)

    def let_go(self) -> None:
        """Keep nothing of a slab that is about to be freed; only between saves."""
        if self._ring is not None:
            self._ring.close()

    def close(self) -> None:
        """End the threads and the ring; after the last save."""
        self._pool.shutdown(wait=True)
        self.let_go()

    def _engine(self, path: str, slab: Slab, state_bytes: int, fds: list[int]) -> tuple[Engine | None, str]:
        limit = f", at most {self._options.rate_limit} bytes/s" if self._options.rate_limit else ""
        threads = f"{self._options.writers} threads"
        direct, refusal = self._open_direct(path, slab)
        if self._files.traits.whole:
            return None, f"one stream, {self._files.traits.why}{limit}"
        if direct is None:
            note = f"buffered, {refusal}; {threads}{limit}"
            return ThreadEngine(self._files, self._pool, fds[0], None), note
        fds.append(direct)
        why_not = self._why_not
        if self._ring is not None:
            writer, how = self._ring.file(path, slab.array)
            if writer is not None:
                budget = slab.size // 4 if state_bytes > slab.size else None
                return RingEngine(writer, budget), f"direct; {how}{limit}"
            self._refuse_if_asked(path, how)
            why_not = how
        engine = ThreadEngine(self._files, self._pool, direct, fds[0])
        return engine, f"direct; {threads} ({why_not}){limit}"

    def _open_direct(self, path: str, slab: Slab) -> tuple[int | None, str]:
        """(descriptor past the page cache, "") or (None, why it is not used); CkptError when it was asked for."""
        if self._options.io == "buffered":
            return None, "as asked"
        if slab.array.ctypes.data % ALIGN:
            direct, refusal = None, "the slab is not page-aligned"
        else:
            direct = self._files.open_direct(path)
            shared = self._files.traits.shared
            refusal = self._files.traits.why if shared else "the file system refuses O_DIRECT"
        if direct is None:
            self._refuse_if_asked(path, refusal)
        return direct, refusal

    def _refuse_if_asked(self, path: str, refusal: str) -> None:
        """CkptError when the options name what this file system does not have."""
        for name, value, asked in (
            ("io", self._options.io, "direct"),
            ("engine", self._options.engine, "io_uring"),
        ):
            if value == asked and not (name == "io" and "lf-iouring" in refusal):
                raise CkptError(
                    f"{os.path.dirname(path)}: {name}={value!r} cannot be had: {refusal}; use {name}='auto'"
                )


def _choose_ring(files: Storage, options: Options) -> tuple[Ring | None, str]:
    if options.engine == "threads":
        return None, "as asked"
    if options.engine == "io_uring":
        if options.io == "buffered":
            raise CkptError("engine='io_uring' writes past the page cache; io='buffered' contradicts it")
        return require_ring(files), ""
    return find_ring(files)
