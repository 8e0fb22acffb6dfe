#!/usr/bin/env python3
"""Token batches from a warm page cache: LoongDataLoader beside other loaders, in one run.

    bench_iouring.py [--peers PYTHON] [--json OUT] [--tried] [--repeat N] [--seconds S] [--records N] [--root DIR]

Job: batches of 8 random records of 2048 uint16 ids. Each library runs in a process of its own with its own store of
the same ids; one pass of each row a round, so that a busy machine slows all of them. Rates are ids delivered a second
of wall time without start-up, and a second of CPU time of the process and its workers; medians over the rounds.
Only lf-iouring and ArrayRecord check hashes. The group "large batches, cut" asks for 512 rows at once and cuts them
into batches; "cold" drops the file from the page cache first. --tried adds the configurations that lost.

PYTHON is the interpreter of an environment with peers/requirements.txt (default: LF_PEERS_PYTHON, which nox sets).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers import report
from peers.rounds import Peer, Row, measure
from peers.serve import IN_PROCESS, LARGE, WORKERS
from peers.tokens import Job, write

OURS = ("numpy_memmap", "torch_loader", "ours")
LIBRARIES = ("mds", "hf_datasets", "lit_data", "web_dataset", "grain_records")
ANCHOR = "numpy memmap gather"


def bars_of(rows: Sequence[Row]) -> list[report.Bar]:
    """The bars of this package, each against the fastest configuration that was found."""

    def one(peer: str, name: str, group: str = IN_PROCESS) -> Row:
        found = (row for row in rows if (row.peer, row.name, row.group) == (peer, name, group))
        return next(found, Row(name, peer, group, error="not run"))

    def of(peers: Sequence[str], group: str) -> list[Row]:
        return [row for row in rows if row.peer in peers and row.group == group]

    ours, anchor = one("ours", "lf-iouring, raw"), one("numpy_memmap", ANCHOR)
    large = one("ours", "lf-iouring, raw", LARGE)
    zstd = one("ours", "lf-iouring, zstd, in file order").core / 1e6
    bars = [
        report.ratio_bar("of the memmap gather", 0.45, ours, [anchor]),
        report.ratio_bar("over torch DataLoader, no workers", 1.3, ours, of(["torch_loader"], IN_PROCESS)),
        report.ratio_bar("over sample-format libraries in-process", 5, ours, of(LIBRARIES, IN_PROCESS)),
        report.ratio_bar("over them with worker processes", 20, ours, of(LIBRARIES, WORKERS)),
        report.ratio_bar("over torch DataLoader with workers", None, ours, of(["torch_loader"], WORKERS)),
        report.ratio_bar("large batches, over libraries", None, large, of(LIBRARIES, LARGE)),
        report.ratio_bar("large batches, over torch DataLoader", None, large, of(["torch_loader"], LARGE)),
    ]
    if zstd:
        bars.append(report.Bar("zstd, Mtok/s a core", 200, zstd, zstd, zstd, "each block decoded once"))
    return [bar for bar in bars if bar is not None]


def start(root: Path, peers: str | None) -> list[Peer]:
    """One process after the other, because each writes its store first."""
    started = [Peer(sys.executable, name, root) for name in OURS]
    if peers is None:
        print("sample-format libraries are SKIPPED: no --peers PYTHON with peers/requirements.txt")
        return started
    return started + [Peer(peers, name, root) for name in LIBRARIES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", default=os.environ.get("LF_PEERS_PYTHON"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--records", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a pass")
    parser.add_argument("--tried", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        job = Job(Path(folder), args.records, args.length, args.batch)
        write(job)
        peers = start(job.root, args.peers)
        try:
            rows = measure(peers, args.repeat, args.seconds, args.tried)
        finally:
            for peer in peers:
                peer.close()
    info, bars = report.machine(), bars_of(rows)
    size = args.records * args.length * 2 / 1e6
    print(report.heading(info, peers, f"{args.batch} x {args.length} uint16 of {size:.0f} MB"))
    anchor = next(row for row in rows if row.name == ANCHOR)
    print(report.table(rows, anchor, "Mtok", 1e6), report.bar_table(bars), sep="\n\n")
    if args.json:
        settings = {k: getattr(args, k) for k in ("records", "length", "batch", "repeat", "seconds")}
        args.json.write_text(json.dumps(report.report(info, settings, peers, rows, bars), indent=1))
    if any(row.error for row in rows):
        raise SystemExit("some rows failed; see the table")


if __name__ == "__main__":
    main()
