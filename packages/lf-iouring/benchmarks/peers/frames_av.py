"""PyAV on an H.264 file, a seek for every sample, as map-style data sets of robot data do."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np

from peers.frames import SIZE, Batch, Job, run
from peers.serve import Case

FPS = 30


def write(job: Job, gop: int) -> None:
    """`gop` frames from keyframe to keyframe: 2 as LeRobot writes, since seeking is then cheap."""
    with av.open(str(job.root / f"gop{gop}.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "18", "preset": "veryfast"})
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.gop_size = gop
        stream.time_base = Fraction(1, FPS)
        for pixels in job.frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")))
        container.mux(stream.encode(None))


class Video:
    """Two frames by number, from the keyframe before them."""

    def __init__(self, path: str, threads: str) -> None:
        self.container = av.open(path)
        self.stream = self.container.streams.video[0]
        self.stream.thread_type = threads
        base = self.stream.time_base
        assert base is not None
        self.step = round(1 / (FPS * base))

    def pair(self, number: int, out: Any) -> None:
        first = number * self.step
        self.container.seek(first, stream=self.stream, backward=True)
        found = 0
        for frame in self.container.decode(self.stream):
            if frame.pts >= first:
                out[found] = frame.to_ndarray(format="rgb24")
                found += 1
            if found == 2:
                break


def seeking(
    job: Job, epoch: int, gop: int = 2, threads: str = "NONE", reopen: bool = False
) -> Iterator[Batch]:
    path = str(job.root / f"gop{gop}.mp4")
    video = Video(path, threads)
    for ids in job.batches(epoch):
        frames = np.empty((job.batch, 2, SIZE, SIZE, 3), np.uint8)
        for number, out in zip(ids.tolist(), frames, strict=True):
            video = Video(path, threads) if reopen else video
            video.pair(number, out)
        yield job.with_rest(ids, frames)


def prepare(job: Job) -> list[Case]:
    for gop in (2, 30):
        write(job, gop)
    return [
        Case("PyAV, seek per sample, keyframe every 2", lambda e: seeking(job, e)),
        Case("PyAV, seek per sample, keyframe every 30", lambda e: seeking(job, e, 30)),
        Case("PyAV, file opened per sample", lambda e: seeking(job, e, reopen=True), tried=True),
        Case("PyAV, decoder threads", lambda e: seeking(job, e, threads="AUTO"), tried=True),
    ]


if __name__ == "__main__":
    run(prepare, "av", exact=False)
