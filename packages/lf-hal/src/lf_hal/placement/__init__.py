"""Placement: where the ops of a graph run in a pool of mixed devices. problem.py has the model, solve.py the search."""

from lf_hal.placement.costs import Cost, CostTable, signature
from lf_hal.placement.execute import CopyRun, Execution, Executor, Report, SegmentRun, execute
from lf_hal.placement.planning import plan
from lf_hal.placement.plans import Copy, Plan, Segment, digest_of
from lf_hal.placement.pool import HOST, Device, Link, Links, Pool, c_target, torch_device
from lf_hal.placement.runners import CRunner, Runner, TorchRunner

__all__ = [
    "HOST",
    "CRunner",
    "Copy",
    "CopyRun",
    "Cost",
    "CostTable",
    "Device",
    "Execution",
    "Executor",
    "Link",
    "Links",
    "Plan",
    "Pool",
    "Report",
    "Runner",
    "Segment",
    "SegmentRun",
    "TorchRunner",
    "c_target",
    "digest_of",
    "execute",
    "plan",
    "signature",
    "torch_device",
]
