"""WebDataset tar files: members that share a name up to its first dot are one sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import InputError

Array = npt.NDArray[Any]


def tar_values(path: Path, text_key: str, ids_key: str | None) -> Iterator[tuple[str, str | Array]]:
    """(name, value) of every sample.

    Args:
        text_key: key in the sample's .json member; a .txt member is taken when there is no .json.
        ids_key: extension of a .npy array of ids instead, "ids.npy" for members like 0001.ids.npy.

    Raises:
        InputError: for a damaged archive, a sample without such a member or with two, or a link in its place.
    """
    key, members = "", dict[str, bytes]()
    for stem, extension, content in _members(path, ids_key):
        if stem != key and members:
            yield f"{path}:{key}", _value(members, f"{path}:{key}", text_key, ids_key)
            members = {}
        key = stem
        if extension in members:
            raise InputError("two members of one name", document=f"{path}:{key}", found=extension)
        members[extension] = content
    if members:
        yield f"{path}:{key}", _value(members, f"{path}:{key}", text_key, ids_key)


def _members(path: Path, ids_key: str | None) -> Iterator[tuple[str, str, bytes]]:
    """(name up to the first dot, extension, content); content only of members that can be a value."""
    size = path.stat().st_size
    wanted = {"json", "txt"} if ids_key is None else {ids_key}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if not member.isreg():
                    if extension in wanted and not member.isdir():
                        raise InputError("a link or device, not a file", path=path, document=member.name)
                    continue
                if not 0 <= member.size <= size:
                    raise InputError("member size", path=path, expected=f"<= {size}", found=member.size)
                file = archive.extractfile(member) if extension in wanted else None
                content = b"" if file is None else file.read()
                if file is not None and len(content) != member.size:
                    raise InputError("member is cut", path=path, document=member.name, expected=member.size)
                yield f"{folder}/{stem}" if folder else stem, extension, content
    except (tarfile.TarError, OSError, EOFError, OverflowError) as error:
        raise InputError(f"not a whole tar file: {error}", path=path) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not a tar file: {error}", path=path) from None


def _value(members: dict[str, bytes], name: str, text_key: str, ids_key: str | None) -> str | Array:
    if ids_key is not None:
        if ids_key not in members:
            raise InputError("sample without ids", document=name, expected=ids_key, found=sorted(members))
        return _array(members[ids_key], name)
    try:
        if "json" in members:
            value = json.loads(members["json"].decode("utf-8"))
            text = value.get(text_key) if isinstance(value, dict) else None
        else:
            text = members["txt"].decode("utf-8") if "txt" in members else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not text: {error}", document=name) from None
    if not isinstance(text, str):
        raise InputError(
            "no text", document=name, expected=f'.txt, or .json with "{text_key}"', found=sorted(members)
        )
    return text


def _array(raw: bytes, name: str) -> Array:
    try:
        ids = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, SyntaxError) as error:
        raise InputError(f"not a .npy array: {error}", document=name) from None
    if not isinstance(ids, np.ndarray):
        raise InputError("not a .npy array", document=name, found=type(ids).__name__)
    return ids
