"""The error of the gradient half."""

from .._errors import PoolError


class PlanError(PoolError):
    """A backward pass cannot be planned, or a plan cannot be used; the message names the cause and the fix.

    Attributes:
        path: the file a plan was read from, or None.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path
