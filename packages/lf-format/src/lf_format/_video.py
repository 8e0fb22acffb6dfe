"""Video files: the table of their frames, and the frames. Needs the extra `video`."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError, InputError

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class FrameTable:
    """Every frame that a file shows, in order of presentation.

    Attributes:
        pts: presentation time stamps in units of `time_base`, int64[frames], increasing.
        keyframe: bool[frames].
        time_base: seconds per unit.
    """

    pts: npt.NDArray[np.int64]
    keyframe: npt.NDArray[np.bool_]
    time_base: Fraction

    def __len__(self) -> int:
        return len(self.pts)


def need(module: str) -> Any:
    """The module, or a FormatError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FormatError(f'{error}; robot data and video need: pip install "lf-format[video]"') from None


def frame_table(path: str | os.PathLike[str]) -> FrameTable:
    """Reads the packets of the first video stream, without decoding.

    Raises:
        InputError: when it cannot be read as a video, or a time stamp is missing or occurs twice.
    """
    av = need("av")
    try:
        with av.open(os.fspath(path)) as container:
            stream = container.streams.video[0]
            shown = [p for p in container.demux(stream) if p.size and not p.is_discard]
            rows = [(p.pts, p.is_keyframe) for p in shown]
            base = Fraction(stream.time_base)
    except (av.error.FFmpegError, IndexError) as error:
        raise InputError(f"not a readable video: {error}", document=os.fspath(path)) from None
    if any(pts is None for pts, _ in rows):
        raise InputError("a frame has no time stamp", document=os.fspath(path))
    rows.sort()
    pts = np.array([row[0] for row in rows], np.int64)
    if (np.diff(pts) <= 0).any():
        raise InputError("two frames have the same time stamp", document=os.fspath(path))
    return FrameTable(pts, np.array([row[1] for row in rows], bool), base)


def frames(
    path: str | os.PathLike[str], size: tuple[int, int] | None = None, num_workers: int = 1
) -> Iterator[tuple[int, Pixels]]:
    """Decodes a file once, from its first frame to its last.

    Args:
        size: (height, width) to resize to, bilinear; None = as stored.
        num_workers: threads that decode, convert and resize; results and their order do not depend on it.

    Yields:
        (pts, uint8[height, width, 3]).

    Raises:
        InputError: when the file cannot be decoded.
    """
    av = need("av")
    convert = _converter(size)
    try:
        with av.open(os.fspath(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE" if num_workers == 1 else "AUTO"
            stream.codec_context.thread_count = num_workers
            decoded = container.decode(stream)
            if num_workers == 1:
                yield from ((frame.pts, convert(frame)) for frame in decoded)
            else:
                yield from _parallel(decoded, convert, num_workers)
    except (av.error.FFmpegError, IndexError) as error:
        raise InputError(f"video cannot be decoded: {error}", document=os.fspath(path)) from None


def _parallel(decoded: Iterator[Any], convert: Callable[[Any], Pixels], workers: int) -> Iterator[Any]:
    """In order, with at most four frames a worker in memory."""
    waiting: deque[tuple[int, Future[Pixels]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for frame in decoded:
            waiting.append((frame.pts, pool.submit(convert, frame)))
            if len(waiting) > 4 * workers:
                pts, result = waiting.popleft()
                yield pts, result.result()
        for pts, result in waiting:
            yield pts, result.result()


def _converter(size: tuple[int, int] | None) -> Callable[[Any], Pixels]:
    image = need("PIL.Image") if size is not None else None

    def convert(frame: Any) -> Pixels:
        pixels: Pixels = frame.to_ndarray(format="rgb24")
        if size is None or pixels.shape[:2] == size:
            return pixels
        assert image is not None
        resized = image.fromarray(pixels).resize((size[1], size[0]), image.Resampling.BILINEAR)
        return np.asarray(resized)

    return convert
