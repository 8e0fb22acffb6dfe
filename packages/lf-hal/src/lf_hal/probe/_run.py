"""Runs each probe in a process of its own and makes a result of whatever becomes of that process."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lf_hal.probe._patched import patched_cuda
from lf_hal.probe._support import fix_for, missing_in, sdk_too_old, torch_mismatch
from lf_hal.probe._types import BACKENDS, Backend, Probe, State
from lf_hal.spec import chip

__all__ = ["TIMEOUT_S", "probe", "run_probe"]

TIMEOUT_S = 60.0  # importing torch from a cold disk takes up to half of that
_CHILD = Path(__file__).with_name("_child.py")
_MOST = 1 << 20  # bytes of the result that are kept
_TAIL = 4096  # bytes of what a backend prints that are kept
_POLL_S = 0.1


def probe(timeout_s: float = TIMEOUT_S, backends: Sequence[str] | None = None) -> list[Probe]:
    """Tries every backend (or those named), each in a process of its own, at the same time; raises for none of them.

    timeout_s is what each may take, seconds; one that takes longer is killed and is installed_unusable. Nothing that a
    backend does (crash, hang, patch torch, print) reaches this process or another result. ValueError: no such backend.
    """
    unknown = set(backends or ()) - {row.name for row in BACKENDS}
    if unknown:
        known = ", ".join(row.name for row in BACKENDS)
        raise ValueError(f"no backend is called {', '.join(sorted(unknown))}; there are {known}")
    chosen = [row for row in BACKENDS if backends is None or row.name in backends]
    if not chosen:
        return []
    with ThreadPoolExecutor(len(chosen)) as pool:
        return list(pool.map(lambda row: run_probe(row, timeout_s), chosen))


def run_probe(backend: Backend, timeout_s: float) -> Probe:
    """One backend in one process; every end of that process is a Probe."""
    messages, tail, ended = _run(backend.name, timeout_s)
    stage = next((m["stage"] for m in reversed(messages) if "stage" in m), "start")
    end = next((m for m in messages if "end" in m), None)
    versions = {m["value"][0]: m["value"][1] for m in messages if m.get("fact") == "version"}
    notes = tuple(m["value"] for m in messages if m.get("fact") == "note")
    found = Probe(backend.name, backend.device_type, State.INSTALLED_UNUSABLE, "", stage, versions=versions)
    found = replace(found, notes=notes, evidence=backend.evidence)
    if end is None:
        found = replace(found, reason=f"{ended} in stage {stage!r}{_said(tail)}")
    elif end["end"] == State.READY:
        return _checked(replace(found, state=State.READY, devices=tuple(end["devices"])))
    else:
        found = replace(found, state=State(end["end"]), reason=end["reason"], fix=end.get("fix", ""))
    if end is not None and not end.get("error"):
        return _noted(found)
    missing = missing_in(f"{found.reason}\n{tail}")
    mismatch = torch_mismatch(found.backend, versions) or sdk_too_old(found.backend, versions)
    reason = f"{found.reason} ({mismatch})" if mismatch else found.reason
    return _noted(replace(found, reason=reason, missing=missing, fix=fix_for(backend.name, missing)))


def _checked(found: Probe) -> Probe:
    """A backend that answers may still be one that must not be used."""
    mismatch = torch_mismatch(found.backend, found.versions)
    specs = [chip(name) for name in found.devices]
    refused = [s.refused if s is not None else "" for s in specs]
    if mismatch:
        fix = "install the two that belong together"
        found = replace(found, state=State.INSTALLED_UNUSABLE, stage="versions", reason=mismatch, fix=fix)
    elif found.devices and all(refused):
        reason = f"{found.devices[0]} is refused: {refused[0]}"
        found = replace(found, state=State.INSTALLED_UNUSABLE, stage="chips", reason=reason)
    else:
        what = f"{len(found.devices)} x {found.devices[0]}" if len(set(found.devices)) == 1 else ""
        found = replace(found, stage="done", reason=what or ", ".join(found.devices))
    notes = [n for n in (sdk_too_old(found.backend, found.versions),) if n]
    if found.backend in ("ascend", "mlu"):
        notes += [
            f"{name} is not in the table of chips" for name in sorted({*found.devices}) if not chip(name)
        ]
    return _noted(replace(found, notes=(*found.notes, *notes)))


def _noted(found: Probe) -> Probe:
    """Notes on the process that asked: what is patched in it, and what keeps it from importing torch."""
    notes = list(found.notes)
    patch = patched_cuda() if found.backend == "cuda" else ""
    if patch:
        notes.append(patch)
    package = {"ascend": "torch_npu", "mlu": "torch_mlu"}.get(found.backend)
    loads = any(re.split("[.:]", e.value)[0] == package for e in entry_points(group="torch.backends"))
    automatic = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if loads and automatic and found.state is State.INSTALLED_UNUSABLE:
        notes.append(f"import torch loads {package} and fails with it; set TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    return replace(found, notes=tuple(notes))


def _said(tail: str) -> str:
    last = next(
        (line.strip() for line in reversed(tail.splitlines()) if line.strip().isprintable() and line.strip()),
        "",
    )
    return f"; it last printed {last[-300:]!r}" if last else ""


def _run(name: str, timeout_s: float) -> tuple[list[dict[str, Any]], str, str]:
    """(messages of the child, end of what it printed, how it ended where no message says so)."""
    try:
        reader, writer = os.pipe()
    except OSError as error:  # no file descriptor is left
        return [], "", f"no process could be started: {error}"
    # torch must come up without loading other backends: theirs are other processes. The caller's path is not made
    # PYTHONPATH, where a module of the caller could take the place of one of the standard library in the child.
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LOONGFORGE_PROBE_PATH": json.dumps(sys.path)}
    try:
        child = subprocess.Popen(
            [sys.executable or "python3", "-P", str(_CHILD), name, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return [], "", f"no process could be started: {error}"
    os.close(writer)
    try:
        result, tail, in_time = _collect(child, reader, time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        os.killpg(child.pid, signal.SIGKILL)  # before the wait: until then the number is this child's
        child.wait()
    if not in_time:
        return _messages(result), tail, f"no answer in {timeout_s:g} s"
    code = child.returncode
    how = (
        f"killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit status {code} and no result"
    )
    return _messages(result), tail, how


def _collect(child: subprocess.Popen[bytes], reader: int, deadline: float) -> tuple[bytes, str, bool]:
    """What came over the pipe and the end of what was printed, until the child is gone (True) or the deadline."""
    if child.stdout is None:
        raise ValueError("the child was started without a pipe")
    printed = child.stdout.fileno()
    kept = {reader: b"", printed: b""}
    with selectors.DefaultSelector() as ready, child.stdout:
        for fd in kept:
            ready.register(fd, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            # asked before the pipes are: what it wrote before it went is then still to be read
            gone = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            events = ready.select(0.0 if gone else max(0.0, min(left, _POLL_S))) if ready.get_map() else []
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    ready.unregister(key.fd)
                joined = kept[key.fd] + data
                kept[key.fd] = joined[:_MOST] if key.fd == reader else joined[-_TAIL:]
            # a process it left behind may hold the pipes open, so their end is not waited for
            if (gone and not events) or left <= 0:
                return kept[reader], kept[printed].decode(errors="replace"), gone
            if not gone and not ready.get_map():
                time.sleep(_POLL_S / 10)


def _messages(result: bytes) -> list[dict[str, Any]]:
    found = []
    for line in result.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            found.append(message)
    return found
