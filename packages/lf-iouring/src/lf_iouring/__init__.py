"""Deterministic, elastic data loading over io_uring: a plan, an engine and LoongDataLoader."""

from ._batch import Batch
from ._errors import DataError, EngineError, LoaderError, PlanError, StateError
from ._runs import BucketRuns
from ._stats import LoaderInfo, LoaderStats
from .engine import EngineInfo
from .loader import LoongDataLoader, plan_of
from .map_style import Collate, MapDataset, PlanSampler, Sample, collate
from .plan import BatchSpec, Plan

__all__ = [
    "Batch",
    "BatchSpec",
    "BucketRuns",
    "Collate",
    "DataError",
    "EngineError",
    "EngineInfo",
    "LoaderError",
    "LoaderInfo",
    "LoaderStats",
    "LoongDataLoader",
    "MapDataset",
    "Plan",
    "PlanError",
    "PlanSampler",
    "Sample",
    "StateError",
    "collate",
    "plan_of",
]
__version__ = "0.1.0"
