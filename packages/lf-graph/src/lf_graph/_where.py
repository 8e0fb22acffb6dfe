"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_SKIP = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def user_line() -> str:
    """``file:line`` of the innermost frame outside torch and this package; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_SKIP, "<")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
