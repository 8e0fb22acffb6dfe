#!/usr/bin/env python3
"""Robot batches from a warm page cache: samples of two consecutive frames, ours beside decoding.

    bench_multimodal.py [--json OUT] [--tried] [--repeat N] [--seconds S] [--frames N] [--root DIR]

Job: batches of 16 random samples; each has two consecutive 224 x 224 x 3 uint8 frames, state [7] and action [16, 7]
in float32, and 16 mask bits. Each way runs in a process of its own; one pass of each row a round. Rates are samples a
second of wall time without start-up, and a second of CPU time of the process and its workers; medians over the rounds.
The anchor copies the same bytes from memory-mapped arrays into reused ones, unchecked. Needs av and pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from peers import report
from peers.frames import HORIZON, SIZE, STATE, Job, write
from peers.rounds import Peer, measure

PROCESSES = ("frames_copy", "frames_ours", "frames_av", "frames_jpeg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--frames", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a pass")
    parser.add_argument("--tried", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        job = Job(Path(folder), args.frames, args.batch)
        write(job)
        peers = [Peer(sys.executable, name, job.root) for name in PROCESSES]
        try:
            rows = measure(peers, args.repeat, args.seconds, args.tried)
        finally:
            for peer in peers:
                peer.close()
    anchor = next(row for row in rows if row.peer == "frames_copy")
    ours = next(row for row in rows if row.peer == "frames_ours")
    bars = [bar for bar in [report.ratio_bar("of the memcpy gather", 0.5, ours, [anchor])] if bar]
    info = report.machine()
    sample = 2 * SIZE * SIZE * 3 + 4 * STATE * (1 + HORIZON) + HORIZON // 8
    size = args.frames * SIZE * SIZE * 3 / 1e6
    print(
        report.heading(info, peers, f"{args.batch} samples of {sample} bytes, {size:.0f} MB of frames"),
        report.table(rows, anchor, "sample", 1.0),
        report.bar_table(bars),
        sep="\n\n",
    )
    if args.json:
        settings = {k: getattr(args, k) for k in ("frames", "batch", "repeat", "seconds")}
        args.json.write_text(json.dumps(report.report(info, settings, peers, rows, bars), indent=1))
    if any(row.error for row in rows):
        raise SystemExit("some rows failed; see the table")


if __name__ == "__main__":
    main()
