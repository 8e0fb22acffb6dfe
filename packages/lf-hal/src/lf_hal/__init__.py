"""One model on many machines: what devices are there, and a compiler to C with the same bits on all of them."""

from lf_hal.artifact import Artifact, load
from lf_hal.compiler import compile
from lf_hal.consistency import Run, check_consistency
from lf_hal.deterministic import check_deterministic
from lf_hal.errors import HalError
from lf_hal.evidence import CAPABILITIES, Capability, Evidence
from lf_hal.fp_guard import check_fp_state, fp_guard
from lf_hal.hardware import hardware
from lf_hal.lir import Graph, parse, to_text, verify
from lf_hal.lir.trace import trace, trace_program, weights_of
from lf_hal.passes import PassOptions, optimize
from lf_hal.placement import (
    CostTable,
    Executor,
    Link,
    Links,
    Plan,
    Pool,
    c_target,
    execute,
    place,
    plan,
    torch_device,
)
from lf_hal.precision import precision_settings
from lf_hal.probe import Choice, Probe, State, choose, probe, require
from lf_hal.profiling import Profile, profile
from lf_hal.sources import read_weights
from lf_hal.spec import DeviceSpec
from lf_hal.spec import spec as device_spec
from lf_hal.targets import TARGETS, Target, resolve_target

__all__ = [
    "CAPABILITIES",
    "TARGETS",
    "Artifact",
    "Capability",
    "Choice",
    "CostTable",
    "DeviceSpec",
    "Evidence",
    "Executor",
    "Graph",
    "HalError",
    "Link",
    "Links",
    "PassOptions",
    "Plan",
    "Pool",
    "Probe",
    "Profile",
    "Run",
    "State",
    "Target",
    "c_target",
    "check_consistency",
    "check_deterministic",
    "check_fp_state",
    "choose",
    "compile",
    "device_spec",
    "execute",
    "fp_guard",
    "hardware",
    "load",
    "optimize",
    "parse",
    "place",
    "plan",
    "precision_settings",
    "probe",
    "profile",
    "read_weights",
    "require",
    "resolve_target",
    "to_text",
    "torch_device",
    "trace",
    "trace_program",
    "verify",
    "weights_of",
]
__version__ = "0.1.0"
