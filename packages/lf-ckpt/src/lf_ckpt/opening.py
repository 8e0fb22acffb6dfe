"""`open`: the options of a store, one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .options import (
    GROUP_TIMEOUT,
    Compress,
    Engine,
    Io,
    OnError,
    Options,
    ParentMode,
    Priority,
    has_patience,
)
from .retention import Rule
from .storage import Mode, Storage
from .store import OPENING, Store
from .upload import Upload
from .voting import telling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open(
    path: str | os.PathLike[str],
    *,
    keep: Rule | Sequence[Rule] = (),
    on_error: OnError = "raise",
    full_every: int = 8,
    slab_bytes: int | None = None,
    compress: Compress = "auto",
    parent: ParentMode = "auto",
    parent_bytes: int | None = None,
    io: Io = "auto",
    threads: int = 1,
    read_only: bool = False,
    mode: Mode = "auto",
    engine: Engine = "auto",
    writers: int = 4,
    priority: Priority = "low",
    rate_limit: int | None = None,
    expected_bytes: int | None = None,
    upload: str | os.PathLike[str] | Upload | None = None,
    group: ProcessGroup | None = None,
    group_timeout: float = GROUP_TIMEOUT,
    files: Storage | None = None,
) -> Store:
    """Open the store at `path`, made if missing, as its one writer (or as one of many readers).

    keep: a retention rule, or several joined with "or"; none keeps every step.
    on_error: what a failed background save does at the next call: raise, or log a warning.
    full_every: a new base after that many deltas; 0 saves full steps only.
    slab_bytes: staging memory. None takes what the state needs, up to a quarter of free memory. With less than the
        state `save` waits for the disk while it copies.
    compress: "auto" samples which codec pays, also against the base; "raw" never compresses, "zstd" tries every byte
        plane; these two share unchanged extents only.
    parent: where the base's bytes come from that changed extents are coded against. "auto" keeps them in memory, up to
        `parent_bytes` (a quarter of free memory when None), and reads the rest back; "ram" keeps all or raises
        CkptError at the save; "disk" keeps none; "off" codes nothing against the base.
    io: "auto" writes long runs with O_DIRECT where the file system allows it, "buffered" never does, "direct" raises
        where it cannot.
    threads: threads that hash and compress.
    engine: "io_uring" (lf-iouring), "threads" (`writers` of them), or "auto", the first where it can be had;
        `SaveReport.io` says which and why. CkptError for an engine that cannot be had.
    priority: "low" gives the background threads nice 10 and the last place in the I/O queue; "normal" leaves them.
    rate_limit: bytes per second that saves may write at most.
    expected_bytes: size of the state; its slab is then made, and page-locked, in the background at once.
    mode: "local" relies on rename, O_DIRECT and directory fsync; "shared" (NFS, Lustre, FUSE) on none of them; "auto"
        looks at the type of the file system. `Store.info` says what was chosen and why.
    upload: a path or URL to which durable steps are copied in the background, or an `Upload` with more to say.
        Retention here waits for it; what fails is reported as `on_error` says, and the next writer goes on with it.
    group: the torch.distributed group whose ranks write the store together, opened by all of them; rank 0 holds the
        lock and commits. A Gloo group of the same ranks is made for it, so that saves never mix with the collectives
        of training. group_timeout: seconds until a silent rank counts as lost; one that died is noticed at once.
    files: the file layer, for tests and other storage.
    Raises LockedError, CkptError (cannot be written, or no store with read_only) and CorruptError (damaged FORMAT).
    """
    patience = group_timeout if has_patience(group_timeout) else GROUP_TIMEOUT
    with telling(group, patience, OPENING[bool(read_only)]):
        options = Options(
            keep=(keep,) if hasattr(keep, "wanted") else tuple(keep),  # a rule alone is a list of one
            on_error=on_error,
            full_every=full_every,
            slab_bytes=slab_bytes,
            compress=compress,
            parent=parent,
            parent_bytes=parent_bytes,
            io=io,
            threads=threads,
            read_only=read_only,
            mode=mode,
            engine=engine,
            writers=writers,
            priority=priority,
            rate_limit=rate_limit,
            expected_bytes=expected_bytes,
            upload=Upload(upload) if isinstance(upload, str | os.PathLike) else upload,
            group_timeout=group_timeout,
        )
    return Store(path, options, files, group)
