"""Deterministic, elastic data loading over io_uring: a plan, an engine and LoongDataLoader."""

from ._batch import Batch, PackedBatch
from ._errors import (
    DataError,
    EngineError,
    LoaderError,
    PlanError,
    StateError,
    TransformError,
    WorkerDied,
    WriteError,
)
from ._layout import Joined
from ._packed import PackedStats
from ._runs import BucketRuns
from ._samples import SampleBatch
from ._sinks import WriterInfo
from ._stats import LoaderInfo, LoaderStats
from .device import Backend, CudaBackend
from .engine import EngineInfo
from .loader import LoongDataLoader, plan_of
from .map_style import Collate, MapDataset, PlanSampler, Sample, collate
from .mix_plan import MixPlan
from .mixing import Mixture
from .pack_plan import PackPlan
from .packing import Packing, Varlen, pack, varlen
from .plan import BatchSpec, Plan
from .transforms import TransformContext, TransformedBatch
from .writer import Extent, FileInfo, FileWriter, WriteEngine, sync_folder

__all__ = [
    "Backend",
    "Batch",
    "BatchSpec",
    "BucketRuns",
    "Collate",
    "CudaBackend",
    "DataError",
    "EngineError",
    "EngineInfo",
    "Extent",
    "FileInfo",
    "FileWriter",
    "Joined",
    "LoaderError",
    "LoaderInfo",
    "LoaderStats",
    "LoongDataLoader",
    "MapDataset",
    "MixPlan",
    "Mixture",
    "PackPlan",
    "PackedBatch",
    "PackedStats",
    "Packing",
    "Plan",
    "PlanError",
    "PlanSampler",
    "Sample",
    "SampleBatch",
    "StateError",
    "TransformContext",
    "TransformError",
    "TransformedBatch",
    "Varlen",
    "WorkerDied",
    "WriteEngine",
    "WriteError",
    "WriterInfo",
    "collate",
    "pack",
    "plan_of",
    "sync_folder",
    "varlen",
]
__version__ = "0.1.0"
