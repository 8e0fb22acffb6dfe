"""Which devices can be used here, and why the others cannot."""

from lf_hal.probe._patched import patched_cuda
from lf_hal.probe._run import probe
from lf_hal.probe._select import Choice, Devices, choose, parse_device, require
from lf_hal.probe._types import BACKENDS, Backend, Probe, State

__all__ = [
    "BACKENDS",
    "Backend",
    "Choice",
    "Devices",
    "Probe",
    "State",
    "choose",
    "parse_device",
    "patched_cuda",
    "probe",
    "require",
]
