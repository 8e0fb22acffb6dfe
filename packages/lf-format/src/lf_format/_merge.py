"""merge and convert: new files from the blocks of old ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lf_format._atomic import refuse_same
from lf_format._container import Container, Identity, WriteReport
from lf_format._dataset import Dataset, open_dataset
from lf_format._dictionary import KIND_RANKS
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG
from lf_format._options import CodecName, CodecOptions
from lf_format._reader import Reader
from lf_format._recode import recode, stored_blocks
from lf_format._schema import Schema

PathLike = str | os.PathLike[str]


def merge(inputs: Sequence[PathLike], output: PathLike, *, _base_offset: int | None = None) -> WriteReport:
    """One file with the records of `inputs` in order; stored block bytes are copied, hashes checked on the way.

    Args:
        inputs: files of equal vocabulary, tokenizer, fields and buckets.
        output: new file; it may not be one of the inputs.

    Raises:
        FormatError: when the inputs disagree or one is damaged; no output appears then. OSError.
    """
    refuse_same(inputs, output)
    with open_dataset(inputs) as dataset, _container_like(dataset, output, _base_offset) as out:
        for reader in dataset.readers:
            numbers = _renumbered(reader, out)
            for block in stored_blocks(reader):
                out.append_block(replace(block, dictionary=numbers[block.dictionary]))
        out.finish()
        return out.publish()


def convert(source: PathLike, output: PathLike, *, codec: CodecName | CodecOptions) -> WriteReport:
    """The same records, numbers and blocks, stored as `codec` says.

    Raises:
        FormatError: when the source is damaged or a .lfg cannot have such a codec; no output appears then. OSError.
    """
    options = CodecOptions.of(codec)
    refuse_same([source], output)
    with open_dataset([source]) as dataset, _container_like(dataset, output, None) as out:
        out.finish(recode(dataset.readers[0], out, options))
        return out.publish()


def _renumbered(reader: Reader, out: Container) -> list[int]:
    """Number in the new file of every dictionary of `reader`, from 0 = none; equal ones are stored once."""
    numbers = [0]
    entries = reader.opened.dictionaries.entries
    tables = {k: out.add_dictionary(e) for k, e in enumerate(entries, 1) if e.kind == KIND_RANKS}
    for k, entry in enumerate(entries, 1):
        base = tables.get(entry.base, 0)
        numbers.append(tables[k] if k in tables else out.add_dictionary(replace(entry, base=base)))
    return numbers


def _container_like(dataset: Dataset, output: PathLike, base_offset: int | None) -> Container:
    """A new file for records of `dataset`."""
    first = dataset.readers[0]
    profile = first.opened.header.profile
    for other in dataset.readers[1:]:
        if profile == PROFILE_LFG and other.meta != first.meta:
            raise FormatError(f"meta differs from that of {first.path}", path=other.path)
    schema = Schema(dataset.fields, dataset.buckets, profile, first.meta)
    identity = Identity(schema, dataset.vocab_size, dataset.tokenizer)
    return Container(Path(output), identity, base_offset=base_offset)
