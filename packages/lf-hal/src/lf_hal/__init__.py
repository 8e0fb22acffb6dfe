"""One model on many machines: what devices are there, and a compiler to C with the same bits on all of them."""

from lf_hal.errors import HalError

__all__ = ["HalError"]
__version__ = "0.1.0"
