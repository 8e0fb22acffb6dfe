"""The files of a run of preprocess, together under their final names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lf_format._atomic import sync_directory
from lf_format._container import WriteReport
from lf_format._writer import Writer

SPLITS = ("train", "eval")


def publish(writers: Mapping[str, Writer], folder: Path, suffix: str) -> dict[str, WriteReport]:
    """All files complete and durable first; then old ones go, so that old and new never stand side by side.

    Args:
        writers: of the splits that are written, "train" or "eval".
        suffix: of the files' names, ".loongbin" or ".lfg".
    """
    for writer in writers.values():
        writer.seal()
    for split in SPLITS:
        (folder / f"{split}{suffix}").unlink(missing_ok=True)
    sync_directory(folder)
    return {split: writers[split].close() for split in reversed(list(writers))}
