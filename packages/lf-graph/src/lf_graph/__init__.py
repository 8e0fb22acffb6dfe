"""Training steps as CUDA graphs, captured in pieces and checked before capture."""

from __future__ import annotations

import importlib
from typing import Any

from lf_graph._adamw import Launch
from lf_graph._bucket_stats import BucketsStats, BucketStats
from lf_graph._buckets import Buckets
from lf_graph._capture import Captured, capture
from lf_graph._chain import Chain
from lf_graph._check import check
from lf_graph._edges import Edge
from lf_graph._elements import Eager
from lf_graph._errors import (
    AddressError,
    BudgetError,
    ClosedError,
    GraphCaptureError,
    GraphError,
    NotTunedError,
    ShardedParameterError,
    SignatureError,
    StaleReplayError,
)
from lf_graph._findings import Finding, Report
from lf_graph._flat import OptimizerError
from lf_graph._mask import BlockSparse, Causal, DynamicMaskBuffer, Full
from lf_graph._moe import MoE, MoEOutput
from lf_graph._moe_host import HostRoutedMoE, HostRouting
from lf_graph._partition import Partition, partition
from lf_graph._pool import GraphPool
from lf_graph._recipes import shard_block
from lf_graph._reduce import AllReduce
from lf_graph._registry import close, stats
from lf_graph._segment import Piece
from lf_graph._specs import Spec, merge
from lf_graph._stats import GraphStats
from lf_graph._step_result import StepResult
from lf_graph._train_step import TrainStep
from lf_graph._uses import ParameterUse, parameter_uses

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "AllReduce",
    "BlockSparse",
    "BucketStats",
    "Buckets",
    "BucketsStats",
    "BudgetError",
    "Captured",
    "Causal",
    "Chain",
    "ClosedError",
    "DynamicMaskBuffer",
    "Eager",
    "Edge",
    "Finding",
    "Full",
    "GraphCaptureError",
    "GraphError",
    "GraphPool",
    "GraphStats",
    "HostRoutedMoE",
    "HostRouting",
    "Launch",
    "MoE",
    "MoEOutput",
    "NotTunedError",
    "OptimizerError",
    "ParameterUse",
    "Partition",
    "Piece",
    "Report",
    "ShardedParameterError",
    "SignatureError",
    "Spec",
    "StaleReplayError",
    "StepResult",
    "TrainStep",
    "capture",
    "check",
    "close",
    "merge",
    "parameter_uses",
    "partition",
    "shard_block",
    "stats",
]


def __getattr__(name: str) -> Any:
    """``lf_graph.tune`` and ``lf_graph.kernels`` are imported when they are first asked for."""
    if name in ("kernels", "tune"):
        return importlib.import_module(f"lf_graph.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
