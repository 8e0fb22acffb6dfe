"""Lets the tests of this folder import the graphs and models of ``tests/lir``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lir"))
