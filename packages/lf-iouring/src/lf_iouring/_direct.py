"""Through the page cache or past it: the choice, and the descriptors that go with it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._errors import EngineError

IO_CHOICES = ("auto", "mapped", "buffered", "direct")

# Of the memory; the trainer, its pools and the page tables need the rest.
_CACHE_SHARE = 0.7
# A mapping counts as memory of the process where it is resident, so it stays a small part.
_MAPPED_SHARE = 0.25
_FIX = "use io='auto' or io='buffered'"


@dataclass(frozen=True)
class Decision:
    """How pages get to the engine: "mapped", "buffered" or "direct"; and why."""

    io: str
    reason: str


@dataclass(frozen=True)
class Files:
    """The files of a data set: descriptors, paths, and O_DIRECT descriptors or none.

    Attributes:
        fds: the data set's own.
        paths: name of each.
        direct: a second descriptor of each, owned by this object; empty for buffered reads.
        size: bytes of all files.
        span: bytes of the longest extent.
    """

    fds: tuple[int, ...]
    paths: tuple[str, ...]
    size: int
    span: int
    direct: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the second descriptors."""
        for fd in self.direct:
            os.close(fd)


def decide(io: str, size: int, memory: int, engine: str) -> Decision:
    """Mappings for a data set that memory holds easily, direct reads for one that the page cache cannot hold.

    Args:
        io: one of IO_CHOICES.
        size: bytes of the data set.
        memory: bytes of memory this process may use.
        engine: the engine that reads.

    Raises EngineError for an unknown `io`.
    """
    if io not in IO_CHOICES:
        raise EngineError(f"io={io!r}: choose one of {', '.join(IO_CHOICES)}")
    if io != "auto":
        return Decision(io, "asked for by name")
    sizes = f"{size / 2**30:.2f} GiB of data, {memory / 2**30:.2f} GiB of memory"
    if size <= memory * _MAPPED_SHARE:
        return Decision("mapped", f"{sizes}: it may stay in memory")
    if size <= memory * _CACHE_SHARE:
        return Decision("buffered", f"{sizes}: the page cache can hold it")
    if engine != "io_uring":
        return Decision(
            "buffered", f"{sizes}: too much for the page cache, but direct reads need a ring's depth"
        )
    return Decision("direct", f"{sizes}: too much for the page cache")


def files_of(dataset: Any) -> Files:
    """The files behind an lf-format data set."""
    readers = dataset.readers
    fds = tuple(int(reader.fileno()) for reader in readers)
    size = sum(os.fstat(fd).st_size for fd in fds)
    span = max(_span(reader) for reader in readers)
    return Files(fds, tuple(str(reader.path) for reader in readers), size, span)


def _span(reader: Any) -> int:
    """Bytes of the longest read of one file: a field of a record, or a coded block."""
    index = reader.opened.index
    longest: int = max(field.nbytes_of(reader.longest(field.name)) for field in reader.fields)
    return max(longest, int(index.block_stored[index.block_codec != 0].max(initial=0)))


def memory_limit() -> int:
    """Bytes of memory of this machine, or of this process's cgroup where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def refused(path: str, why: str) -> EngineError:
    """The error for direct reads by name that a file system does not grant."""
    return EngineError(f"io='direct' cannot be had: {path}: {why}; {_FIX}")
