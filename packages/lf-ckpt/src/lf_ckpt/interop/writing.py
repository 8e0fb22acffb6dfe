"""Writing files of other shapes out of a step: raw bytes streamed, appearance all or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..boxes import whole
from ..codec import Bytes
from ..commit import TEMPORARY, choose_commit
from ..dtypes import dtype_of
from ..errors import CkptError
from ..filling import Filler, flat_bytes
from ..format import EXTENT_BYTES
from ..local import Window
from ..manifest import BlobEntry, TensorEntry
from ..reader import StepReader, new_scratch
from ..storage import Storage


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. files: (name, bytes). aliases: tied names, stored once. left_out: tensors not asked for."""

    step: int
    path: str
    files: tuple[tuple[str, int], ...]
    tensors: int
    bytes_raw: int
    aliases: tuple[tuple[str, str], ...] = ()
    left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"version": 1, **asdict(self)}


def raw_pieces(reader: StepReader, entry: TensorEntry | BlobEntry) -> Iterator[Bytes]:
    """The raw bytes of a tensor or bytes item, in order, 1 MiB or less at a time, hashes checked.

    A piece is overwritten by the next one. A tensor of several shards is put together in memory first.
    """
    if isinstance(entry, TensorEntry) and len(entry.shards) > 1:
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
        with Filler(reader, 1, verify=True) as filler:
            filler.fill_window(entry, Window(tensor, whole(entry.shape)))
        data = flat_bytes(tensor)
        yield from (data[at : at + EXTENT_BYTES] for at in range(0, data.size, EXTENT_BYTES))
        return
    scratch, out = new_scratch(), new_scratch()
    for placed, _ in entry.runs():
        for file, number, extent in reader.extents_of(placed):
            piece = out[: extent.raw_bytes]
            reader.read(file, number, piece, scratch, entry.name, verify=True)
            yield piece


def publish_file(files: Storage, path: str, write: Callable[[int], None]) -> None:
    """`write` a new file that appears complete, durable and under its name, or not at all. CkptError if it is there."""
    if files.exists(path):
        raise CkptError(f"{path}: is there already; nothing was written")
    temporary = path if files.traits.whole else path + TEMPORARY
    try:
        _write_synced(files, temporary, write)
        if temporary != path:
            files.rename(temporary, path)
            choose_commit(files).sync_dir(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise


def publish_folder(files: Storage, path: str, parts: Sequence[tuple[str, Callable[[int], None]]]) -> None:
    """The same for a folder of files."""
    if files.exists(path):
        raise CkptError(f"{path}: is there already; nothing was written")
    temporary, commit = path + TEMPORARY, choose_commit(files)
    if files.exists(temporary):
        raise CkptError(f"{temporary}: left by an export that was cut off; remove it")
    files.mkdir(temporary)
    try:
        for name, write in parts:
            _write_synced(files, os.path.join(temporary, name), write)
        commit.sync_dir(temporary)
        files.rename(temporary, path)
        commit.sync_dir(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            for name in files.names(temporary):
                files.unlink(os.path.join(temporary, name))
            files.rmdir(temporary)
        raise


def _write_synced(files: Storage, path: str, write: Callable[[int], None]) -> None:
    fd = files.create(path)
    try:
        write(fd)
        files.sync(fd)
    finally:
        files.close(fd)
