"""`lf-hal evidence`: what lf-hal claims, and how far each claim is proved."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lf_hal.evidence import CAPABILITIES, MEANING

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the table of capabilities."""
    if args.json:
        print(json.dumps({"version": 1, "capabilities": [asdict(row) for row in CAPABILITIES]}, indent=2))
        return 0
    for row in CAPABILITIES:
        limit = f" ({row.limit})" if row.limit else ""
        print(f"{row.name:<22} {row.evidence:<14} {row.what}{limit}")
    print()
    for level, meaning in MEANING.items():
        print(f"{level:<14} {meaning}")
    return 0
