"""The package's errors."""

import inspect

from lf_hal import errors


def test_every_error_derives_from_the_base_class() -> None:
    found = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e.__module__ == errors.__name__]
    assert errors.HalError in found
    assert all(issubclass(e, errors.HalError) for e in found)
