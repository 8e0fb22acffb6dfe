"""Environment of processes that tests start: they import what lies beside the tests, and what the parent could."""

import os
from pathlib import Path

HERE = str(Path(__file__).parent)


def child_env(**more):
    """The parent's environment with this folder first on PYTHONPATH, and `more`."""
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path} | more
