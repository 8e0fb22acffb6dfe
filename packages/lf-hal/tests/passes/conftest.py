"""Lets the tests of this folder import the graphs and models of ``tests/lir``."""

import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
sys.path.insert(0, str(Path(__file__).parents[1] / "lir"))
