"""A step as plain safetensors files, streamed: no more than 1 MiB (a tensor, if it is sharded) is in memory at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from ..dtypes import ITEM_SIZE
from ..errors import CkptError
from ..files import FileLayer
from ..loading import entries_by_name
from ..manifest import TensorEntry
from ..naming import rename, select
from ..ranked import seen_by_one
from ..reader import StepReader
from ..storage import Storage
from ..store import Store
from .safetensors_files import INDEX
from .safetensors_format import SafeTensor, lay_out, pack_header
from .writing import ExportReport, publish_folder, raw_pieces

SHARD_BYTES = 5 << 30


def export_safetensors(
    store: Store,
    step: int | Literal["latest"],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    only: str | Sequence[str] | None = None,
    prefix: str = "",
    ties: Literal["metadata", "copy"] = "metadata",
    rank: int = 0,
    files: Storage | None = None,
) -> ExportReport:
    """Write a step into a new folder: `model.safetensors`, or numbered shards and `model.safetensors.index.json`.

    only: names or shell globs of the tensors to export. prefix: taken off the names; with `prefix="model."` (and no
    `only`) the weights that `collect` gave are exported under the names of the module. ties: "metadata" stores tied
    names once and notes the others as `safetensors.torch.save_model` does; "copy" writes each. A shard holds
    `max_shard_bytes` at most, or one tensor. The folder appears complete or not at all. JSON and bytes items are not
    exported. rank: whose tensors that are kept per rank come with it, under their plain names. Raises CorruptError (a
    step that does not verify), UnsupportedError and CkptError.
    """
    if ties not in ("metadata", "copy"):
        raise ValueError(f"ties={ties!r}: choose metadata or copy")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: at least 1")
    layer, path = files or FileLayer(), os.path.abspath(folder)
    with store._open_step(step) as reader:
        entries = entries_by_name(seen_by_one(reader.manifest, rank))
        chosen = select(entries, f"{prefix}*" if only is None and prefix else only)
        names = rename(chosen, lambda name: name.removeprefix(prefix))
        kept, aliases = _untie(entries, names, copy=ties == "copy")
        shards = split([(name, kept[name]) for name in sorted(kept)], max_shard_bytes)
        parts, index = _parts(layer, reader, shards, kept, aliases)
        try:
            publish_folder(layer, path, parts)
        except OSError as error:
            raise CkptError(f"{path}: cannot be written: {error}") from error
        return ExportReport(
            step=reader.manifest.step,
            path=path,
            files=index,
            tensors=len(kept),
            bytes_raw=sum(entry.nbytes for entry in kept.values()),
            aliases=tuple(sorted(aliases.items())),
            left_out=len(entries_by_name(reader.manifest)) - len(chosen),
        )


def split(tensors: Sequence[tuple[str, TensorEntry]], limit: int) -> list[list[str]]:
    """Names in their order, cut so that no shard exceeds `limit` bytes unless one tensor does. Pure."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in tensors:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.nbytes
    return shards


def _untie(
    entries: Mapping[str, TensorEntry], names: Mapping[str, str], *, copy: bool
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors to write by new name, and other new names of the same tensor -> the one written."""
    kept: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for old, new in names.items():
        entry = entries[old]
        if not copy and entry.name in first:
            aliases[new] = first[entry.name]
        else:
            first[entry.name] = new
            kept[new] = entry
    return kept, aliases


Part = tuple[str, Callable[[int], None]]


def _parts(
    layer: Storage,
    reader: StepReader,
    shards: list[list[str]],
    kept: Mapping[str, TensorEntry],
    aliases: Mapping[str, str],
) -> tuple[list[Part], tuple[tuple[str, int], ...]]:
    """Files to write, in order, and their (name, bytes)."""
    parts: list[Part] = []
    sizes: list[tuple[str, int]] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        placed = lay_out([(name, kept[name].dtype, kept[name].shape) for name in names])
        tied = {name: target for name, target in aliases.items() if target in set(names)}
        header = pack_header(placed, {"format": "pt", "lf_ckpt.step": str(reader.manifest.step), **tied})
        parts.append((file, partial(_write, layer, reader, header, placed, kept)))
        sizes.append((file, len(header) + (placed[-1].end if placed else 0)))
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(math.prod(e.shape) * ITEM_SIZE[e.dtype] for e in kept.values())
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(document, indent=2).encode() + b"\n"
        parts.append((INDEX, lambda fd: layer.write(fd, [text], 0)))
        sizes.append((INDEX, len(text)))
    return parts, tuple(sizes)


def _write(
    layer: Storage,
    reader: StepReader,
    header: bytes,
    placed: Sequence[SafeTensor],
    kept: Mapping[str, TensorEntry],
    fd: int,
) -> None:
    layer.write(fd, [header], 0)
    at = len(header)
    for tensor in placed:
        for piece in raw_pieces(reader, kept[tensor.name]):
            layer.write(fd, [piece.data], at)
            at += piece.size
