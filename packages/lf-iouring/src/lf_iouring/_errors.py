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


class TransformError(LoaderError):
    """A transform raised, or returned what was not declared; asking for the batch again tries again.

    Attributes:
        step: of the batch.
        text: traceback, of the worker process where there is one.
    """

    def __init__(self, step: int, text: str) -> None:
        super().__init__(f"the transform of step {step} failed:\n{text}")
        self.step, self.text = step, text

    def __reduce__(self) -> tuple[object, ...]:
        return TransformError, (self.step, self.text)


class WorkerDied(LoaderError):  # noqa: N818 - the name says what happened
    """A transform worker ended by itself; asking for the batch again starts new workers.

    Attributes:
        pid: of the process.
        exitcode: its exit code, -N for signal N, None if unknown.
        steps: batches that the workers had, ascending.
    """

    def __init__(self, pid: int, exitcode: int | None, steps: list[int]) -> None:
        how = f"ended with exit code {exitcode}"
        if exitcode is not None and exitcode < 0:
            how = f"was killed by signal {-exitcode}"
        super().__init__(
            f"transform worker {pid} {how}; steps {steps} were under way. See its stderr; a script that makes "
            "a loader with workers needs the guard if __name__ == '__main__', and signal 9 may be the kernel "
            "short of memory"
        )
        self.pid, self.exitcode, self.steps = pid, exitcode, steps

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerDied, (self.pid, self.exitcode, self.steps)


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
