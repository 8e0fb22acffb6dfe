"""Page-locking for an accelerator, by whoever knows the accelerator."""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from ._errors import PoolError

LOCK_BYTES = 1 << 30  # of one registration: a refusal comes early, and what is undone is small
_PORTABLE = 1  # cudaHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE: locked for every device


@runtime_checkable
class Registrar(Protocol):
    """Locks host memory for a device; made by the caller, who knows which device.

    A range is registered once: a second `register` of it, and an `unregister` of what is not registered, raise
    PoolError. `unregister` may be called from any thread.
    """

    def register(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` from `address`, a page boundary; PoolError naming the device's error if refused."""

    def unregister(self, address: int) -> None:
        """Undo `register`; returns when the device no longer uses the pages."""


class TorchRegistrar:
    """Through torch's CUDA runtime; memory then counts as pinned for torch copies.

    Raises PoolError if torch is missing or sees no CUDA device.
    """

    def __init__(self) -> None:
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise PoolError(f"page-locking through torch: {error}; pip install torch") from error
        if not torch.cuda.is_available():
            raise PoolError("page-locking through torch: torch.cuda.is_available() is False on this machine")
        self._runtime: Any = torch.cuda.cudart()

    def register(self, address: int, nbytes: int) -> None:
        """See Registrar."""
        self._check("cudaHostRegister", self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See Registrar."""
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(address))

    def _check(self, call: str, result: Any) -> None:
        if int(result) != 0:
            raise PoolError(f"{call}: {self._runtime.cudaGetErrorString(result)} ({int(result)})")


class CudaRegistrar:
    """Through the CUDA driver, libcuda.so.1, found at run time; needs no torch.

    Args:
        device: number of the device whose primary context does the work.

    Raises PoolError if there is no driver or no such device.
    """

    def __init__(self, device: int = 0, library: str = "libcuda.so.1") -> None:
        try:
            self._driver: Any = ctypes.CDLL(library)
        except OSError as error:
            raise PoolError(f"page-locking: no CUDA driver ({error})") from error
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def register(self, address: int, nbytes: int) -> None:
        """See Registrar."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(address),
                ctypes.c_size_t(nbytes),
                ctypes.c_uint(_PORTABLE),
            )
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def unregister(self, address: int) -> None:
        """See Registrar."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: Any) -> None:
        code = int(getattr(self._driver, name)(*args))
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(code, ctypes.byref(text))
        raise PoolError(f"{name}: {(text.value or b'an error without a name').decode()} ({code})")


def pieces(start: int, nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
    """Cut a range into (start, nbytes) of whole units, each at most LOCK_BYTES or one unit.

    CUDA wants a copy's host range "entirely registered" and does not say that two registrations may share it, so
    what one copy may span lies in one piece.
    """
    step = max(LOCK_BYTES // unit, 1) * unit
    for at in range(start, start + nbytes, step):
        yield at, min(step, start + nbytes - at)


def lock(registrar: Registrar, address: int, nbytes: int) -> Callable[[], None]:
    """Register a range; returns what undoes it, once, and only in this process.

    Raises PoolError for an object that is no registrar, and for what the registrar raises.
    """
    given: object = registrar
    if not isinstance(given, Registrar):
        name = type(registrar).__name__
        raise PoolError(f"pin= needs register(address, nbytes) and unregister(address); {name} has not both")
    try:
        registrar.register(address, nbytes)
    except PoolError as error:
        raise PoolError(f"{nbytes} bytes could not be page-locked: {error}", needed=nbytes) from error
    once, pid = threading.Lock(), os.getpid()

    def unlock() -> None:
        # A forked child has the pages, but neither the device nor the registration.
        if os.getpid() == pid and once.acquire(blocking=False):
            registrar.unregister(address)

    return unlock
