"""`lf-hal COMMAND`: one row per subcommand; only the module of the one that is called gets imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lf_hal.errors import HalError

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A subcommand: its module has `arguments(parser)` and `run(args) -> int`."""

    name: str
    help: str
    module: str


COMMANDS: tuple[Command, ...] = (
    Command("top", "how busy CPUs, NUMA nodes and accelerators are", "lf_hal.commands.top"),
    Command("probe", "which devices can be used here, and why the others cannot", "lf_hal.commands.probe"),
    Command(
        "spec", "vector width, caches and on-chip memory of a device, with sources", "lf_hal.commands.spec"
    ),
    Command(
        "compile", "a torch program becomes C and a library or program of a target", "lf_hal.commands.compile"
    ),
    Command(
        "profile", "time, rates and hardware counters of each step of an artefact", "lf_hal.commands.profile"
    ),
    Command("evidence", "what lf-hal claims, and how far each claim is proved", "lf_hal.commands.evidence"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry. Returns what the command does: 0, or 1 for a refused request (a HalError) or a failed system
    call; 2 for wrong usage; 130 when interrupted; 141 when the output is not read to its end."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="lf-hal", description="Devices, and a compiler to C with the same bits on all of them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = next((word for word in given if not word.startswith("-")), None)
    for row in COMMANDS:
        below = commands.add_parser(row.name, help=row.help, description=row.help)
        if row.name == chosen:
            module = importlib.import_module(row.module)
            module.arguments(below)
            below.set_defaults(run=module.run)
    args = parser.parse_args(given)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("lf-hal: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own flush at the end must not fail again
        return 141
    except (HalError, OSError) as error:
        print(f"lf-hal: {error}", file=sys.stderr)
        return 1
    return code


def loongarch_smi() -> int:
    """`loongarch-smi`: `lf-hal top --once` under the name that users of other tools look for."""
    return main(["top", "--once", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
