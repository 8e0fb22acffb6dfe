"""Runs suites in processes of their own, forked from one that has imported torch and every package already.

torch gives PrivateUse1 one name for the life of a process, so each suite and each name of the device has its own.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from warm_server import Server, fork, serve

PRELOADED = (
    "pytest",
    "torch.distributed",
    "lf_hal",
    "lf_comm",
    "lf_ckpt",
    "lf_graph",
    "lf_meta.jobs",
    "lf_meta.models",
)


def run(suite: Path, name: str, out: Path) -> int:
    """Exit code of pytest over one suite with the device called `name`; what it prints goes to a file."""
    request = {"suite": str(suite), "name": name, "out": str(out), "folder": str(out.parent)}
    code: int = _server().ask(request)
    return code


@functools.cache
def _server() -> Server:
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return Server(__file__, {**os.environ, **quiet})


def _answer(request: dict[str, Any]) -> int:
    child = fork()
    if child == 0:
        _become(request)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(request: dict[str, Any]) -> None:
    import pytest

    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["LOONGFORGE_CONTRACT_DEVICE"] = request["name"]
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", f"{request['folder']}/tmp")
    sys.exit(int(pytest.main([request["suite"], *plain])))


if __name__ == "__main__":
    serve(PRELOADED, _answer)
