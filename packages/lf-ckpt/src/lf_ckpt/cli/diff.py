"""`diff`: what changed between two steps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from ..catalog import Catalog
from ..compare import StepDiff, TensorDiff, compare
from ..reader import StepReader
from .common import GOOD, Commands, add_step, add_verb, catalog_at, chosen, emit, human, plain


def add(commands: Commands) -> None:
    """Add the verb."""
    text = "tensors added, removed and changed between two steps, and by how much"
    command = add_verb(commands, "diff", run, text)
    add_step(command, "a", nargs=None)
    add_step(command, "b", nargs=None)
    command.add_argument("--other", metavar="PATH", help="take step B from this store")


def run(catalog: Catalog, arguments: argparse.Namespace) -> int:
    """GOOD whether or not they differ (--json says `equal`)."""
    other = catalog
    if arguments.other is not None:
        other = catalog_at(arguments.other, None)
        other.identify()
    a, b = chosen(catalog, arguments.a)[-1], chosen(other, arguments.b)[-1]
    with (
        StepReader(catalog.files, catalog.steps, a) as before,
        StepReader(other.files, other.steps, b) as after,
    ):
        diff = compare(before, after)
    emit(arguments, {"equal": diff.equal, **asdict(diff)}, _lines(diff))
    return GOOD


def _lines(diff: StepDiff) -> Iterator[str]:
    for tensor in diff.tensors:
        if tensor.kind != "same":
            yield f"{tensor.kind:8} {plain(tensor.name)}  {_how(tensor)}"
    for name, kind in diff.items:
        yield f"{kind:8} item {plain(name)}"
    same = sum(tensor.kind == "same" for tensor in diff.tensors)
    verdict = "equal" if diff.equal else "different"
    yield f"{diff.before} -> {diff.after}: {verdict}; {same} of {len(diff.tensors)} tensors same"


def _how(tensor: TensorDiff) -> str:
    if tensor.elements is None or tensor.bytes is None:
        return " -> ".join(kind for kind in (tensor.before, tensor.after) if kind)
    words = [f"{tensor.before}", f"{tensor.elements} elements, {human(tensor.bytes)} differ"]
    words += [f"max |difference| {tensor.max_abs:g}"] if tensor.max_abs is not None else []
    words += [f"{tensor.nonfinite} not finite"] if tensor.nonfinite else []
    return "  ".join(words)
