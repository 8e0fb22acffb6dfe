"""Gradient reductions for torch.distributed: sparse rows exactly, 16 bits accurately, strongest blocks only."""

from lf_comm._ask import DisagreementError
from lf_comm._buckets import Gradient, Profile, Wire
from lf_comm._complete import UnusedParametersError
from lf_comm._cut import SizeTimes
from lf_comm._errors import CommError
from lf_comm._plan import BucketPlan, Measured, PlannedBucket, make_plan
from lf_comm._residuals import ResidualError
from lf_comm._shards import ShardError
from lf_comm._timer import BackwardTimer, OrderChangedError, ScheduleError
from lf_comm.accumulate import MicroBatch, accumulate, micro_batches
from lf_comm.cost import Load, Rates, measure_rates
from lf_comm.ddp import SparseGradReducer
from lf_comm.elastic import TORCHRUN_ENVIRONMENT, Share, share_batch, throughput_kept, torchrun_arguments
from lf_comm.faults import PeerLost, PeerWatch
from lf_comm.flat import BufferReducer
from lf_comm.hybrid import BucketReducer, HybridComm, HybridDecision, HybridReducer, hybrid_comm
from lf_comm.peer import PeerError, PeerGoneError, PeerTensors, PeerWrittenError, share_module, share_tensors
from lf_comm.reduce import AccurateReducer, accurate_all_reduce
from lf_comm.rows import Decision, Item, LayoutError, RowReducer, RowsWork, all_reduce_rows
from lf_comm.schedule import Exposed, measure_exposed, plan_buckets, supported_levers
from lf_comm.start import BackendMissingError, Feature, LoongJob, init_loong_dist
from lf_comm.topk import BlockDecision, SparseGradientReducer
from lf_comm.topo import TopologyAwareRingBuilder

__version__ = "0.1.0"

__all__ = [
    "TORCHRUN_ENVIRONMENT",
    "AccurateReducer",
    "BackendMissingError",
    "BackwardTimer",
    "BlockDecision",
    "BucketPlan",
    "BucketReducer",
    "BufferReducer",
    "CommError",
    "Decision",
    "DisagreementError",
    "Exposed",
    "Feature",
    "Gradient",
    "HybridComm",
    "HybridDecision",
    "HybridReducer",
    "Item",
    "LayoutError",
    "Load",
    "LoongJob",
    "Measured",
    "MicroBatch",
    "OrderChangedError",
    "PeerError",
    "PeerGoneError",
    "PeerLost",
    "PeerTensors",
    "PeerWatch",
    "PeerWrittenError",
    "PlannedBucket",
    "Profile",
    "Rates",
    "ResidualError",
    "RowReducer",
    "RowsWork",
    "ScheduleError",
    "ShardError",
    "Share",
    "SizeTimes",
    "SparseGradReducer",
    "SparseGradientReducer",
    "TopologyAwareRingBuilder",
    "UnusedParametersError",
    "Wire",
    "accumulate",
    "accurate_all_reduce",
    "all_reduce_rows",
    "hybrid_comm",
    "init_loong_dist",
    "make_plan",
    "measure_exposed",
    "measure_rates",
    "micro_batches",
    "plan_buckets",
    "share_batch",
    "share_module",
    "share_tensors",
    "supported_levers",
    "throughput_kept",
    "torchrun_arguments",
]
