"""Video files: the table of their frames, and the frames. Needs the extra `video`."""

from __future__ import annotations

import importlib
import os
import threading
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
_FLAGS = "bilinear+accurate_rnd+full_chroma_int+bitexact"
_EXACT = f"flags={_FLAGS}:threads=1"
RGB = f"libswscale {_FLAGS}, chroma left"  # how pixels were made, for the meta of a file


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
        raise FormatError(
            f'{error}; images, robot data and video need: pip install "lf-format[video]"'
        ) from None


class Scaler:
    """Decoded frames to RGB of one size by libswscale; for one thread.

    Colour is converted and the frame resized in one pass over the decoder's planes, with intermediate values of
    15 bits: a triangle filter (antialiased when it shrinks, bilinear when it grows), chroma interpolated from samples
    that lie at the left (the default of H.264, HEVC and MPEG-4). The same bytes from every instruction set and from
    PyAV 14 to 18.

    Args:
        size: (height, width); None = as decoded.
    """

    def __init__(self, size: tuple[int, int] | None) -> None:
        self._size = size
        self._shape: tuple[int, int, str] | None = None
        self._graph: Any = None  # keeps alive what its ends only refer to
        self._ends: tuple[Any, Any] = (None, None)

    def __call__(self, frame: Any) -> Pixels:
        """uint8[height, width, 3] of an av.VideoFrame, read-only."""
        shape = (frame.width, frame.height, frame.format.name)
        if shape != self._shape:
            self._build(frame)
            self._shape = shape
        source, sink = self._ends
        source.push(frame)
        return _packed_pixels(sink.pull())

    def _build(self, frame: Any) -> None:
        height, width = self._size or (frame.height, frame.width)
        graph = need("av").filter.Graph()
        shape = {"width": frame.width, "height": frame.height, "format": frame.format}
        source = graph.add_buffer(**shape, time_base=Fraction(1, 1000))  # no filter here looks at the time
        # Planar RGB first: rgb24 at once gives the same bytes, but libswscale has no vector code for it.
        resize = f"{width}:{height}:{_EXACT}:in_chroma_loc=left"
        chain = [("scale", resize), ("format", "gbrp"), ("scale", _EXACT), ("format", "rgb24")]
        sink = graph.add("buffersink")
        graph.link_nodes(source, *(graph.add(*filter) for filter in chain), sink).configure()
        self._graph, self._ends = graph, (source, sink)


def _packed_pixels(frame: Any) -> Pixels:
    """The pixels of an rgb24 frame, copied once, to bytes: a writer stores what is immutable as it is, later."""
    plane, shape = frame.planes[0], (frame.height, frame.width, 3)
    lines = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return np.frombuffer(lines[: shape[0], : 3 * shape[1]].tobytes(), np.uint8).reshape(shape)


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
        size: (height, width) to resize to, see `Scaler`; None = as stored.
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
    """`Scaler` of any thread that calls it."""
    own = threading.local()

    def convert(frame: Any) -> Pixels:
        if not hasattr(own, "scaler"):
            own.scaler = Scaler(size)
        pixels: Pixels = own.scaler(frame)
        return pixels

    return convert
