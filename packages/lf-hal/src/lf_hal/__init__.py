"""One model on many machines: what devices are there, and a compiler to C with the same bits on all of them."""

from lf_hal.artifact import Artifact, load
from lf_hal.compiler import compile
from lf_hal.errors import HalError
from lf_hal.evidence import CAPABILITIES, Capability, Evidence
from lf_hal.fp_guard import check_fp_state, fp_guard
from lf_hal.probe import Choice, Probe, State, choose, probe, require
from lf_hal.spec import DeviceSpec
from lf_hal.spec import spec as device_spec
from lf_hal.targets import TARGETS, Target, resolve_target

__all__ = [
    "CAPABILITIES",
    "TARGETS",
    "Artifact",
    "Capability",
    "Choice",
    "DeviceSpec",
    "Evidence",
    "HalError",
    "Probe",
    "State",
    "Target",
    "check_fp_state",
    "choose",
    "compile",
    "device_spec",
    "fp_guard",
    "load",
    "probe",
    "require",
    "resolve_target",
]
__version__ = "0.1.0"
