"""Frames of robot data, clip after clip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lf_format._errors import InputError
from lf_format._lerobot import Clip
from lf_format._video import FrameTable, Pixels, frames


class ClipReader:
    """Frames of one camera: a file stays open while successive clips lie in it, and is decoded once."""

    def __init__(self, size: tuple[int, int] | None, workers: int) -> None:
        self._size, self._workers = size, workers
        self._path: Path | None = None
        self._frames: Iterator[tuple[int, Pixels]] = iter(())
        self._at = 0

    def clip(self, clip: Clip, table: FrameTable) -> Iterator[Pixels]:
        """Frames from the clip's start on; InputError when the decoder and the frame table disagree."""
        if self._path != clip.path or clip.start < self._at:
            self._path, self._at = clip.path, 0
            self._frames = frames(clip.path, self._size, self._workers)
        for expected in table.pts[self._at :].tolist():
            pts, pixels = next(self._frames, (None, None))
            if pts != expected or pixels is None:
                raise InputError(
                    f"decoding frame {self._at} of {clip.path.name}", document=clip.path,
                    expected=f"time stamp {expected}", found=pts,
                )  # fmt: skip
            self._at += 1
            if self._at > clip.start:
                yield pixels
