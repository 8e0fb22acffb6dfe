"""The slow path of ``config_of``: tuned table, shipped table, tuning at first use, default; in this order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from lf_graph._errors import NotTunedError
from lf_graph.kernels._tunable import CHOSEN, Config, Key, Tunable
from lf_graph.tune._search import Effort, search
from lf_graph.tune._source import source_hash
from lf_graph.tune._state import Origin, State, state
from lf_graph.tune._table import Entry, Table

T = TypeVar("T")


def resolve(tunable: Tunable, key: Key) -> Config:
    """What :func:`lf_graph.kernels._tunable.config_of` says; kept there for the next time, unless it may change.

    Raises:
        NotTunedError: tuning at first use is on, and this is the first use, inside a capture.
    """
    now = state()
    origin, config = _from_tables(now, tunable, key)
    if origin == "default" and now.mode == "first_use":
        require_no_capture(tunable.name, key)
        if _is_rehearsal():
            return config  # not kept: the warm-up tunes
        origin, config = _tuned_now(now, tunable, key)
    now.note(tunable.name, key, origin, config)
    CHOSEN[tunable.name, key] = config
    return config


def _from_tables(now: State, tunable: Tunable, key: Key) -> tuple[Origin, Config]:
    default = tunable.default(key)
    tables: tuple[tuple[Origin, Table | None], ...] = (("tuned", now.tuned), ("shipped", now.shipped))
    for origin, table in tables:
        entry = valid_entry(now, table, tunable, key)
        if entry is not None and entry.config is not None:
            return origin, entry.config
    return "default", default


def valid_entry(now: State, table: Table | None, tunable: Tunable, key: Key) -> Entry | None:
    """The entry of a table if it is of today's source; others are named in ``stats().problems``."""
    entry = table.entries.get((tunable.name, key)) if table else None
    if entry is None:
        return None
    if entry.source != source_hash(tunable):
        _note(now, f"{tunable.name}: the source changed since its entries were measured: tune again")
        return None
    names = [name for name, _ in tunable.default(key).constants]
    if entry.config is not None and sorted(names) != sorted(name for name, _ in entry.config.constants):
        _note(now, f"{tunable.name} {key}: an entry has other constants than the kernel")
        return None
    return entry


def _note(now: State, problem: str) -> None:
    if problem not in now.problems:
        now.problems.append(problem)


def _tuned_now(now: State, tunable: Tunable, key: Key) -> tuple[Origin, Config]:
    """Tunes, unless another process did meanwhile."""
    with now.store.tuning():
        now.refresh()
        entry = valid_entry(now, now.tuned, tunable, key)
        if entry is None or not entry.complete:
            entry = tuned(now, tunable, key, Effort(now.timer(now.device)), entry)
    if entry.config is None:
        _note(
            now, f"{tunable.name} {key}: no candidate passed, so the default runs: {entry.trials[0].rejected}"
        )
        return "default", tunable.default(key)
    return "tuned", entry.config


def tuned(now: State, tunable: Tunable, key: Key, effort: Effort, started: Entry | None) -> Entry:
    """Searches in a thread of its own, and keeps the entry."""
    before = effort.timings
    try:
        entry = undisturbed(lambda: search(tunable, key, now.device, effort, started, now.keep), now.device)
    except Exception as e:
        e.add_note(f"lf_graph.tune was searching {tunable.name} for {key}")
        raise
    finally:
        now.timings += effort.timings - before
    now.keep(entry)
    return entry


def require_no_capture(name: str, key: Key) -> None:
    """Refuses where a benchmark would become part of a graph, or end its capture.

    Raises:
        NotTunedError: a capture is on.
    """
    if is_capturing():
        raise NotTunedError(name, key)


def is_capturing() -> bool:
    """Whether a capture is really on: of CUDA on the current stream, or of the recorder.

    ``torch.cuda.is_current_stream_capturing`` also says so in a dry run, where nothing is captured.
    """
    if torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing():
        return True
    backends = sys.modules.get("lf_graph._backend")
    recorder = backends._BACKENDS.get("cpu") if backends else None
    return recorder is not None and bool(recorder.is_capturing())


def _is_rehearsal() -> bool:
    """Whether a dry run only pretends to be a capture: what it launches is watched, so it should stay as it is."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # a build without CUDA, and nobody pretends
        return False


def undisturbed(work: Callable[[], T], device: torch.device) -> T:
    """Runs ``work`` where no mode of the caller reaches it, and leaves the caller's generators as they were.

    Modes of dispatch (fake tensors, tracing), autocast, disabled gradients, inference mode and the current stream all
    belong to a thread; the first use of a kernel may be inside any of them.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                results.append(work())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, name="lf_graph.tune")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
