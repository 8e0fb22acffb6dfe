"""Values that every rank keeps of its own (generators, its loader): `rank-<r>/<name>` in the store. Pure.

A step of one data file has no such names; there, and when a rank asks that did not exist, the plain names are all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, TypeVar

from .errors import CkptError
from .manifest import Manifest

T = TypeVar("T")
_OWNED: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})/(.*)", re.DOTALL)


def owner_of(name: str) -> int | None:
    """The rank that a stored name belongs to; None for a value that all share."""
    found = _OWNED.fullmatch(name)
    return int(found[1]) if found else None


def stored_name(per_rank: Collection[str], rank: int) -> Callable[[str], str]:
    """Function from names to names in the store: those in `per_rank`, or below one of them (`rng` covers `rng.torch`
    and `rng/torch`), become the rank's own. ValueError for a text, whose letters would be taken for names.
    """
    if isinstance(per_rank, str):
        raise ValueError(f"per_rank={per_rank!r}: a list of names, as [{per_rank!r}]")
    exact = frozenset(per_rank)
    below = tuple(f"{name}{mark}" for name in per_rank for mark in "./")
    return lambda name: f"rank-{rank}/{name}" if name in exact or name.startswith(below) else name


def seen_by(manifest: Manifest, rank: int) -> Manifest:
    """The step as one rank sees it: its own values under their plain names, without those of other ranks."""
    if len(manifest.files) == 1:
        return manifest
    aliases = _seen(manifest.aliases, rank)
    return replace(
        manifest,
        tensors=tuple(
            replace(t, name=name) for t in manifest.tensors if (name := _plain(t.name, rank)) is not None
        ),
        aliases={name: _plain(target, rank) or target for name, target in aliases.items()},
        blobs=tuple(
            replace(b, name=name) for b in manifest.blobs if (name := _plain(b.name, rank)) is not None
        ),
        items=_seen(manifest.items, rank),
    )


def seen_by_one(manifest: Manifest, rank: int) -> Manifest:
    """The same for an export, which has room for the values of one rank. CkptError for a rank that wrote nothing."""
    if not 0 <= rank < len(manifest.files):
        raise CkptError(
            f"rank {rank}: step {manifest.step} was saved by ranks 0 to {len(manifest.files) - 1}, so there are no "
            "values of that one"
        )
    return seen_by(manifest, rank)


def _seen(values: dict[str, T], rank: int) -> dict[str, T]:
    return {plain: v for name, v in values.items() if (plain := _plain(name, rank)) is not None}


def _plain(name: str, rank: int) -> str | None:
    found = _OWNED.fullmatch(name)
    if found is None:
        return name
    return found[2] if int(found[1]) == rank else None
