"""Which format a path holds."""

from __future__ import annotations

import os

from ..errors import UnsupportedError
from ..typed import Collected
from .bundle import import_file, is_bundle
from .dcp_folder import METADATA, import_dcp
from .safetensors_files import import_safetensors
from .torch_file import import_torch, require_regular

_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")


def import_any(path: str | os.PathLike[str]) -> Collected:
    """Import a safetensors file or folder, a DCP folder, a torch.save file or a bundle, told apart by what is there.

    UnsupportedError when it is none of them; else what the import of that format raises.
    """
    path = os.path.realpath(path)
    if os.path.isdir(path):
        return import_dcp(path) if os.path.exists(os.path.join(path, METADATA)) else import_safetensors(path)
    if path.endswith(".safetensors"):
        return import_safetensors(path)
    try:
        require_regular(path)
        with open(path, "rb") as file:
            first = file.read(4)
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be read: {error}") from error
    if first[:4] == _TORCH_MAGIC[0] or first[:2] == _TORCH_MAGIC[1]:
        return import_torch(path)
    if is_bundle(path):
        return import_file(path)
    raise UnsupportedError(f"{path}: neither safetensors, torch.save, a DCP folder nor an .lfckpt bundle")
