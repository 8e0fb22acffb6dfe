"""Robot data: preprocess beside the loops people write, and batches of two consecutive frames, in one run.

    LF_ROBOT_DATA=FOLDER python benchmarks/bench_robot.py --json OUT [--repeat 5] [--seeks 40]

FOLDER is a LeRobot v2 or v3 data set. Rates are frames of 224 x 224 per second of CPU time of one process with one
thread (wall time beside it), so they are per core; repeats of a group are interleaved and outputs are removed outside
of the time. Peers: decoding every file in order with PyAV, resizing with PIL and appending to one file, unchecked; with
the frame's own conversions, and with one VideoReformatter kept for all frames, which is the fastest form we found and
the one that ratios compare with. Then PyAV's own resize without PIL, other pixels than PIL's; and opening and seeking
in the file for every sample, as map-style data sets do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import lf_format as lff
from lf_format._video import Scaler, frame_table, need

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from robot_sets import float_frame

SIZE, BATCH = (224, 224), 16


@dataclass(frozen=True)
class Row:
    """One case: frames/s by CPU time (median, lowest, highest) and by wall time; median ratio to the first case."""

    group: str
    name: str
    check: str
    cpu: float
    lowest: float
    highest: float
    wall: float
    ratio: float


@dataclass(frozen=True)
class Case:
    """What a row measures; `action` writes below a folder of its own and returns the number of frames it handled."""

    group: str
    name: str
    check: str
    action: Callable[[Path], int]


def measure(cases: list[Case], repeat: int) -> list[Row]:
    """Rows of one group; ratios to the first."""
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(repeat):
        for case, seen in zip(cases, times, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time(), time.perf_counter()
                count = case.action(Path(folder))
                cpu, wall = time.process_time() - started[0], time.perf_counter() - started[1]
                seen.append((count / cpu, count / wall))
    rows = []
    for case, seen in zip(cases, times, strict=True):
        cpus, walls = zip(*seen, strict=True)
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(seen, times[0], strict=True))
        values = (statistics.median(cpus), min(cpus), max(cpus), statistics.median(walls), ratio)
        rows.append(Row(case.group, case.name, case.check, *values))
    return rows


class Loops:
    """The data set and the loops over it."""

    def __init__(self, source: Path, seeks: int) -> None:
        self.av, self.image = need("av"), need("PIL.Image")
        self.source, self.seeks = source, seeks
        self.videos = sorted(source.glob("videos/**/*.mp4"))
        self.tables = {path: frame_table(path) for path in self.videos}
        self.reformatter = self.av.video.reformatter.VideoReformatter()

    def to_image(self, frame: Any) -> Any:
        """The documented way from PyAV to PIL."""
        return self._resized(frame.to_image())

    def to_ndarray(self, frame: Any) -> Any:
        """By numpy."""
        return self._resized(self.image.fromarray(frame.to_ndarray(format="rgb24")))

    def reformatted(self, frame: Any) -> Any:
        """By one reformatter, whose libswscale context is set up once."""
        rgb = self.reformatter.reformat(frame, format="rgb24", threads=1)
        return self._resized(self.image.fromarray(rgb.to_ndarray()))

    def without_pil(self, frame: Any) -> Any:
        """PyAV's resize with its default flags."""
        size = {"width": SIZE[1], "height": SIZE[0]}
        return self.reformatter.reformat(frame, **size, format="rgb24", threads=1).to_ndarray()

    def _resized(self, image: Any) -> Any:
        return np.asarray(image.resize((SIZE[1], SIZE[0]), self.image.Resampling.BILINEAR))

    def sequential(self, pixels: Callable[[Any], Any], folder: Path) -> int:
        """Every file in order into one file of raw pixels, as a script would."""
        count = 0
        with (folder / "plain.bin").open("wb") as out:
            for video in self.videos:
                with self.av.open(str(video)) as container:
                    container.streams.video[0].thread_type = "NONE"
                    for frame in container.decode(video=0):
                        pixels(frame).tofile(out)
                        count += 1
        return count

    def seeking(self, _: Path) -> int:
        """Random frames: open, seek to the keyframe before, decode up to the frame."""
        random = np.random.default_rng(0)
        for _ in range(self.seeks):
            video = self.videos[int(random.integers(len(self.videos)))]
            table = self.tables[video]
            pts = int(table.pts[int(random.integers(len(table)))])
            with self.av.open(str(video)) as container:
                stream = container.streams.video[0]
                stream.thread_type = "NONE"
                container.seek(pts, stream=stream, backward=True)
                self.reformatted(next(f for f in container.decode(stream) if f.pts >= pts))
        return self.seeks

    def preprocess(self, folder: Path) -> int:
        """The whole conversion: states, actions and tasks too; hashes, fsync."""
        return lff.preprocess_robot(self.source, folder, image_size=SIZE).frames

    def in_parts(self, folder: Path) -> int:
        return lff.preprocess_robot(self.source, folder, image_size=SIZE, resume=True).frames

    def cases(self) -> list[Case]:
        """The group "prepare"."""
        forms = [("one VideoReformatter", self.reformatted), ("to_ndarray", self.to_ndarray)]
        forms.append(("to_image", self.to_image))
        cases = [Case("prepare", f"PyAV {n} + PIL", "none", partial(self.sequential, f)) for n, f in forms]
        cases += [
            Case("prepare", "PyAV reformat, no PIL", "none", partial(self.sequential, self.without_pil)),
            Case("prepare", "PyAV + PIL, seek per sample", "none", self.seeking),
            Case("prepare", "preprocess_robot", "xxh3, pts, counts", self.preprocess),
            Case("prepare", "preprocess_robot, resume=True", "xxh3, pts, counts", self.in_parts),
        ]
        return cases


