"""Runs alone in a fresh interpreter: tries one backend and tells each step over a pipe.

Only the standard library is imported before the backend is, and nothing of lf-hal, so that what happens here (a crash,
a loop, a patched torch) happens to this process alone. Each line on the pipe is one JSON object: {"stage": ...} before
a step, {"fact": ...} when something was learned, {"end": ...} last. What a package prints goes elsewhere.

    python -P _child.py BACKEND FD
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(
    os.environ.get("LOONGFORGE_PROBE_ROOT", "/")
)  # tests put a /dev and a /proc of their own below it
_CUDA_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CUDA_ERRORS = {
    3: "the driver is not initialised",
    100: "no device is visible",
    802: "the system is not ready yet (fabric manager)",
    803: "driver and libcuda.so.1 are of different versions",
    804: "forward compatibility is not supported on this GPU",
    999: "unknown error; look at dmesg",
}


class StopError(Exception):
    """Ends a probe with a state, a reason and a fix."""

    def __init__(self, state: str, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.state, self.reason, self.fix = state, reason, fix


class Pipe:
    """The way back to the parent."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, **message: Any) -> None:
        """One line, written at once: the next step may be the last."""
        os.write(self.fd, json.dumps(message).encode() + b"\n")

    def stage(self, name: str) -> None:
        """What is tried next."""
        self.send(stage=name)

    def fact(self, key: str, value: Any) -> None:
        """Something learned: versions, devices, notes."""
        self.send(fact=key, value=value)


def _version(pipe: Pipe, package: str) -> str | None:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    pipe.fact("version", [package, found])
    return found


