"""Which codec a stream gets: measured on one extent of sixteen, used for the fifteen that follow. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .codec import ENTROPY, STORED, Bytes, Layout, Numbers, numbers, pack_section, plan_planes
from .deltas import UNIT_BYTES, difference, dirty_units, gap_bytes
from .format import CHANGED, DIRTY, EXTENT_BYTES, PLANES, RAW, SUB, XOR

SAMPLE_EVERY: Final = 16
_SAMPLE_BYTES: Final = 256 << 10  # of the sampled extent: as telling as all of it, in a quarter of the time
_PLANES_PAY: Final = 0.95  # of raw; above, decoding costs more than the bytes saved
_TIE_PAYS: Final = 0.05  # of raw: what a delta must save over coding without a base to tie the step to it
_DELTA_PAYS: Final = (
    0.01  # once it is tied: the first moment of Adam saves 2.5 points at one step, none from five on
)
_FEW_CHANGED: Final = 0.75  # share of changed elements from which coding their places is not even tried
_FEW_UNITS: Final = 0.25  # share of dirty units up to which the base is not read back to find a better codec

ParentOf = Callable[[int, int], Bytes | None]
DirtyOf = Callable[[int, Bytes], npt.NDArray[np.bool_] | None]


class Choice(NamedTuple):
    """Codec of the next extents, how their planes are laid out, and the share of raw bytes expected to be stored.

    `alone` and `full` are codec and share without a base; `plain` the layout of that codec.
    """

    codec: int
    layout: Layout
    share: float
    alone: int
    plain: Layout
    full: float


_NO_LAYOUT: Final = Layout(0, ())
RAW_CHOICE: Final = Choice(RAW, _NO_LAYOUT, 1.0, RAW, _NO_LAYOUT, 1.0)


@dataclass
class StreamChooser:
    """Chooses for one stream of numbers of `width` bytes.

    mode: "auto" samples, "raw" never compresses, "zstd" tries zstd on every plane without a base. parent: the base's
    bytes at (start, length), None where there are none or a delta is known not to pay. dirty: which 4 KiB units of an
    extent differ from the base's, told from hashes alone, where these are known. tied: whether the step needs its base
    anyway.
    """

    width: int
    mode: str
    parent: ParentOf = lambda start, length: None
    dirty: DirtyOf = lambda start, raw: None
    tied: Callable[[], bool] = lambda: False
    _tried: int = field(default=0, init=False)
    _paid: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False)
    _choice: Choice = field(default=RAW_CHOICE, init=False)

    @property
    def refused(self) -> bool:
        """Whether deltas were tried and none paid."""
        return self._tried > self._paid == 0

    def choose(self, start: int, raw: Bytes) -> Choice:
        """Choice for the next extent of the stream."""
        if self.mode == "raw":
            return RAW_CHOICE
        if self.mode == "zstd":
            layout = Layout(1 if self.width > 1 else 0, (ENTROPY,) * self.width)
            return Choice(PLANES, layout, 1.0, PLANES, layout, 1.0)
        if self._seen % SAMPLE_EVERY == 0:
            self._choice = self._sample(start, raw)
        self._seen += 1
        return self._choice

    def _sample(self, start: int, raw: Bytes) -> Choice:
        part = _middle(raw)
        alone = plan_planes(numbers(raw[part], self.width))
        full = alone.size / (part.stop - part.start)
        codec, plain = (
            (PLANES, alone.layout) if full < _PLANES_PAY else (RAW, Layout(0, (STORED,) * self.width))
        )
        full = full if codec == PLANES else 1.0
        without = Choice(codec, plain, full, codec, plain, full)
        units = self.dirty(start, raw)
        if units is not None and units.mean() <= _FEW_UNITS:
            # As many bytes as the units hold, and no need to read the base back.
            return self._if_pays(without._replace(codec=DIRTY, share=float(units.mean()) * full), without)
        before = self.parent(start, raw.size)
        if before is None:
            return without
        best = min(_deltas(raw, before, part, self.width, without), key=lambda choice: choice.share)
        taken = self._if_pays(best, without)
        self._tried += 1
        self._paid += taken is not without
        return taken

    def _if_pays(self, delta: Choice, without: Choice) -> Choice:
        least = _DELTA_PAYS if self.tied() else _TIE_PAYS
        return delta if delta.share <= without.full - least else without


def _deltas(raw: Bytes, before: Bytes, part: slice, width: int, without: Choice) -> list[Choice]:
    """Every delta codec with its share on the sample."""
    changed, old_changed = numbers(raw, width), numbers(before, width)
    at = np.flatnonzero(changed != old_changed)
    few = at.size <= _FEW_CHANGED * changed.size
    if few:
        part = slice(0, raw.size)  # changes may cluster, where a part tells little
    values, old = numbers(raw[part], width), numbers(before[part], width)
    size = part.stop - part.start
    distance = difference(values, old)
    choices = []
    for codec, coded in ((SUB, distance), (XOR, values ^ old)):
        planned = plan_planes(coded)
        choices.append(without._replace(codec=codec, layout=planned.layout, share=planned.size / size))
    if few and at.size:
        choices.append(_changed(changed[at], old_changed[at], at, raw.size, without))
    if at.size:
        share = dirty_units(raw, before).mean() * without.full
        choices.append(without._replace(codec=DIRTY, layout=without.plain, share=float(share)))
    return choices


def _changed(values: Numbers, old: Numbers, at: npt.NDArray[np.intp], size: int, without: Choice) -> Choice:
    """The choice CHANGED for these elements at these places of an extent of `size` bytes."""
    # A few are enough to plan the planes; the whole decides on size, as places may cluster.
    planned = plan_planes(difference(values, old))
    _, places = pack_section(gap_bytes(at), ENTROPY)
    return without._replace(
        codec=CHANGED, layout=planned.layout, share=(8 + len(places) + planned.size) / size
    )


def _middle(raw: Bytes) -> slice:
    """The part of an extent that is sampled, at 4 KiB edges."""
    if raw.size <= _SAMPLE_BYTES:
        return slice(0, raw.size)
    begin = (raw.size - _SAMPLE_BYTES) // 2 // UNIT_BYTES * UNIT_BYTES
    return slice(begin, begin + _SAMPLE_BYTES)


assert EXTENT_BYTES % UNIT_BYTES == 0
