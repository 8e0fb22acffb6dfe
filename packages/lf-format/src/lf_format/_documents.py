"""Input documents: which files, and what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lf_format._convert_arrow import arrow_files, is_arrow_folder, table_values
from lf_format._convert_mds import is_mds, mds_values
from lf_format._convert_megatron import megatron_documents
from lf_format._convert_webdataset import tar_values
from lf_format._errors import InputError
from lf_format._layout import xxh3
from lf_format._npz import npz_documents

Inputs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class Document:
    """Text still to be tokenized, or ids (integers, shape [n]) with an optional loss mask of the same shape."""

    name: str
    text: str | None = None
    ids: npt.NDArray[Any] | None = None
    loss_mask: npt.NDArray[Any] | None = None


@dataclass
class Position:
    """Bytes of input read so far, and of all input files; 0 = not known.

    Lines of .jsonl count one by one, other files when they end.
    """

    total: int
    read: int = 0


def stamps(files: list[Path]) -> list[tuple[str, int, int]]:
    """(absolute path, bytes, time of change in ns) of every file that `files` stand for."""
    found = []
    for path in files:
        parts = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
        parts += [path.with_suffix(".bin")] if path.suffix == ".idx" else []
        for part in parts:
            if part.exists():
                status = part.stat()
                found.append((str(part.absolute()), status.st_size, status.st_mtime_ns))
    return found


def stamps_digest(files: list[Path]) -> str:
    """Hash of their stamps: another one means that an input was changed, moved, added or removed."""
    return f"{xxh3(json.dumps(stamps(files)).encode()):016x}"


def input_files(inputs: Inputs) -> list[Path]:
    """Files of `inputs` in order; a directory stands for its files by sorted path, hidden ones excepted.

    An MDS data set stays a folder, a datasets folder becomes its Arrow files, also below others, and a .bin beside an
    .idx is left to it.

    Raises:
        InputError: for a path that does not exist or is no regular file, a datasets folder of several splits, a link
            to a folder below, or when nothing is found.
    """
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _folder(path)
        elif path.is_file():
            files.append(path)
        elif path.exists():  # a FIFO would wait for a writer, a device need not end
            raise InputError("no regular file", path=path)
        else:
            raise InputError("no such input", path=path)
    if not files:
        raise InputError(
            "no input files", expected=">= 1 file", found=", ".join(map(str, paths)) or "nothing"
        )
    return files


def _folder(path: Path) -> list[Path]:
    if is_mds(path):
        return [path]
    if is_arrow_folder(path):
        return arrow_files(path)
    if (path / "dataset_dict.json").is_file():  # reading all would mix held-out data with the rest
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise InputError("a datasets folder of several splits; name one of them", path=path, found=splits)
    files: list[Path] = []
    for item in sorted(p for p in path.iterdir() if not p.name.startswith(".")):
        if item.is_dir():
            if item.is_symlink():
                raise InputError("a link to a folder; name it as an input", path=item)
            files += _folder(item)
        elif not item.is_file():
            raise InputError("no regular file", path=item)
        elif not (item.suffix == ".bin" and item.with_suffix(".idx").is_file()):
            files.append(item)
    return files


def holds_ids(path: Path, ids_key: str | None) -> bool:
    """Whether the documents of an input file are token ids already."""
    if path.suffix in (".npz", ".idx"):
        return True
    return ids_key is not None and (path.is_dir() or path.suffix in (".tar", ".parquet", ".arrow"))


def file_documents(
    files: Iterable[Path], text_key: str, ids_key: str | None = None, position: Position | None = None
) -> Iterator[Document]:
    """Documents of each file by its kind; a file of no known kind is one document of UTF-8 text.

    Args:
        text_key: key or column of the text in .jsonl, .tar, .parquet, .arrow and MDS.
        ids_key: column of token ids instead, in all of these but .jsonl.
        position: kept up to date.
    """
    place = Position(0) if position is None else position
    for path in files:
        start = place.read
        yield from _documents(path, text_key, ids_key, place)
        place.read = start + sum(size for _, size, _ in stamps([path]))


def _documents(path: Path, text_key: str, ids_key: str | None, place: Position) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _jsonl(path, text_key, place)
    elif path.suffix == ".idx":
        for name, ids in megatron_documents(path):
            yield Document(name, ids=ids)
    elif path.is_dir():
        yield from map(_of_value, mds_values(path, ids_key or text_key))
    elif path.suffix == ".tar":
        yield from map(_of_value, tar_values(path, text_key, ids_key))
    elif path.suffix in (".parquet", ".arrow"):
        yield from map(_of_value, table_values(path, ids_key or text_key))
    elif path.suffix == ".npz":
        for name, ids, mask in npz_documents(path):
            yield Document(name, ids=ids, loss_mask=mask)
    else:
        yield Document(str(path), text=_decoded(path.read_bytes(), path, str(path)))


def _of_value(item: tuple[str, str | npt.NDArray[Any]]) -> Document:
    name, value = item
    return Document(name, text=value) if isinstance(value, str) else Document(name, ids=value)


def _decoded(raw: bytes, path: Path, name: str, offset: int = 0) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            "not UTF-8 text", path=path, document=name, offset=at, found=hex(raw[error.start])
        ) from None


def _jsonl(path: Path, text_key: str, place: Position) -> Iterator[Document]:
    offset, start = 0, place.read
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if raw.strip():
                name = f"{path}:{number}"
                yield Document(name, text=_json_text(_decoded(raw, path, name, offset), name, text_key))
            offset += len(raw)
            place.read = start + offset


def _json_text(line: str, name: str, text_key: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", document=name) from None
    text = value.get(text_key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise InputError(
            "no text in this line", document=name, expected=f'an object with "{text_key}"', found=found
        )
    return text
