"""Reading folders of torch.distributed.checkpoint (`.metadata` and `*.distcp`) without running what they hold.

`.metadata` is a pickle. It is read by an unpickler that admits a few names, and gives stand-ins for all of them: no
attribute of torch is reachable from the file, and nothing of ours changes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable
from typing import Any, Final

import torch

from ..boxes import Box, cover_problem
from ..dtypes import name_of
from ..errors import CkptError, CorruptError, UnsupportedError
from ..files import FileLayer, read_all
from ..typed import Collected, pack
from ..windows import part_of

METADATA: Final = ".metadata"
_METADATA_LIMIT: Final = 1 << 30
_META = "torch.distributed.checkpoint.metadata"
_RECORDS: Final = frozenset(
    {
        *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *(
            (_META, name)
            for name in ("ChunkStorageMetadata", "MetadataIndex", "TensorProperties", "StorageMeta")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    }
)


def import_dcp(path: str | os.PathLike[str]) -> Collected:
    """Tensors and plain data of a DCP folder, whole whatever ranks wrote it, in host memory.

    Names are those of the state dict, nested ones joined with dots. Bytes items that are plain data (weights_only)
    become items, packed as `lf_ckpt.pack` does. Raises CorruptError, UnsupportedError and CkptError.
    """
    path, files = os.path.realpath(path), FileLayer()
    try:
        metadata = _read_metadata(files, os.path.join(path, METADATA))
        with _Folder(files, path, metadata) as folder:
            return folder.everything()
    except FileNotFoundError as error:
        raise CkptError(f"{path}: not a whole DCP folder: {error}") from error
    except OSError as error:
        raise CkptError(f"{path}: cannot be read: {error}") from error


class _Record:
    """Stands for an object of torch.distributed.checkpoint; its state becomes attributes of the instance."""

    arguments: Any = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # TensorProperties gives a tuple: (dtype, layout, ...)
            self.arguments = state

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Record) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        """What a MetadataIndex is: a name, offsets, a number. Anything nested could be hashed for ever."""
        return tuple((k, _plain(v)) for k, v in sorted(self.__dict__.items()))


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return value
    raise pickle.UnpicklingError(f"a key of the metadata holds a {type(value).__name__}")


class _Unpickler(pickle._Unpickler):
    """Admits the records above, sizes and element types; everything else is an error.

    The one written in Python: that in C takes 16 bytes times the largest memo number that a file names.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(
                name, (_Record,), {}
            )  # a new class each time: what a file does to it stays in its load
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        stand_in = _FUNCTIONS.get((module, name))
        if stand_in is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return stand_in()

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids are not allowed")


def _sizes() -> Callable[..., tuple[int, ...]]:
    return lambda sizes=(): tuple(sizes)


def _anything() -> Callable[..., None]:
    return lambda *arguments: None


_FUNCTIONS: Final[dict[tuple[str, str], Callable[[], Callable[..., Any]]]] = {
    ("torch", "Size"): _sizes,
    ("torch.serialization", "_get_layout"): _anything,
    ("torch", "strided"): _anything,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _anything,
    ("collections", "OrderedDict"): lambda: lambda *pairs: dict(*pairs),
    ("pathlib", "PosixPath"): lambda: lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda: lambda *parts: "/".join(parts),
}


def _read_metadata(files: FileLayer, path: str) -> Any:
    data = read_all(files, path, _METADATA_LIMIT)
    if data is None:
        raise CorruptError(path, "metadata is too large", expected=f"<= {_METADATA_LIMIT}")
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CorruptError(path, f"metadata cannot be read: {type(error).__name__} {error}") from error


