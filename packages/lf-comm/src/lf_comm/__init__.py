"""Exact row-sparse all-reduce for torch.distributed: any backend, the cheapest path, agreed by all ranks."""

from lf_comm._ask import DisagreementError
from lf_comm.cost import Load, Rates, measure_rates
from lf_comm.ddp import SparseGradReducer
from lf_comm.faults import PeerLost, PeerWatch
from lf_comm.reduce import AccurateReducer, accurate_all_reduce
from lf_comm.rows import Decision, Item, LayoutError, RowReducer, RowsWork, all_reduce_rows

__version__ = "0.1.0"

__all__ = [
    "AccurateReducer",
    "Decision",
    "DisagreementError",
    "Item",
    "LayoutError",
    "Load",
    "PeerLost",
    "PeerWatch",
    "Rates",
    "RowReducer",
    "RowsWork",
    "SparseGradReducer",
    "accurate_all_reduce",
    "all_reduce_rows",
    "measure_rates",
]
