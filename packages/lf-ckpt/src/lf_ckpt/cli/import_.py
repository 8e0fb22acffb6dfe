"""`import`: safetensors, a torch.save file, a DCP folder or a bundle becomes a step of a store."""

from __future__ import annotations

import argparse

import torch

from ..catalog import Catalog
from ..errors import CkptError
from ..interop import import_any
from ..opening import open as open_store
from ..store import STEP_LIMIT
from ..typed import Collected
from .common import GOOD, Commands, add_verb, emit, human, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    text = (
        "save a safetensors file or folder, torch.save file, DCP folder or .lfckpt file as a step of a store"
    )
    command = add_verb(commands, "import", run, text)
    command.add_argument(
        "source", metavar="SOURCE", help="file or folder; the format is told from its content"
    )
    command.add_argument("--step", type=int, required=True, help="number of the new step")
    command.add_argument("--prefix", default="", help='put before every tensor name ("model.")')
    command.set_defaults(needs_store=False)


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """Take the writer's lock, save, wait until it is durable. A step that is there already is not superseded."""
    if not 0 <= arguments.step < STEP_LIMIT:
        raise CkptError(f"import: --step {arguments.step}: a whole number from 0 to 10**18 - 1")
    tensors, items = import_any(arguments.source)
    named = Collected({arguments.prefix + name: tensor for name, tensor in tensors.items()}, items)
    with open_store(catalog.path, files=catalog.files) as store:
        if arguments.step in store.steps():
            raise CkptError(f"{catalog.path}: step {arguments.step} is there already; choose another number")
        report = store.save(arguments.step, *named).wait()
    size = sum(tensor.nbytes for tensor in _once(named.tensors))
    text = f"step {report.step}: {len(tensors)} tensors, {len(items)} items, {human(size)}"
    emit(arguments, report.as_json(), [f"{plain(catalog.path)}: {text}"])
    return GOOD


def _once(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tied tensors counted once."""
    return list({id(tensor): tensor for tensor in tensors.values()}.values())
