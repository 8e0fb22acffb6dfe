"""Laying staged records into packed rows, in C where the module is built."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._compiled import ffi, lib
from ._staging import Staged
from .engine import Array, Target
from .packing import Borders, Packing, varlen


def lay(staged: Staged, batch: int, sources: Sequence[Target | None], target: Target) -> Borders:
    """Copy every segment of a batch to its place, set the mask, zero the unused ends.

    Args:
        staged: the window.
        batch: number of the batch in it.
        sources: staging memory of each group, None where the batch has none of its records.
        target: [rows, capacity] tokens and mask, contiguous; written in full.
    """
    cut = slice(int(staged.cuts[batch]), int(staged.cuts[batch + 1]))
    return (_lay_in_python if lib is None else _lay_in_c)(staged, cut, sources, target)


def mask_of(target: Target) -> npt.NDArray[np.uint8]:
    """Packed rows always have a mask."""
    assert target.mask is not None
    return target.mask


def _lay_in_c(staged: Staged, cut: slice, sources: Sequence[Target | None], target: Target) -> Borders:
    rows, capacity = target.tokens.shape
    count = cut.stop - cut.start
    position = np.empty((rows, capacity), np.int32)
    segment = np.empty((rows, capacity), np.int32)
    borders = np.empty(count + rows + 1, np.int32)
    used = np.empty(rows, np.int64)
    memory = [_memory(source) for source in sources]
    staging = ffi.new("lf_staging[]", memory)
    keep = [
        _view("int64_t[]", staged.row[cut]),
        _view("int64_t[]", staged.length[cut]),
        _view("int64_t[]", staged.at[cut]),
        _view("int32_t[]", staged.group[cut]),
    ]
    segments = ffi.new("lf_segments *", [count, *keep, staging])
    out = [
        _view(kind, array.reshape(-1))
        for kind, array in (
            ("uint8_t[]", target.tokens.view(np.uint8)),
            ("uint8_t[]", mask_of(target)),
            ("int32_t[]", position),
            ("int32_t[]", segment),
            ("int32_t[]", borders),
            ("int64_t[]", used),
        )
    ]
    laid = ffi.new("lf_laid *", [*out, capacity, rows, target.tokens.itemsize])
    lib.lf_lay(laid, segments)
    return Borders(borders[: laid.cuts], int(laid.longest), position, segment, used)


def _memory(source: Target | None) -> tuple[Any, Any]:
    if source is None:
        return ffi.NULL, ffi.NULL
    tokens = _view("uint8_t[]", source.tokens.reshape(-1).view(np.uint8))
    return tokens, ffi.NULL if source.mask is None else _view("uint8_t[]", source.mask.reshape(-1))


def _view(kind: str, array: Array) -> Any:
    return ffi.from_buffer(kind, array)


def _lay_in_python(staged: Staged, cut: slice, sources: Sequence[Target | None], target: Target) -> Borders:
    rows, capacity = target.tokens.shape
    mask, row, place, length = mask_of(target), staged.row[cut], staged.place[cut], staged.length[cut]
    found = varlen(Packing(rows, row, place, staged.ids[cut], staged.at[cut], length), capacity)
    mask[...] = found.targets
    for number, used in enumerate(found.lengths.tolist()):
        target.tokens[number, used:] = 0
    columns = (row, place, length, staged.at[cut], staged.group[cut])
    for r, p, n, at, group in zip(*(column.tolist() for column in columns), strict=True):
        source = sources[group]
        assert source is not None, "a batch has read every record it lays"
        target.tokens[r, p : p + n] = source.tokens.reshape(-1)[at : at + n]
        if source.mask is not None:
            mask[r, p : p + n] &= source.mask.reshape(-1)[at : at + n]
    return found
