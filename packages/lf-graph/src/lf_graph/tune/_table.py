"""What was measured, as data: entries of a table, and its JSON form with version and checksum.

``parse`` is total: every text gives a table or a ``TableError``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lf_graph._errors import GraphError
from lf_graph.kernels._tunable import Config, Key
from lf_graph.tune._card import Card

FORMAT = "lf-graph tune"
VERSION = 1


class TableError(GraphError):
    """A file is no table of this version; the message says what is wrong with it."""


@dataclass(frozen=True)
class Trial:
    """What became of one candidate.

    Attributes:
        config: the candidate.
        us: microseconds of a call; None if it was rejected.
        rejected: why it may not win; "" if it may.
    """

    config: Config
    us: float | None = None
    rejected: str = ""


@dataclass(frozen=True)
class Entry:
    """The choice for one key of one tunable.

    Attributes:
        tunable: its name.
        key: what the choice is for.
        source: hash of the kernels' source that was measured.
        config: the choice; None if no candidate passed.
        us: microseconds of a call with it.
        default_us: the same with the default; None if the default was rejected.
        complete: whether every candidate was tried; if not, a later run goes on where this one stopped.
        trials: every candidate tried.
    """

    tunable: str
    key: Key
    source: str
    config: Config | None
    us: float | None
    default_us: float | None
    complete: bool
    trials: tuple[Trial, ...] = ()

    @property
    def rejected(self) -> tuple[Trial, ...]:
        """Candidates that may not win."""
        return tuple(t for t in self.trials if t.rejected)


@dataclass(frozen=True)
class Table:
    """Entries by (tunable, key) and the card they were measured on."""

    card: Card
    entries: Mapping[tuple[str, Key], Entry] = field(default_factory=dict)

    def with_entry(self, entry: Entry) -> Table:
        """A table that also has this entry, in the place of an older one."""
        return Table(self.card, {**self.entries, (entry.tunable, entry.key): entry})


def dump(table: Table) -> str:
    """The JSON text of a table."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "card": {"name": table.card.name, "driver": table.card.driver, "triton": table.card.triton},
        "entries": [_entry_json(e) for _, e in sorted(table.entries.items(), key=lambda item: repr(item[0]))],
    }
    return json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"


def parse(text: str) -> Table:
    """The table of a JSON text.

    Raises:
        TableError: the text is not one, is damaged, or is of another version.
    """
    document = _document(text)
    _require_checksum(document)
    card = _mapping(document.get("card"), "card")
    entries = [_entry(e) for e in _list(document.get("entries"), "entries")]
    return Table(
        Card(*(_text(card.get(name), name) for name in ("name", "driver", "triton"))),
        {(e.tunable, e.key): e for e in entries},
    )


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise TableError(f"it is no JSON: {e}") from None
    document = _mapping(document, "document")
    if document.get("format") != FORMAT:
        raise TableError(f"its format is {document.get('format')!r:.50}, not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise TableError(f"its version is {document.get('version')!r:.50}, not {VERSION}")
    return document


def _require_checksum(document: dict[str, Any]) -> None:
    """Takes the checksum out of a document, and compares."""
    stored = document.pop("checksum", None)
    try:
        right = stored == _checksum(document)
    except RecursionError:
        right = False
    if not right:
        raise TableError("its checksum is not that of its content")


def _checksum(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def config_json(config: Config) -> dict[str, Any]:
    """A configuration as JSON."""
    return {
        "constants": dict(config.constants),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def config_from(value: Any) -> Config:
    """A configuration from JSON.

    Raises:
        TableError: it is none.
    """
    found = _mapping(value, "config")
    constants = _mapping(found.get("constants"), "constants")
    pairs = tuple((name, _integer(v, name)) for name, v in constants.items())
    return Config(
        pairs, _integer(found.get("num_warps"), "num_warps"), _integer(found.get("num_stages"), "num_stages")
    )


def key_from(value: Any) -> Key:
    """A key from JSON.

    Raises:
        TableError: it is none.
    """
    parts = _list(value, "key")
    if not all(isinstance(p, (bool, int, str)) for p in parts):
        raise TableError("a key has a part that is no number, text or truth value")
    return tuple(parts)


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "tunable": entry.tunable,
        "key": list(entry.key),
        "source": entry.source,
        "config": config_json(entry.config) if entry.config else None,
        "us": entry.us,
        "default_us": entry.default_us,
        "complete": entry.complete,
        "trials": [
            {"config": config_json(t.config), "us": t.us, "rejected": t.rejected} for t in entry.trials
        ],
    }


def _entry(value: Any) -> Entry:
    found = _mapping(value, "entry")
    return Entry(
        tunable=_text(found.get("tunable"), "tunable"),
        key=key_from(found.get("key")),
        source=_text(found.get("source"), "source"),
        config=None if found.get("config") is None else config_from(found["config"]),
        us=_time(found.get("us")),
        default_us=_time(found.get("default_us")),
        complete=_truth(found.get("complete"), "complete"),
        trials=tuple(_trial(t) for t in _list(found.get("trials"), "trials")),
    )


def _trial(value: Any) -> Trial:
    found = _mapping(value, "trial")
    return Trial(
        config_from(found.get("config")), _time(found.get("us")), _text(found.get("rejected"), "rejected")
    )


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{name} is no object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TableError(f"{name} is no list")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TableError(f"{name} is no text")
    return value


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise TableError(f"{name} is neither true nor false")
    return value


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise TableError(f"{name} is no integer between 0 and 2^31")
    return value


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise TableError("a time is no number of microseconds")
    return float(value)
