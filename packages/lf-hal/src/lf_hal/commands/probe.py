"""`lf-hal probe`: every backend, its state and the reason."""

from __future__ import annotations

import argparse
import json

from lf_hal.probe import Devices, Probe, probe

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.add_argument(
        "--require", metavar="DEVICE", help="exit 1 unless this device, such as npu:0, can be used"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each backend")


def run(args: argparse.Namespace) -> int:
    """Print all backends; a device that is required and not there is a DeviceUnavailableError after that."""
    probes = probe(args.timeout)
    if args.json:
        print(json.dumps({"version": 1, "probes": [p.describe() for p in probes]}, indent=2))
    else:
        print("\n".join(_text(p) for p in probes))
    if args.require:
        Devices(lambda: probes).require(args.require)
    return 0


def _text(found: Probe) -> str:
    lines = [f"{found.backend:<8} {found.state:<19} {found.reason} [{found.evidence}]"]
    if found.versions:
        lines.append("         " + ", ".join(f"{k} {v}" for k, v in found.versions.items()))
    if found.missing:
        lines.append(f"         stage {found.stage!r}, not found: {', '.join(found.missing)}")
    lines += [f"         note: {note}" for note in found.notes]
    return "\n".join([*lines, *([f"         what to do: {found.fix}"] if found.fix else [])])
