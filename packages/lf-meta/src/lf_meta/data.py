"""From whatever the user has (nothing, text, .jsonl, .npz, .loongbin) to opened train and eval data sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lf_format as lff
from lf_meta.config import DataSection
from lf_meta.errors import DataError

DEFAULT_NAME = "Python's language reference (pydoc_data.topics, part of every CPython; PSF licence)"


@dataclass(frozen=True)
class DataPaths:
    """Where the packed splits lie, and what was done to get them."""

    train: Path
    eval: Path | None
    note: str


def default_documents() -> Iterator[tuple[str, str]]:
    """(name, text) of the English text that every CPython carries: 79 topics, 466 kB on 3.11."""
    from pydoc_data.topics import topics  # half a megabyte: loaded only when it is trained on

    yield from sorted(topics.items())


def prepare(section: DataSection, seed: int, target: Path) -> DataPaths:
    """Pack the training text into ``target`` once; packed data and an earlier result are used as they are.

    Raises:
        DataError: nothing usable at data.path.
    """
    return find(section, target) or _pack(section, seed, target)


def find(section: DataSection, target: Path) -> DataPaths | None:
    """Data that is packed already: at data.path, or earlier into ``target``."""
    if section.path is not None and (packed := _already_packed(Path(section.path))):
        return packed
    if (target / "train.loongbin").exists():
        return DataPaths(target / "train.loongbin", _if_exists(target / "eval.loongbin"), f"using {target}")
    return None


def _if_exists(path: Path) -> Path | None:
    return path if path.exists() else None


def _already_packed(path: Path) -> DataPaths | None:
    if path.suffix == ".loongbin":
        return DataPaths(path, None, f"using {path}, which has no eval split beside it")
    if (path / "train.loongbin").exists():
        return DataPaths(path / "train.loongbin", _if_exists(path / "eval.loongbin"), f"using {path}")
    if path.is_dir() and any(path.glob("*.loongbin")):
        return DataPaths(path, None, f"using all .loongbin files of {path}, without an eval split")
    return None


def _pack(section: DataSection, seed: int, target: Path) -> DataPaths:
    given = None if section.path is None else Path(section.path)
    if given is not None and given.exists() and not (given.is_file() or given.is_dir()):
        raise DataError(f"data.path {given}: neither a file nor a folder")
    pack: Callable[..., lff.PreprocessReport]
    if section.path is None:
        pack = functools.partial(lff.preprocess_documents, default_documents())
    else:
        pack = functools.partial(lff.preprocess, [section.path])
    try:
        report = pack(
            target,
            tokenizer=section.tokenizer,
            max_len=section.max_len,
            eval_fraction=section.eval_fraction,
            seed=seed,
            num_workers=section.workers,
        )
    except (OSError, ValueError) as e:
        raise DataError(f"data.path {section.path or '(default text)'}: {e}") from e
    source = section.path or DEFAULT_NAME
    note = f"packed {source} into {target}: {_counts(report)}"
    return DataPaths(target / "train.loongbin", _if_exists(target / "eval.loongbin"), note)


def _counts(report: lff.PreprocessReport) -> str:
    held_out = f", {report.eval_documents} documents held out" if report.eval else ""
    empty = f"; {len(report.empty)} empty documents left out" if report.empty else ""
    notes = "".join(f"; {n}" for n in report.notes)
    return (
        f"{report.documents} documents, {report.tokens:,} tokens, {report.records:,} records in buckets "
        f"{', '.join(map(str, report.buckets))}{held_out}{empty}{notes}"
    )


def open_split(path: Path, vocab_size: int | None) -> lff.Dataset:
    """Open a split and make sure that every id in it has an embedding.

    Raises:
        DataError: unreadable, empty, or holding an id >= vocab_size (the message names file, record and id).
    """
    try:
        dataset = lff.open_dataset(path)
        if not len(dataset):
            raise DataError(f"{path}: no records")
        if int(dataset.lengths.max()) < 2:
            raise DataError(f"{path}: no record has two tokens, so there is nothing to predict")
        if vocab_size is not None:
            dataset.check_vocab(vocab_size)
    except (OSError, ValueError) as e:
        raise DataError(str(e)) from e
    return dataset