class _Folder:
    """The data files of a folder, opened when they are needed."""

    def __init__(self, files: FileLayer, path: str, metadata: Any) -> None:
        self._files, self._path, self._metadata = files, path, metadata
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            self._files.close(fd)

    def everything(self) -> Collected:
        """All tensors and items."""
        tensors: dict[str, torch.Tensor] = {}
        items: dict[str, Any] = {}
        path = os.path.join(self._path, METADATA)
        try:
            entries = dict(self._metadata.state_dict_metadata)
            places = {_place_key(key): place for key, place in self._metadata.storage_data.items()}
            for name, entry in entries.items():
                if type(entry).__name__ == "BytesStorageMetadata":
                    items[name] = self._load(name, places[name, None])
                else:
                    tensors[name] = self._tensor(name, entry, places)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptError(path, f"metadata does not fit: {type(error).__name__} {error}") from error
        for name, value in list(items.items()):
            items[name], nested = pack(value, name)
            if twice := tensors.keys() & nested.keys():
                raise CkptError(f"two tensors would be called {min(twice)!r}")
            tensors |= nested
        return Collected(tensors, items)

    def _tensor(self, name: str, entry: Any, places: dict[Any, Any]) -> torch.Tensor:
        shape, dtype = _counts(entry.size), _dtype(entry.properties)
        name_of(dtype)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype, device="cpu")
        boxes = [Box(_counts(chunk.offsets), _counts(chunk.sizes)) for chunk in entry.chunks]
        boxes = [box for box in boxes if box.volume]
        if (problem := cover_problem(shape, boxes)) is not None:
            raise ValueError(f"{name}: {problem}")
        single = len(boxes) == 1
        found = [
            (box, places.get((name, box.offsets)) or (places[name, None] if single else None))
            for box in boxes
        ]
        # Nothing is allocated for sizes that the data files cannot have.
        if any(place is None or place.length < box.volume * dtype.itemsize for box, place in found):
            raise ValueError(f"{name}: a part has no place or too small a one")
        if single:
            return self._part(name, *found[0], dtype)
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        for box, place in found:
            part_of(whole, box).copy_(self._part(name, box, place, dtype))
        return whole

    def _part(self, name: str, box: Box, place: Any, dtype: torch.dtype) -> torch.Tensor:
        part = self._load(name, place)
        if not isinstance(part, torch.Tensor) or (part.dtype, tuple(part.shape)) != (dtype, box.shape):
            raise ValueError(f"{name}: the data file holds another tensor")
        return part

    def _load(self, name: str, place: Any) -> Any:
        """What torch.save put at a place, weights_only."""
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(f"{self._path}: {name}: stored through extensions (compression) of DCP")
        offset, length = _counts((place.offset, place.length))
        fd = self._fd(place.relative_path)
        path = os.path.join(self._path, place.relative_path)
        if offset + length > self._files.size(fd):
            raise CorruptError(path, "file is cut", tensor=name, offset=offset, expected=length)
        data = bytearray(length)
        self._files.read(fd, memoryview(data), offset)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsupportedError(
                f"{self._path}: {name} is neither tensor nor plain data: {error}; leave it out of the state dict"
            ) from error
        except Exception as error:  # torch.load raises many kinds for damaged bytes
            raise CorruptError(
                path, f"torch.load cannot read it: {error}", tensor=name, offset=offset
            ) from error

    def _fd(self, name: str) -> int:
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"file name {name!r}")
        if name not in self._open:
            self._open[name] = self._files.open(os.path.join(self._path, name))
        return self._open[name]


def _place_key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """(name, offsets of the part); a plain tensor and an item have none. torch drops fields that are None."""
    offset = getattr(index, "offset", None)
    return index.fqn, None if offset is None else tuple(offset)


def _counts(values: Any) -> tuple[int, ...]:
    counts = tuple(values)
    if not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in counts):
        raise ValueError(f"sizes {counts!r}")
    return counts


def _dtype(properties: Any) -> torch.dtype:
    found = properties.arguments[0] if properties.arguments else properties.dtype
    if not isinstance(found, torch.dtype):
        raise ValueError("no element type")
    return found
