"""Set-up of the kernel tests. The conftest.py above has put Triton in its interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
pytest.importorskip("triton", reason="the kernel tests need triton: pip install lf-graph[triton]")
