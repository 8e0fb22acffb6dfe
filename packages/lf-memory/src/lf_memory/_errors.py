"""The package's errors."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Holder:
    """Who keeps a slot or range: its index, its bytes, and where it was acquired ("" outside debug mode)."""

    index: int
    nbytes: int
    site: str


class PoolTimeout(PoolError):  # noqa: N818 (named like the standard library's TimeoutError family)
    """Nothing suitable became free within the time allowed.

    Attributes:
        holders: the leases that were out at that moment.
    """

    def __init__(self, message: str, holders: tuple[Holder, ...]) -> None:
        super().__init__(message)
        self.holders = holders
