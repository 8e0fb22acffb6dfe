"""Tokenized .npz files: input_ids (2-D, flat or ragged), optional attention_mask and loss_mask."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError

Array = npt.NDArray[Any]
_NDARRAY = object()  # stands for numpy.ndarray in a pickle; not callable, so no array of a hostile size
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")


def _empty_array(kind: object, shape: object, code: object) -> Array:
    """What a pickled array starts as; its state follows and is checked by numpy against its data."""
    if kind is not _NDARRAY or shape != (0,) or code not in (b"b", "b"):
        raise pickle.UnpicklingError("array of an unexpected kind")
    return np.ndarray((0,), "b")


class _ArraysOnly(pickle.Unpickler):
    """Admits numpy arrays, their scalars and plain Python values; every other global is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return _NDARRAY
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in _MULTIARRAY and name == "_reconstruct":
            return _empty_array
        if module in _MULTIARRAY and name == "scalar":
            return np.int64(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name} is not admitted: only numpy arrays are")


def npz_members(path: Path) -> list[str]:
    """Names of the arrays in `path`, without loading any; InputError for no zip file or equal names."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except (
        Exception
    ) as error:  # a damaged directory raises BadZipFile, NotImplementedError, UnicodeDecodeError, ...
        raise InputError(f"not an .npz file: {error}", path=path) from None
    if len(set(names)) < len(names):
        raise InputError("two arrays of one name", path=path, found=sorted(names))
    return names


def npz_documents(path: Path) -> Iterator[tuple[str, Array, Array | None]]:
    """(name, ids, loss mask or None) of every document in `path`; padding by attention_mask is cut.

    A 2-D array or a 1-D object array holds one document a row, a 1-D integer array is one document.

    Raises:
        InputError: naming file and document: no input_ids, rows that do not match, a hole in attention_mask,
            a pickle with anything but arrays.
    """
    arrays = {name: _member(path, name) for name in npz_members(path)}
    if "input_ids" not in arrays:
        raise InputError("no input_ids in this .npz", path=path, expected="input_ids", found=sorted(arrays))
    rows = _rows(arrays["input_ids"], path, "input_ids")
    attention = _matching(arrays.get("attention_mask"), len(rows), path, "attention_mask")
    losses = _matching(arrays.get("loss_mask"), len(rows), path, "loss_mask")
    for i, row in enumerate(rows):
        name = f"{path}[{i}]"
        ids, loss = _vector(row, name), None if losses is None else _vector(losses[i], name)
        keep = slice(0, len(ids)) if attention is None else _kept(_vector(attention[i], name), len(ids), name)
        if loss is not None and len(loss) != len(ids):
            raise InputError(
                "loss_mask must match input_ids", document=name, expected=len(ids), found=len(loss)
            )
        yield name, ids[keep], None if loss is None else loss[keep]


def largest_id(path: Path) -> int:
    """Largest id in the documents of `path`, -1 when it has none."""
    return max(
        (int(ids.max()) for _, ids, _ in npz_documents(path) if ids.size and ids.dtype.kind in "iu"),
        default=-1,
    )


def _member(path: Path, name: str) -> Array:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            return _read_array(file)
    except (
        Exception
    ) as error:  # a hostile zip, header or pickle may raise anything; it must stay one typed error
        raise InputError(f"array {name} cannot be read: {error}", path=path) from None


def _read_array(file: IO[bytes]) -> Array:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if min(shape, default=0) < 0:  # reshape would take -1 as a wildcard
        raise ValueError(f"shape {shape}")
    if dtype.hasobject:
        value = _ArraysOnly(file).load()
        if not isinstance(value, np.ndarray) or value.shape != shape:
            raise ValueError(f"expected an object array of shape {shape}")
        return value
    # What was really stored bounds the allocation, not what the header says.
    return np.frombuffer(file.read(), dtype).reshape(shape, order="F" if fortran else "C")


def _rows(values: Array, path: Path, what: str) -> Sequence[Any]:
    if values.ndim == 1:
        return list(values) if values.dtype.hasobject else [values]
    if values.ndim == 2:
        return list(values)
    raise InputError(
        f"{what} must have one or two dimensions", path=path, expected="1 or 2", found=values.ndim
    )


def _matching(values: Array | None, count: int, path: Path, what: str) -> Sequence[Any] | None:
    if values is None:
        return None
    rows = _rows(values, path, what)
    if len(rows) != count:
        raise InputError(f"rows of {what} must match input_ids", path=path, expected=count, found=len(rows))
    return rows


def _vector(row: object, name: str) -> Array:
    try:
        out = np.asarray(row)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"not a row of numbers: {error}", document=name) from None
    if out.ndim != 1:
        raise InputError("a document must be one-dimensional", document=name, expected="[n]", found=out.shape)
    return out


def _kept(attention: Array, length: int, name: str) -> slice:
    """The range of real tokens; padding may stand before and after them."""
    if len(attention) != length:
        raise InputError(
            "attention_mask must match input_ids", document=name, expected=length, found=len(attention)
        )
    real = np.flatnonzero(attention)
    if not len(real):
        return slice(0, 0)
    start, end = int(real[0]), int(real[-1]) + 1
    if len(real) != end - start:
        at = start + int((attention[start:end] == 0).argmax())
        raise InputError(
            "attention_mask has a hole; only padding at the ends can be cut", document=name, position=at
        )
    return slice(start, end)
