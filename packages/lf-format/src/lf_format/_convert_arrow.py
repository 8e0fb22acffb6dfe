"""Parquet files and Hugging Face datasets folders (Arrow files), through pyarrow (extra `parquet`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError

Array = npt.NDArray[Any]
_ROWS = 1024  # rows decoded at once


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise InputError(f"pyarrow.{module} is missing", expected="pip install lf-format[parquet]") from None


def is_arrow_folder(folder: Path) -> bool:
    """Whether `folder` is what datasets.save_to_disk writes for one split."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def arrow_files(folder: Path) -> list[Path]:
    """Arrow files of a datasets folder in the order of its state.json; InputError when that is damaged."""
    state = folder / "state.json"
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        plain = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"not a datasets folder: {error!r}", path=state) from None
    if not plain:
        raise InputError("data files", path=state, expected="plain file names", found=names)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError("data file is missing", path=folder / missing[0])
    return [folder / name for name in names]


def table_values(path: Path, key: str) -> Iterator[tuple[str, str | Array]]:
    """(name, value) of column `key` of every row of a .parquet or .arrow file: text, or a list of integers.

    Raises:
        InputError: for a damaged file, no such column, a missing value, another type.
    """
    row = 0
    for batch in _batches(path, key):
        for value in batch:
            yield f"{path}:{row}", _value(value, f"{path}:{row}")
            row += 1


def _batches(path: Path, key: str) -> Iterator[Any]:
    """Column `key`, batch by batch. Whatever pyarrow says about the file becomes an InputError."""
    errors = (_pyarrow("lib").ArrowException, OSError, MemoryError, ValueError)
    try:
        if path.suffix == ".parquet":
            with _pyarrow("parquet").ParquetFile(path) as file:
                _require(key, file.schema_arrow.names, path)
                for batch in file.iter_batches(_ROWS, columns=[key]):
                    yield batch.column(0)
        else:
            with path.open("rb") as raw:
                stream = _pyarrow("ipc").open_stream(raw)
                _require(key, stream.schema.names, path)
                for batch in stream:
                    batch.validate(full=True)
                    yield batch.column(stream.schema.names.index(key))
    except errors as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot be read: {error}", path=path) from None


def _require(key: str, names: list[str], path: Path) -> None:
    if names.count(key) != 1:
        raise InputError("no such column", path=path, expected=key, found=names)


def _value(value: Any, name: str) -> str | Array:
    try:
        if not value.is_valid:
            raise InputError("missing value", document=name)
        if not hasattr(value, "values"):
            text = value.as_py()
            if isinstance(text, str):
                return text
            raise InputError(
                "column type", document=name, expected="text or list of integers", found=value.type
            )
        ids = value.values.to_numpy(zero_copy_only=False)
    except InputError:
        raise
    except (ValueError, TypeError) as error:  # not UTF-8, for example
        raise InputError(f"cannot be read: {error}", document=name) from None
    if len(ids) and ids.dtype.kind not in "iu":
        raise InputError("column type", document=name, expected="text or list of integers", found=value.type)
    return ids if len(ids) else np.zeros(0, np.int64)
