"""The dtypes of the format that this torch has: older ones lack some of the eight-bit floats."""

import lf_ckpt
from lf_ckpt.dtypes import dtype_of


def has(name: str) -> bool:
    """Whether torch knows a dtype of the format."""
    try:
        dtype_of(name)
    except lf_ckpt.UnsupportedError:
        return False
    return True


KNOWN = tuple(name for name in lf_ckpt.DTYPES if has(name))
