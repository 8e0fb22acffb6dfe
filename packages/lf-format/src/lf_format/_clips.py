"""Whole videos as a field: the file's bytes, and the table that finds a frame in them. Needs the extra `video`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError
from lf_format._fields import VIDEO_PARTS
from lf_format._video import FrameTable, Pixels, Scaler, frame_table, need


def video_sample(name: str, path: str | os.PathLike[str]) -> dict[str, object]:
    """The values of the fields of `Field.video(name)` for the file `path`, its bytes unchanged.

    Raises:
        InputError: when it cannot be read as a video, or a time stamp is missing or occurs twice.
    """
    table = frame_table(path)
    rows = np.stack([table.pts, table.keyframe.astype(np.int64)], 1)
    base = np.array(table.time_base.as_integer_ratio(), np.int64)
    values = (Path(path).read_bytes(), rows, base)
    return {name + end: value for end, value in zip(VIDEO_PARTS, values, strict=True)}


def stored_table(record: Mapping[str, npt.NDArray[Any]], name: str) -> FrameTable:
    """Frame table of the video field `name` of a record; FormatError when its values are no such table."""
    _, rows, base = (record[name + end] for end in VIDEO_PARTS)
    pts, keys = rows[:, 0], rows[:, 1]
    if (np.diff(pts) <= 0).any() or ((keys != 0) & (keys != 1)).any() or (base <= 0).any():
        raise FormatError(f"frame table of {name}", expected="increasing time stamps, keyframes 0 or 1")
    return FrameTable(pts, keys.astype(bool), Fraction(int(base[0]), int(base[1])))


def video_frames(
    record: Mapping[str, npt.NDArray[Any]], name: str, numbers: Sequence[int] | npt.NDArray[Any]
) -> npt.NDArray[np.uint8]:
    """Decodes frames of a record's video by number: uint8[n, height, width, 3], in the order asked for.

    Decoding starts at the keyframe before the first wanted frame and stops after the last one.

    Raises:
        IndexError: a number outside the frame table. FormatError: the video does not decode to it.
    """
    table = stored_table(record, name)
    wanted = np.asarray(numbers, np.int64)
    if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(table)):
        raise IndexError(f"frames of {name} must be in 0..{len(table) - 1}")
    if wanted.size == 0:
        return np.zeros((0, 0, 0, 3), np.uint8)
    found = _decode(record[name].tobytes(), table, sorted(set(wanted.tolist())), name)
    return np.stack([found[i] for i in wanted.tolist()])


def _decode(raw: bytes, table: FrameTable, wanted: list[int], name: str) -> dict[int, Pixels]:
    av = need("av")
    number = {int(table.pts[i]): i for i in wanted}
    # A container seeks by decoding time, so a keyframe may be shown after the frame asked for: then one earlier.
    starts = np.flatnonzero(table.keyframe[: wanted[0] + 1])[::-1].tolist()
    for start in starts:
        try:
            with av.open(io.BytesIO(raw)) as container:
                found = _from(container, int(table.pts[start]), number)
        except (av.error.FFmpegError, IndexError) as error:
            raise FormatError(f"video {name} does not decode: {error}", position=wanted[0]) from None
        if len(found) == len(wanted):
            return found
    raise FormatError(f"video {name} has not the frames of its table", expected=wanted[:8])


def _from(container: Any, start: int, number: Mapping[int, int]) -> dict[int, Pixels]:
    """Wanted frames from the keyframe at or before time stamp `start`; fewer when decoding began too late."""
    stream = container.streams.video[0]
    container.seek(start, stream=stream, backward=True)
    found: dict[int, Pixels] = {}
    scaler = Scaler(None)
    last = max(number)
    for frame in container.decode(stream):
        if frame.pts in number:
            found[number[frame.pts]] = scaler(frame)
        if frame.pts is not None and frame.pts >= last:
            break
    return found
