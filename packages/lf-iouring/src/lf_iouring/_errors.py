"""The package's errors."""


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
