"""`lf-hal top` and `loongarch-smi`: utilisation of CPUs, nodes and accelerators, live or once."""

from __future__ import annotations

import argparse
import json
import sys
import time

from lf_hal.top import Monitor, table

__all__ = ["arguments", "run"]

_FEW_CPUS = 32


def _seconds(text: str) -> float:
    """An interval that a table can be read in, and a sleep can take."""
    seconds = float(text)
    if not 0.01 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: give 0.01 to 86400 seconds")
    return seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--once", action="store_true", help="one table, of one interval")
    parser.add_argument("--json", action="store_true", help="JSON, one object a line")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between looks")
    parser.add_argument(
        "--cpus", action="store_true", help=f"a line for each CPU also where there are over {_FEW_CPUS}"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table each interval until interrupted, which is the usual end and exit code 0."""
    monitor = Monitor()
    screen = sys.stdout.isatty() and not args.json and not args.once
    try:
        while True:
            time.sleep(args.interval)
            snapshot = monitor.look()
            few = sum(row.device.startswith("cpu") for row in snapshot.rows) <= _FEW_CPUS
            text = json.dumps(snapshot.describe()) if args.json else table(snapshot, args.cpus or few)
            print(("\x1b[H\x1b[2J" if screen else "") + text, flush=True)
            if args.once:
                return 0
    except KeyboardInterrupt:
        return 0
