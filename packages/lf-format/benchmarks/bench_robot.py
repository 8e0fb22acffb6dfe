"""Robot data: preprocess beside the loops people write, and batches of two consecutive frames, in one run.

    LF_ROBOT_DATA=FOLDER python benchmarks/bench_robot.py --json OUT [--repeat 3] [--seeks 40]

FOLDER is a LeRobot v2 or v3 data set. Rates are frames of 224 x 224 per second of CPU time of one process with one
thread (wall time beside it), so they are per core. Peers: decoding every file in order with PyAV, resizing with PIL
and storing with numpy, unchecked; and opening and seeking in the file for every sample, as map-style data sets do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import lf_format as lff
from lf_format._video import frame_table, need

SIZE, BATCH = (224, 224), 16


@dataclass(frozen=True)
class Row:
    """One case: frames/s by CPU time (median, lowest, highest) and by wall time; ratio to the group's first."""

    group: str
    name: str
    check: str
    cpu: float
    lowest: float
    highest: float
    wall: float
    ratio: float = 1.0


def measure(group: str, name: str, check: str, repeat: int, action: Callable[[], int]) -> Row:
    """`action` returns the number of frames it handled."""
    cpu, wall = [], []
    for _ in range(repeat):
        started = time.process_time(), time.perf_counter()
        count = action()
        cpu.append(count / (time.process_time() - started[0]))
        wall.append(count / (time.perf_counter() - started[1]))
    return Row(group, name, check, statistics.median(cpu), min(cpu), max(cpu), statistics.median(wall))


class Cases:
    """The data set and every case on it."""

    def __init__(self, source: Path, folder: Path, seeks: int) -> None:
        self.av, self.image = need("av"), need("PIL.Image")
        self.source, self.folder, self.seeks = source, folder, seeks
        self.videos = sorted(source.glob("videos/**/*.mp4"))
        self.tables = {path: frame_table(path) for path in self.videos}
        self.total = sum(map(len, self.tables.values()))

    def _pixels(self, frame: Any) -> Any:
        small = frame.to_image().resize((SIZE[1], SIZE[0]), self.image.Resampling.BILINEAR)
        return np.asarray(small)

    def sequential(self) -> int:
        """Every file in order into one .npy, as a script would."""
        path = self.folder / "plain.npy"
        out = np.lib.format.open_memmap(path, "w+", np.uint8, (self.total, *SIZE, 3))
        row = 0
        for video in self.videos:
            with self.av.open(str(video)) as container:
                container.streams.video[0].thread_type = "NONE"
                for frame in container.decode(video=0):
                    out[row] = self._pixels(frame)
                    row += 1
        out.flush()
        return row

    def seeking(self) -> int:
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
                self._pixels(next(f for f in container.decode(stream) if f.pts >= pts))
        return self.seeks

    def preprocess(self) -> int:
        """The whole conversion: states, actions and tasks too; hashes, fsync."""
        return lff.preprocess_robot(self.source, self.folder / "out", image_size=SIZE).frames

    def batches(self, read: Callable[[Any], object], flags: Any, n: int) -> int:
        """One epoch of two-frame samples in random order."""
        order = np.random.default_rng(1).permutation(n)
        for at in range(0, n, BATCH):
            read(lff.frame_pairs(flags, order[at : at + BATCH]).reshape(-1))
        return 2 * n


def run(source: Path, repeat: int, seeks: int) -> list[Row]:
    """All rows, groups in order."""
    with tempfile.TemporaryDirectory() as name:
        cases = Cases(source, Path(name), seeks)
        prepare = [
            measure("prepare", "PyAV + PIL loop into .npy", "none", repeat, cases.sequential),
            measure("prepare", "PyAV + PIL, seek per sample", "none", repeat, cases.seeking),
            measure("prepare", "preprocess_robot", "xxh3, pts, counts", repeat, cases.preprocess),
        ]
        with lff.Reader(Path(name) / "out" / "train.lfg") as reader:
            camera = next(f.name for f in reader.fields if f.kind == "image")
            pixels = np.load(Path(name) / "plain.npy", mmap_mode="r")[: len(reader)]
            out = np.empty((2 * BATCH, *SIZE, 3), np.uint8)

            def gather(check: bool) -> Callable[[Any], object]:
                return lambda ids: reader.gather(ids, camera, out=out[: len(ids)], check=check)

            def copy(ids: Any) -> object:
                return np.take(pixels, ids, axis=0, out=out[: len(ids)], mode="clip")

            readers = [("memmap gather", "none", copy), ("Reader.gather", "none", gather(False))]
            readers.append(("Reader.gather", "xxh3 per record", gather(True)))
            serve = [
                measure(
                    "batch", label, check, repeat, lambda r=r: cases.batches(r, reader.flags, len(reader))
                )
                for label, check, r in readers
            ]
    return [_with_ratio(row, group[0]) for group in (prepare, serve) for row in group]


def _with_ratio(row: Row, first: Row) -> Row:
    return Row(**asdict(row) | {"ratio": row.cpu / first.cpu})


def main() -> None:
    """Prints a Markdown table and writes the JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seeks", type=int, default=40)
    args = parser.parse_args()
    if "LF_ROBOT_DATA" not in os.environ:
        print("bench_robot: not run; LF_ROBOT_DATA names no LeRobot data set")
        return
    rows = run(Path(os.environ["LF_ROBOT_DATA"]), args.repeat, args.seeks)
    print(
        "| | case | check | frames/s of a core, median (lowest - highest) | wall | ratio |\n|---|---|---|---|---|---|"
    )
    for r in rows:
        spread = f"{r.cpu:.0f} ({r.lowest:.0f} - {r.highest:.0f})"
        print(f"| {r.group} | {r.name} | {r.check} | {spread} | {r.wall:.0f} | {r.ratio:.2f} |")
    machine = {"machine": platform.machine(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    versions = {name: version(name) for name in ("numpy", "av", "pillow", "pyarrow", "xxhash")}
    report = {"version": 1, "machine": machine | {"python": platform.python_version()}, "versions": versions}
    if args.json is not None:
        args.json.write_text(json.dumps(report | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
