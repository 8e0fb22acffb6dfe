"""What the tuner says about this process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lf_graph.kernels._tunable import Key
from lf_graph.tune._state import Mode, state

VERSION = 1


@dataclass(frozen=True)
class Chosen:
    """The configuration that a key runs with.

    Attributes:
        tunable: its name.
        key: what for.
        origin: ``tuned``, ``shipped`` or ``default``.
        config: the configuration, as text.
    """

    tunable: str
    key: Key
    origin: str
    config: str


@dataclass(frozen=True)
class TuneStats:
    """Of this process so far.

    Attributes:
        card: name of the card whose tables are read.
        path: the tuned table's file.
        mode: ``off``, or ``first_use``.
        chosen: every key launched so far.
        timings: how often a timer was asked; 0 where everything was in a table.
        problems: files and entries that were not used, and why.
    """

    card: str
    path: str
    mode: Mode
    chosen: tuple[Chosen, ...]
    timings: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        """A summary line, problems, and one line per key."""
        origins = Counter(c.origin for c in self.chosen)
        counts = ", ".join(f"{n} {origin}" for origin, n in sorted(origins.items())) or "nothing launched yet"
        lines = [f"{self.card}: {counts}; {self.timings} timings; mode {self.mode}; {self.path}"]
        lines += [f"problem: {p}" for p in self.problems]
        lines += [f"{c.tunable} {c.key}: {c.config} ({c.origin})" for c in self.chosen]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "version": VERSION,
            "card": self.card,
            "path": self.path,
            "mode": self.mode,
            "chosen": [
                {"tunable": c.tunable, "key": list(c.key), "origin": c.origin, "config": c.config}
                for c in self.chosen
            ],
            "timings": self.timings,
            "problems": list(self.problems),
        }


def stats() -> TuneStats:
    """Which configuration every kernel launched so far runs with, and where it came from."""
    now = state()
    chosen = [Chosen(name, key, origin, str(config)) for (name, key), (origin, config) in now.origins.items()]
    problems = (*now.problems, *now.store.problems)
    return TuneStats(now.card.name, str(now.store.path), now.mode, tuple(chosen), now.timings, problems)
