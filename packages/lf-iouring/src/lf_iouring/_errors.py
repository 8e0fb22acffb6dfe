"""The package's errors."""

import errno
import os


class LoaderError(Exception):
    """Base of every error of lf-iouring; the message says what to do."""


class PlanError(LoaderError):
    """The order of the records cannot be computed from these arguments."""


class StateError(LoaderError):
    """A saved position does not belong to this data set or plan, or comes too late.

    Attributes:
        differs: what differs, as {name: (saved, here)}; empty when the shape of the state is wrong.
    """

    def __init__(self, message: str, differs: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(message)
        self.differs = differs or {}


class EngineError(LoaderError):
    """An engine that was asked for by name cannot be had, or is closed."""


class DataError(LoaderError):
    """A record could not be read as it was written.

    Attributes:
        path: file.
        record: id of the record in the data set.
        offset: byte of the file where the extent starts.
        expected, found: what the index promises and what was there (hash, bytes or errno, as text).
    """

    def __init__(self, path: str, record: int, offset: int, expected: str, found: str) -> None:
        super().__init__(f"{path}: record {record} at byte {offset}: expected {expected}, found {found}")
        self.path = path
        self.record = record
        self.offset = offset
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:
        return DataError, (self.path, self.record, self.offset, self.expected, self.found)


_WRITE_FIXES = {
    errno.ENOSPC: "free space on its file system, or write elsewhere",
    errno.EDQUOT: "the quota of this user or group is used up: free space or have it raised",
    errno.EFBIG: "raise RLIMIT_FSIZE (ulimit -f); the file system may have a limit of its own",
    errno.EIO: "the device failed; the kernel log says more. Do not trust the file, write elsewhere",
    errno.EROFS: "the file system is mounted read-only: remount it, or write elsewhere",
    errno.EACCES: "this user may not write there: change the mode, or write elsewhere",
    errno.ENOENT: "its folder does not exist: make it first",
    errno.EMFILE: "too few descriptors: raise ulimit -n",
}


class WriteError(LoaderError, OSError):
    """A file could not be written; also an OSError, with `errno` and `filename`.

    Attributes:
        path: file.
        offset: byte of the file where it failed, None where no offset is concerned.
        operation: "open", "reserve", "write", "truncate", "fdatasync", "fsync" or "close".
        errno: of the operating system.
    """

    def __init__(self, path: str, operation: str, code: int, offset: int | None = None) -> None:
        OSError.__init__(self, code, os.strerror(code), path)
        self.path = path
        self.operation = operation
        self.offset = offset

    def __str__(self) -> str:
        code = self.errno or 0
        name = errno.errorcode.get(code, str(code))
        where = "" if self.offset is None else f" at byte {self.offset}"
        fix = _WRITE_FIXES.get(code, f"see errno(3) for {name}")
        return f"{self.path}: {self.operation}{where} failed: {name} {self.strerror}: {fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return WriteError, (self.path, self.operation, self.errno, self.offset)
