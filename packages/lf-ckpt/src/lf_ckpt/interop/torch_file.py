"""Reading files of torch.save: tensors and plain data, never code."""

from __future__ import annotations

import os
import pickle
import stat
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CkptError, CorruptError, UnsupportedError
from ..jsonio import Json
from ..typed import Collected, pack

_CRC_CHUNK = 8 << 20


def import_torch(path: str | os.PathLike[str], prefix: str = "", *, verify: bool = True) -> Collected:
    """What `torch.save` wrote, read with weights_only=True: named tensors and JSON items.

    A state dict gives its tensors, nested ones joined with dots: {"model": {"w": ...}} gives "model.w". Whatever is not
    a tensor becomes an item by its top-level key; `lf_ckpt.unpack(items[key], tensors)` gives the object back as was,
    lists and number keys included (an optimizer's state_dict). Tensors are maps of the file where it allows that, and
    ties are kept. verify: check the CRC-32 of every part, which torch.load does not.
    Raises CorruptError, UnsupportedError (an object that is neither tensor nor data) and CkptError.
    """
    path = os.path.realpath(path)
    try:
        require_regular(path)
        with open(path, "rb") as file:
            archive = file.read(4) == b"PK\x03\x04"
        if archive and verify:
            _check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except OSError as error:
        raise CkptError(f"{path}: cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            f"{path}: holds an object that is neither tensor nor plain data: {error}"
        ) from error
    except CkptError:
        raise
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise CorruptError(path, f"torch.load cannot read it: {error}") from error
    if not isinstance(loaded, Mapping):
        raise UnsupportedError(f"{path}: holds a {type(loaded).__name__}; a mapping of names is needed")
    return flatten(loaded, prefix)


def require_regular(path: str) -> None:
    """OSError for what is no file: opening a FIFO waits for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("not a regular file")


def flatten(state: Mapping[Any, Any], prefix: str = "") -> Collected:
    """Nested state as named tensors and items; see `import_torch`. CkptError when two places get one name."""
    tensors: dict[str, torch.Tensor] = {}
    items: dict[str, Json] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        packed, found = pack(value, name)
        if twice := tensors.keys() & found.keys():
            raise CkptError(f"two tensors would be called {min(twice)!r}")
        tensors |= found
        if not _only_tensors(value):
            items[name] = packed
    return Collected(tensors, items)


def _only_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(k, str) and _only_tensors(v) for k, v in value.items())
    return isinstance(value, torch.Tensor)


def _check_archive(path: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                with archive.open(part) as stream:
                    while stream.read(_CRC_CHUNK):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CorruptError(path, f"{error} (verify=False takes it as it is)") from error
