"""Gradient memory: predict it, check the prediction, lay it out. Needs torch: pip install lf-memory[torch]."""

from ._arena import ArenaStats, Bucket, GradientArena
from ._errors import PlanError
from ._measure import Measured
from ._offload import Offload, offload
from ._offload_stats import OffloadStats
from ._plan import GRADIENTS, Lifetime, Placement, Plan, Slots
from ._policy import Mode, Policy
from ._predict import predict
from ._release import ReleaseHandle, release
from ._release_errors import ReleaseError
from ._release_stats import ReleaseStats
from ._store import read_plan, write_plan
from ._verify import Verification, verify

__all__ = [
    "GRADIENTS",
    "ArenaStats",
    "Bucket",
    "GradientArena",
    "Lifetime",
    "Measured",
    "Mode",
    "Offload",
    "OffloadStats",
    "Placement",
    "Plan",
    "PlanError",
    "Policy",
    "ReleaseError",
    "ReleaseHandle",
    "ReleaseStats",
    "Slots",
    "Verification",
    "offload",
    "predict",
    "read_plan",
    "release",
    "verify",
    "write_plan",
]
