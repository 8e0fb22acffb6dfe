"""`lf-hal spec NAME`: what is known of a device, and from where."""

from __future__ import annotations

import argparse
import json

from lf_hal.spec import FACTS, names, spec

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "name", nargs="?", default="host", help=f"one of {', '.join(names())}, or a driver's name"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print one device, each field with its source; what nobody states is shown as unknown."""
    found = spec(args.name)
    if args.json:
        print(json.dumps({"version": 1, **found.describe()}, indent=2))
        return 0
    print(f"{found.name} ({found.kind}), evidence: {found.evidence}")
    if found.refused:
        print(f"REFUSED: {found.refused}")
    if found.note:
        print(f"note: {found.note}")
    for key in FACTS:
        value, origin = getattr(found, key), found.origins.get(key)
        shown = "unknown" if value is None else value
        print(f"  {key:<12} {shown}" + (f"  [{origin.how}: {origin.source}]" if origin else ""))
    return 0