def batch_cases(reader: lff.Reader, folder: Path) -> list[Case]:
    """One epoch of two-frame samples in random order, from the page cache."""
    camera = next(f.name for f in reader.fields if f.kind == "image")
    np.save(folder / "plain.npy", reader.gather(range(len(reader)), camera))
    pixels = np.load(folder / "plain.npy", mmap_mode="r")
    out = np.empty((2 * BATCH, *SIZE, 3), np.uint8)
    order = np.random.default_rng(1).permutation(len(reader))

    def epoch(read: Callable[[Any], object], _: Path) -> int:
        for at in range(0, len(order), BATCH):
            read(lff.frame_pairs(reader.flags, order[at : at + BATCH]).reshape(-1))
        return 2 * len(order)

    def gather(check: bool) -> Callable[[Any], object]:
        return lambda ids: reader.gather(ids, camera, out=out[: len(ids)], check=check)

    def copy(ids: Any) -> object:
        return np.take(pixels, ids, axis=0, out=out[: len(ids)], mode="clip")

    kinds = [("memmap gather", "none", copy), ("Reader.gather", "none", gather(False))]
    kinds.append(("Reader.gather", "xxh3 per record", gather(True)))
    return [Case("batch", name, check, partial(epoch, read)) for name, check, read in kinds]


def quality(loops: Loops, every: int = 100) -> dict[str, float]:
    """PSNR in dB against the definition of the pixels in float64, over every 100th frame."""
    forms = {"preprocess_robot": Scaler(SIZE), "PyAV to_image + PIL": loops.to_image}
    errors: dict[str, list[float]] = {name: [] for name in forms}
    for video in loops.videos:
        with loops.av.open(str(video)) as container:
            for frame in islice(container.decode(video=0), 0, None, every):
                exact = float_frame(frame, SIZE)
                for name, pixels in forms.items():
                    errors[name].append(float(np.mean((pixels(frame) - exact) ** 2)))
    return {name: 10 * float(np.log10(255**2 / np.mean(values))) for name, values in errors.items()}


def run(source: Path, repeat: int, seeks: int) -> list[Row]:
    """All rows, groups in order."""
    rows = measure(Loops(source, seeks).cases(), repeat)
    with tempfile.TemporaryDirectory() as name:
        report = lff.preprocess_robot(source, name, image_size=SIZE)
        with lff.Reader(report.output.path) as reader:
            return rows + measure(batch_cases(reader, Path(name)), repeat)


def main() -> None:
    """Prints a Markdown table and writes the JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seeks", type=int, default=40)
    args = parser.parse_args()
    if "LF_ROBOT_DATA" not in os.environ:
        print("bench_robot: not run; LF_ROBOT_DATA names no LeRobot data set")
        return
    source = Path(os.environ["LF_ROBOT_DATA"])
    rows = run(source, args.repeat, args.seeks)
    print(
        "| | case | check | frames/s of a core, median (lowest - highest) | wall | ratio |\n|---|---|---|---|---|---|"
    )
    for r in rows:
        spread = f"{r.cpu:.0f} ({r.lowest:.0f} - {r.highest:.0f})"
        print(f"| {r.group} | {r.name} | {r.check} | {spread} | {r.wall:.0f} | {r.ratio:.2f} |")
    machine = {"machine": platform.machine(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    versions = {name: version(name) for name in ("numpy", "av", "pillow", "pyarrow", "xxhash")}
    report = {"version": 1, "machine": machine | {"python": platform.python_version()}, "versions": versions}
    psnr = quality(Loops(source, 0))
    print("PSNR against float64: " + ", ".join(f"{name} {value:.1f} dB" for name, value in psnr.items()))
    if args.json is not None:
        args.json.write_text(
            json.dumps(report | {"psnr": psnr, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