def _nodes(pattern: str) -> int:
    return len(list(ROOT.glob(pattern)))


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def cpu(pipe: Pipe) -> list[str]:
    """Ready unless numpy cannot run here (built for another instruction set)."""
    pipe.stage("import numpy")
    numpy = importlib.import_module("numpy")
    _version(pipe, "numpy")
    pipe.stage("multiply")
    if float(numpy.full(64, 2.0, "float32") @ numpy.full(64, 0.5, "float32")) != 64.0:
        raise StopError(
            "installed_unusable", "numpy multiplies wrongly", "install numpy again for this machine"
        )
    pipe.stage("name")
    text = (ROOT / "proc/cpuinfo").read_text(errors="replace") if (ROOT / "proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return [model[1].strip() if model else os.uname().machine]


def cuda(pipe: Pipe) -> list[str]:
    """The driver first, by its own library; torch only where the driver sees a GPU."""
    pipe.stage("driver")
    cards = _nodes("proc/driver/nvidia/gpus/*") or _nodes("dev/nvidia[0-9]*")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if not cards:
            raise StopError("absent", f"no NVIDIA driver: {error}", "install the NVIDIA driver") from None
        fix = "in a container, run with the NVIDIA runtime; on a host, install the driver's user libraries"
        raise StopError("installed_unusable", f"{cards} GPUs are there, but {error}", fix) from None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
        pipe.fact("version", ["cuda driver", f"{number.value // 1000}.{number.value % 1000 // 10}"])
    pipe.stage("cuInit")
    status = driver.cuInit(0)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if status not in (0, _CUDA_NO_DEVICE):
        why = _CUDA_ERRORS.get(status, "see cuda.h")
        raise StopError(
            "installed_unusable", f"cuInit returned {status}: {why}", "look at nvidia-smi and dmesg"
        )
    if status == 0:
        driver.cuDeviceGetCount(ctypes.byref(number))
    if status == _CUDA_NO_DEVICE or number.value == 0:
        _hidden("CUDA_VISIBLE_DEVICES", hidden, cards, "GPU", status == _CUDA_NO_DEVICE)
    names = []
    for index in range(number.value):
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(text, 256, device)
        names.append(text.value.decode(errors="replace"))
    _torch(pipe, f"the driver sees {len(names)} GPUs, but torch is not installed")
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise StopError(
            "installed_unusable",
            f"the driver sees {len(names)} GPUs, but torch {torch.__version__} is built without CUDA",
            "install a CUDA build of torch",
        )
    pipe.fact("version", ["torch cuda", torch.version.cuda])
    pipe.stage("torch.cuda")
    count = torch.cuda.device_count()
    if count != len(names):
        raise StopError("installed_unusable", f"the driver sees {len(names)} GPUs, torch {count}")
    torch.ones(1, device="cuda:0").add_(1).cpu()
    return names


def _hidden(variable: str, value: str | None, cards: int, what: str, no_device: bool) -> None:
    if value is not None:
        there = f"{cards} {what}s are there, and" if cards else "no device is visible:"
        reason = f"{there} {variable}={value!r} hides them"
        raise StopError("invisible", reason, f"unset {variable}, or name a device that is there")
    if cards:
        raise StopError(
            "invisible", f"{cards} {what}s are there, and none may be used", "check the rights on /dev"
        )
    state = "absent" if no_device else "installed_unusable"
    raise StopError(
        state, f"the software is installed, and there is no {what}", f"look whether a {what} is seated"
    )


def _torch(pipe: Pipe, without: str) -> str:
    pipe.stage("import torch")
    if not _has("torch"):
        raise StopError("installed_unusable", without, "install torch")
    importlib.import_module("torch")
    return _version(pipe, "torch") or ""


def _vendor(
    pipe: Pipe, *, package: str, kind: str, nodes: str, variable: str, sdk: Callable[[Pipe], None]
) -> list[str]:
    """torch_npu and torch_mlu are of one shape: a torch extension over an SDK over a driver."""
    pipe.stage("package")
    cards = _nodes(nodes)
    if not _has(package):
        if cards:
            reason = f"{cards} {kind} devices are there, but {package} is not installed"
            raise StopError("installed_unusable", reason, f"install {package} for this torch")
        raise StopError(
            "absent", f"{package} is not installed, and there is no device node", f"install {package}"
        )
    _version(pipe, package)
    pipe.stage("sdk")
    sdk(pipe)
    _torch(pipe, f"{package} is installed, but torch is not")
    pipe.stage(f"import {package}")
    importlib.import_module(package)
    torch = importlib.import_module("torch")
    patched = torch.cuda.is_available.__module__
    if not patched.startswith("torch.cuda"):
        pipe.fact(
            "note",
            f"{package} patches torch.cuda (is_available is of {patched}): it speaks of {kind} devices",
        )
    pipe.stage(f"torch.{kind}.device_count")
    module = getattr(torch, kind)
    count = int(module.device_count())
    if count == 0:
        _hidden(variable, os.environ.get(variable), cards, kind, False)
    pipe.stage(f"torch.{kind}.get_device_name")
    return [str(module.get_device_name(index)) for index in range(count)]


def _cann(pipe: Pipe) -> None:
    """The versions of the driver and of CANN, from the files that their installers leave."""
    driver = re.search(r"^Version\s*=\s*(\S+)", _text(ROOT / "usr/local/Ascend/driver/version.info"), re.M)
    if driver:
        pipe.fact("version", ["ascend driver", driver[1]])
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    roots = [Path(home)] if home else [ROOT / "usr/local/Ascend/ascend-toolkit/latest"]
    for root in roots:
        for path in [*root.glob("*/ascend_toolkit_install.info"), root / "version.cfg"]:
            found = re.search(
                r"^(?:version|.*running_version)\s*=\s*\[?(?:[\d.]*:)?([\w.]+)", _text(path), re.M
            )
            if found:
                pipe.fact("version", ["cann", found[1]])
                return
    if not home:
        pipe.fact("note", "ASCEND_HOME_PATH is not set: source set_env.sh of CANN before starting")


def _neuware(pipe: Pipe) -> None:
    """The version of CNToolkit, below NEUWARE_HOME."""
    home = os.environ.get("NEUWARE_HOME")
    root = Path(home) if home else ROOT / "usr/local/neuware"
    found = re.search(r"Neuware Version\s*:?\s*([\d.]+)|^([\d.]+)$", _text(root / "version.txt"), re.M)
    if found:
        pipe.fact("version", ["cntoolkit", found[1] or found[2]])
    elif not home:
        pipe.fact("note", "NEUWARE_HOME is not set: set it to where CNToolkit lies")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def ascend(pipe: Pipe) -> list[str]:
    """torch_npu over CANN."""
    return _vendor(
        pipe,
        package="torch_npu",
        kind="npu",
        nodes="dev/davinci[0-9]*",
        variable="ASCEND_RT_VISIBLE_DEVICES",
        sdk=_cann,
    )


def mlu(pipe: Pipe) -> list[str]:
    """torch_mlu over CNToolkit."""
    return _vendor(
        pipe,
        package="torch_mlu",
        kind="mlu",
        nodes="dev/cambricon_dev[0-9]*",
        variable="MLU_VISIBLE_DEVICES",
        sdk=_neuware,
    )


TRIES = {"cpu": cpu, "cuda": cuda, "ascend": ascend, "mlu": mlu}


def main() -> None:
    """Try one backend; whatever it raises is told as text, with the module that raised it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a result here
    sys.path[:] = json.loads(os.environ.pop("LOONGFORGE_PROBE_PATH", "null")) or sys.path
    pipe = Pipe(int(sys.argv[2]))
    try:
        pipe.send(end="ready", devices=TRIES[sys.argv[1]](pipe))
    except StopError as stop:
        pipe.send(end=stop.state, reason=stop.reason, fix=stop.fix)
    except BaseException as error:  # a backend may call sys.exit at import
        text, cause = f"{type(error).__name__}: {error}", error.__cause__ or error.__context__
        while cause is not None and len(text) < 4000:
            text, cause = (
                f"{text}; from {type(cause).__name__}: {cause}",
                cause.__cause__ or cause.__context__,
            )
        pipe.send(end="installed_unusable", reason=text[:4000], error=True)
    os._exit(0)  # exit handlers of a half imported backend may crash or hang


if __name__ == "__main__":
    main()
