"""The package's errors."""


class PoolError(Exception):
    """A pool cannot do what was asked; the message names the cause and, where there is one, the fix.

    Attributes:
        needed: bytes the request needs, or None when size is not the cause.
        available: bytes that are there, or None when unknown.
    """

    def __init__(self, message: str, *, needed: int | None = None, available: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class PoolTimeout(PoolError):  # noqa: N818 (named like the standard library's TimeoutError family)
    """No slot became free within the time allowed."""
