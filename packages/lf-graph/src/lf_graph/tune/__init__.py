"""Chooses launch configurations of the Triton kernels by measurement, after each proved right and repeatable.

Kernels ask for a configuration at their first launch for a dtype, size or length bucket, and take it from the tuned
table of this card, driver and Triton, from the table shipped for this card, or else take their default. Tables are
filled ahead of time by :func:`run` (or ``python -m lf_graph.tune``), or at first use with ``on_first_use()``. Nothing
is ever benchmarked twice, and nothing inside a capture.

    from lf_graph import tune

    train_one_step()                  # notes what is launched
    print(tune.run(budget_s=300))     # searches those keys
    print(tune.stats())
"""

from __future__ import annotations

from pathlib import Path

from lf_graph._errors import NotTunedError
from lf_graph.tune._run import TuneReport, run
from lf_graph.tune._state import use
from lf_graph.tune._stats import Chosen, TuneStats, stats
from lf_graph.tune._store import TuneCacheWarning
from lf_graph.tune._table import Entry, TableError, Trial
from lf_graph.tune._timer import GraphTimer, Timer, Timing
from lf_graph.tune._verify import DeviceLostError

__all__ = [
    "Chosen",
    "DeviceLostError",
    "Entry",
    "GraphTimer",
    "NotTunedError",
    "TableError",
    "Timer",
    "Timing",
    "Trial",
    "TuneCacheWarning",
    "TuneReport",
    "TuneStats",
    "folder",
    "on_first_use",
    "run",
    "stats",
]


def on_first_use(on: bool = True) -> None:
    """Tune a key when it is first launched (a search takes seconds to minutes), or stop doing so.

    The environment variable ``LF_GRAPH_TUNE=first_use`` does the same. A first launch inside a capture raises
    :class:`NotTunedError`; the warm-up of ``capture``, ``Chain`` and ``TrainStep`` comes before.
    """
    use(mode="first_use" if on else "off")


def folder(path: str | Path) -> None:
    """Keep tables in this folder instead of ``LF_GRAPH_TUNE_DIR`` or the user's cache folder, and read them there."""
    use(Path(path))
