"""`export`: a step as safetensors files, or as one self-contained .lfckpt file."""

from __future__ import annotations

import argparse
from typing import Literal

from ..catalog import Catalog
from ..errors import CkptError
from ..interop import export_file, export_safetensors
from ..interop.export import SHARD_BYTES
from ..opening import open as open_store
from .common import GOOD, Commands, add_verb, emit, human, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "write a step (the newest by default) as safetensors files, or as one portable .lfckpt file"
    command = add_verb(commands, "export", run, text)
    command.add_argument("step", metavar="STEP", nargs="?", type=int, help="a step")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--safetensors", metavar="FOLDER", help="new folder for safetensors files and their index"
    )
    target.add_argument("--lfckpt", metavar="FILE", help="new file that holds the whole step, items included")
    command.add_argument("--only", metavar="GLOB", action="append", help="names to export; may be repeated")
    command.add_argument(
        "--prefix", default="", help='safetensors: names that begin so, without it ("model.")'
    )
    command.add_argument(
        "--copy-ties", action="store_true", help="safetensors: write tied tensors once per name"
    )
    command.add_argument(
        "--max-shard-bytes",
        type=int,
        default=SHARD_BYTES,
        help="safetensors: size of a file (default %(default)s)",
    )
    command.add_argument(
        "--rank", type=int, default=0, help="whose values that are kept per rank go in (default %(default)s)"
    )
    command.add_argument("--canonical", action="store_true", help="lfckpt: the same bytes for the same state")


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Read only from the store; what is written appears complete or not at all."""
    _check(arguments)
    step: int | Literal["latest"] = "latest" if arguments.step is None else arguments.step
    with open_store(catalog.path, read_only=True, files=catalog.files) as store:
        if arguments.lfckpt:
            report = export_file(
                store,
                step,
                arguments.lfckpt,
                only=arguments.only,
                canonical=arguments.canonical,
                rank=arguments.rank,
            )
        else:
            report = export_safetensors(
                store,
                step,
                arguments.safetensors,
                max_shard_bytes=arguments.max_shard_bytes,
                only=arguments.only,
                prefix=arguments.prefix,
                ties="copy" if arguments.copy_ties else "metadata",
                rank=arguments.rank,
            )
    left = f", {report.left_out} left out" if report.left_out else ""
    tied = f", {len(report.aliases)} tied names" if report.aliases else ""
    total = human(sum(size for _, size in report.files))
    text = f"step {report.step}: {report.tensors} tensors{tied}{left}, {len(report.files)} files, {total}"
    emit(arguments, report.as_json(), [f"{plain(report.path)}: {text}"])
    return GOOD


def _check(arguments: argparse.Namespace) -> None:
    """No option is ignored."""
    if arguments.max_shard_bytes < 1:
        raise CkptError(f"export: --max-shard-bytes {arguments.max_shard_bytes}: at least 1")
    if arguments.lfckpt and (arguments.prefix or arguments.copy_ties):
        raise CkptError("export: --prefix and --copy-ties are for --safetensors")
    if arguments.safetensors and arguments.canonical:
        raise CkptError("export: --canonical is for --lfckpt")
