"""What this process knows: the tables of its card, the mode, what was chosen from where, what was benchmarked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from lf_graph.kernels._tunable import CHOSEN, Config, Key
from lf_graph.tune._card import Card, card_of, current_device
from lf_graph.tune._store import Store, default_folder, shipped
from lf_graph.tune._table import Entry, Table
from lf_graph.tune._timer import GraphTimer, Timer

Mode = Literal["off", "first_use"]
Origin = Literal["tuned", "shipped", "default"]


def _mode() -> Mode:
    chosen = os.environ.get("LF_GRAPH_TUNE", "off")
    for mode in get_args(Mode):
        if chosen == mode:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"LF_GRAPH_TUNE={chosen}: one of {', '.join(get_args(Mode))}")


@dataclass
class State:
    """Of this process; there is one.

    Attributes:
        device: whose card the tables are of.
        store: the tuned table's file.
        tuned: its content.
        shipped: the table that came with the package for this card.
        mode: whether a first use tunes.
        timer: how first uses are timed.
        origins: where each choice so far came from, by (tunable, key).
        launched: every (tunable, key) of this process, in order.
        problems: what was wrong with the shipped table, or with an entry.
        timings: how often a timer was asked in this process.
    """

    device: torch.device
    store: Store
    tuned: Table
    shipped: Table | None
    mode: Mode = field(default_factory=_mode)
    timer: Callable[[torch.device], Timer] = GraphTimer
    origins: dict[tuple[str, Key], tuple[Origin, Config]] = field(default_factory=dict)
    launched: dict[tuple[str, Key], None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    timings: int = 0

    @property
    def card(self) -> Card:
        """The card of the tables."""
        return self.store.card

    def note(self, tunable: str, key: Key, origin: Origin, config: Config) -> None:
        """Remembers a choice that a kernel was launched with."""
        self.origins[tunable, key] = origin, config
        self.launched[tunable, key] = None

    def refresh(self) -> None:
        """Takes what other processes wrote; what could not be written stays for this one."""
        self.tuned = Table(self.card, {**self.tuned.entries, **self.store.read().entries})

    def keep(self, entry: Entry) -> None:
        """Writes an entry; later uses take it."""
        self.store.put(entry)
        self.tuned = self.tuned.with_entry(entry)
        CHOSEN.pop((entry.tunable, entry.key), None)


_STATE: list[State] = []


def state() -> State:
    """The state, made at the first question from the default folder."""
    if not _STATE:
        use()
    return _STATE[0]


def use(
    folder: Path | None = None,
    device: torch.device | None = None,
    mode: Mode | None = None,
    timer: Callable[[torch.device], Timer] | None = None,
) -> State:
    """Takes tables from another folder; what was chosen before is chosen anew. None: as before, or the default."""
    old = _STATE[0] if _STATE else None
    device = device or (old.device if old else current_device())
    store = Store(folder or (old.store.path.parent if old else default_folder()), card_of(device))
    found, problem = shipped(store.card)
    new = State(device, store, store.read(), found, problems=[problem] if problem else [])
    if old is not None:
        new.mode, new.timer, new.timings, new.launched = old.mode, old.timer, old.timings, old.launched
    new.mode, new.timer = mode or new.mode, timer or new.timer
    _STATE[:] = [new]
    CHOSEN.clear()
    return new
