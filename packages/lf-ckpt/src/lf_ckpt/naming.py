"""Which names of a step are wanted, what they are called now, and what may be done to make a tensor fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from .errors import CkptError, MismatchError

MapNames: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""Saved name -> present name; names that a mapping does not hold stay as they are."""


class Kind(NamedTuple):
    """What has to agree between two tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Fitting:
    """What may be done to make a saved tensor fit: take other shapes of as many elements, convert dtypes."""

    reshape: bool = False
    cast: bool = False

    def fits(self, saved: Kind, wanted: Kind) -> bool:
        """Whether the saved tensor can fill the wanted one."""
        same_shape = saved.shape == wanted.shape
        if not same_shape and not (self.reshape and prod(saved.shape) == prod(wanted.shape)):
            return False
        return saved.dtype == wanted.dtype or (self.cast and castable(saved.dtype, wanted.dtype))


def castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a conversion only rounds. Never drops an imaginary part or a fraction, never wraps a whole number."""
    if saved == torch.bool or wanted.is_complex:
        return True
    if saved.is_complex or wanted == torch.bool:
        return False
    if wanted.is_floating_point:
        return True
    if saved.is_floating_point:
        return False
    mine, theirs = torch.iinfo(saved), torch.iinfo(wanted)
    return theirs.min <= mine.min and mine.max <= theirs.max


@dataclass(frozen=True)
class Match:
    """Saved and wanted tensors side by side. Names are present names; `source` gives the saved one of those taken."""

    source: dict[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def require(self) -> None:
        """MismatchError unless everything found its place."""
        if self.missing or self.unexpected or self.mismatched:
            raise MismatchError(self.missing, self.unexpected, self.mismatched)


def match(
    saved: Mapping[str, Kind], wanted: Mapping[str, Kind], names: Mapping[str, str], how: Fitting
) -> Match:
    """Compare by name. `names`: saved name -> present name, of the saved tensors that are to be considered."""
    source = {new: old for old, new in names.items()}
    unfit = {name for name in wanted if name in source and not how.fits(saved[source[name]], wanted[name])}
    taken = {name: source[name] for name in wanted if name in source and name not in unfit}

    def changes(which: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{name}: {saved[source[name]]} -> {wanted[name]}" for name in which)

    return Match(
        source=taken,
        missing=tuple(name for name in wanted if name not in source),
        unexpected=tuple(name for name in source if name not in wanted),
        mismatched=changes(name for name in wanted if name in unfit),
        renamed=tuple((old, new) for new, old in taken.items() if old != new),
        reshaped=changes(n for n, old in taken.items() if saved[old].shape != wanted[n].shape),
        cast=changes(n for n, old in taken.items() if saved[old].dtype != wanted[n].dtype),
    )


def select(names: Collection[str], only: str | Sequence[str] | None) -> list[str]:
    """Names that a pattern of `only` matches (shell globs; `*` also matches dots), all without patterns.

    MismatchError for a pattern that matches nothing: it is misspelt more often than meant.
    """
    if only is None:
        return list(names)
    patterns = [only] if isinstance(only, str) else list(only)
    known = set(names)
    idle = [p for p in patterns if p not in known and not any(fnmatchcase(name, p) for name in names)]
    if idle:
        raise MismatchError([f"{pattern} (of only=)" for pattern in idle], [], [])
    # A name may hold brackets, so it also stands for itself.
    exact = set(patterns)
    return [name for name in names if name in exact or any(fnmatchcase(name, p) for p in patterns)]


def rename(names: Iterable[str], map_names: MapNames | None) -> dict[str, str]:
    """Saved name -> present name. CkptError for two names that become one, and for a mapped name that is not there."""
    old_names = list(names)
    if map_names is None:
        return {name: name for name in old_names}
    if isinstance(map_names, Mapping):
        unknown = sorted(set(map_names) - set(old_names))
        if unknown:
            raise MismatchError([f"{name} (of map_names=)" for name in unknown], [], [])
        renamed = {name: map_names.get(name, name) for name in old_names}
    else:
        renamed = {name: map_names(name) for name in old_names}
    taken: dict[str, str] = {}
    for old, new in renamed.items():
        if not isinstance(new, str):
            raise CkptError(f"map_names gives {new!r} for {old!r}; names are strings")
        if new in taken:
            raise CkptError(f"map_names gives the name {new!r} to both {taken[new]!r} and {old!r}")
        taken[new] = old
    return renamed
