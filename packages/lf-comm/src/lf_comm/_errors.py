"""The base of what lf-comm raises."""


class CommError(Exception):
    """Base class of all errors of lf-comm; each is also the built-in error that it is a kind of."""
