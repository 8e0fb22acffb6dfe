"""What lf-hal raises. Every error derives from :class:`HalError`, carries its data, and says what to do."""

__all__ = ["HalError"]


class HalError(Exception):
    """Base class of all errors of lf-hal."""
