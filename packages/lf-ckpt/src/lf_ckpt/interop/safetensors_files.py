"""Reading safetensors files and folders of them, without the safetensors package."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Mapping
from typing import Final

import torch

from ..dtypes import dtype_of
from ..errors import CkptError, CorruptError
from ..files import FileLayer, read_all
from ..typed import Collected
from .safetensors_format import SafeHeader, SafeTensor, header_bytes, parse_header

INDEX: Final = "model.safetensors.index.json"
_INDEX_LIMIT: Final = 256 << 20
_ABOUT_THE_FILE: Final = frozenset({"format", "lf_ckpt.step"})  # in the metadata, and never a tied name
_PLAIN_NAME: Final = re.compile(r"[^/\0]+\.safetensors")


def import_safetensors(path: str | os.PathLike[str], prefix: str = "") -> Collected:
    """Tensors of a file, or of a folder (by its index, or all `*.safetensors` in it), with `prefix` before each name.

    The tensors are views of private maps of the files: reading them reads the disk, changing them changes no file.
    Names that `save_model` left out because they are tied come back tied. `__metadata__` becomes the item
    "safetensors.metadata". Raises CorruptError, UnsupportedError (element types) and CkptError.
    """
    path = os.path.realpath(path)
    files = FileLayer()
    try:
        names = _chosen(files, path) if os.path.isdir(path) else {path: None}
        tensors: dict[str, torch.Tensor] = {}
        metadata: dict[str, str] = {}
        for file, wanted in names.items():
            header, found = read_safetensors(files, file, wanted)
            if twice := tensors.keys() & found.keys():
                raise CorruptError(file, "another file of the folder has this tensor too", tensor=min(twice))
            tensors |= found
            metadata |= header.metadata
    except OSError as error:
        raise CkptError(f"{path}: cannot be read: {error}") from error
    tied = {
        name: kept
        for name, kept in metadata.items()
        if kept in tensors and name not in tensors and name not in _ABOUT_THE_FILE
    }
    tensors |= {name: tensors[kept] for name, kept in tied.items()}
    rest = {name: text for name, text in metadata.items() if name not in tied}
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    return Collected(named, {"safetensors.metadata": rest} if rest else {})


def read_safetensors(
    files: FileLayer, path: str, wanted: set[str] | None = None
) -> tuple[SafeHeader, dict[str, torch.Tensor]]:
    """Header and tensors of one file; of `wanted` only, each of which must be there."""
    fd = files.open(path)
    try:
        size = files.size(fd)
        first = bytearray(8)
        length = header_bytes(bytes(first[: files.read(fd, memoryview(first), 0)]), size, path)
        text = bytearray(length)
        files.read(fd, memoryview(text), 8)
        start = 8 + length
        header = parse_header(bytes(text), size - start, path)
        # Private and writable, because torch has no read-only tensors.
        data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        files.close(fd)
    known = {tensor.name for tensor in header.tensors}
    if wanted is not None and not wanted <= known:
        raise CorruptError(path, "the index names a tensor that is not here", tensor=min(wanted - known))
    chosen = [t for t in header.tensors if wanted is None or t.name in wanted]
    return header, {tensor.name: _view(data, start, tensor) for tensor in chosen}


def _view(data: mmap.mmap, start: int, tensor: SafeTensor) -> torch.Tensor:
    dtype, count = dtype_of(tensor.dtype), tensor.end - tensor.begin
    if count == 0:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start + tensor.begin)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(tensor.shape)


def _chosen(files: FileLayer, folder: str) -> Mapping[str, set[str] | None]:
    """Files of a folder -> their tensors, None for all."""
    index = os.path.join(folder, INDEX)
    if not files.exists(index):
        found = sorted(name for name in files.names(folder) if name.endswith(".safetensors"))
        if not found:
            raise CkptError(f"{folder}: holds no .safetensors file")
        return {os.path.join(folder, name): None for name in found}
    data = read_all(files, index, _INDEX_LIMIT)
    chosen: dict[str, set[str] | None] = {}
    try:
        for name, file in json.loads((data or b"").decode("utf-8"))["weight_map"].items():
            if not _PLAIN_NAME.fullmatch(file):
                raise ValueError(f"file name {file[:40]!r}")
            wanted = chosen.setdefault(os.path.join(folder, file), set())
            assert wanted is not None
            wanted.add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(index, f"index cannot be read: {type(error).__name__} {error}") from error
    return chosen
