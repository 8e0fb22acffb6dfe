"""Shared set-up: one thread in torch (the machine is shared) and the helper modules of this folder importable."""

from __future__ import annotations

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(__file__))
torch.set_num_threads(1)
