"""Placement: where the ops of a graph run in a pool of mixed devices. problem.py has the model, solve.py the search."""

from lf_hal.placement.costs import Cost, CostTable, signature
from lf_hal.placement.execute import CopyRun, Execution, Executor, Report, SegmentRun, execute
from lf_hal.placement.planning import plan
from lf_hal.placement.plans import Copy, Plan, Segment, digest_of
from lf_hal.placement.pool import HOST, Device, Link, Links, Pool, c_target, torch_device
from lf_hal.placement.runners import CRunner, Runner, TorchRunner
from lf_hal.placement.training import EdgeCopies, Placed, TrainingReport, place

__all__ = [
    "HOST",
    "CRunner",
    "Copy",
    "CopyRun",
    "Cost",
    "CostTable",
    "Device",
    "EdgeCopies",
    "Execution",
    "Executor",
    "Link",
    "Links",
    "Placed",
    "Plan",
    "Pool",
    "Report",
    "Runner",
    "Segment",
    "SegmentRun",
    "TorchRunner",
    "TrainingReport",
    "c_target",
    "digest_of",
    "execute",
    "place",
    "plan",
    "signature",
    "torch_device",
]
