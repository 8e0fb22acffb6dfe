"""One model on many machines: what devices are there, and a compiler to C with the same bits on all of them."""

from lf_hal.errors import HalError
from lf_hal.evidence import CAPABILITIES, Capability, Evidence
from lf_hal.targets import TARGETS, Target, resolve_target

__all__ = ["CAPABILITIES", "TARGETS", "Capability", "Evidence", "HalError", "Target", "resolve_target"]
__version__ = "0.1.0"
