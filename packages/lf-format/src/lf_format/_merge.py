"""merge and convert: new files from the blocks of old ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lf_format._blocks import StoredBlock
from lf_format._codecs import BITPACK, encode
from lf_format._dataset import Dataset, open_dataset
from lf_format._dictionary import KIND_RANKS
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG
from lf_format._reader import Reader
from lf_format._train import Decision, Plan, plan
from lf_format._writer import Writer, WriteReport

PathLike = str | os.PathLike[str]


def merge(inputs: Sequence[PathLike], output: PathLike, *, _base_offset: int | None = None) -> WriteReport:
    """One file with the records of `inputs` in order; stored block bytes are copied, hashes checked on the way.

    Args:
        inputs: files of equal vocabulary, tokenizer, fields and buckets.
        output: new file; it may not be one of the inputs.

    Raises:
        FormatError: when the inputs disagree or one is damaged; no output appears then. OSError.
    """
    _refuse_same(inputs, output)
    with open_dataset(inputs) as dataset, _writer_like(dataset, output, _base_offset) as writer:
        for reader in dataset.readers:
            numbers = _renumbered(reader, writer)
            for block in stored_blocks(reader):
                writer.append_block(replace(block, dictionary=numbers[block.dictionary]))
        return writer.close()


CODECS = ("raw", "zstd", "bitpack")


@dataclass(frozen=True)
class ConvertReport:
    """The new file, and what was measured about each dictionary (empty unless asked for)."""

    output: WriteReport
    decisions: tuple[Decision, ...]


def convert(
    source: PathLike, output: PathLike, *, codec: str, zstd_level: int = 3, dictionaries: bool = False
) -> ConvertReport:
    """The same records, numbers and blocks under another codec.

    Args:
        codec: "raw", "zstd" or "bitpack" (ceil(log2 vocabulary) bits an id; .loongbin only).
        dictionaries: with "zstd": train a dictionary a bucket and a rank table, and keep those that save at least 2 %
            on blocks they were not trained on, their own bytes counted.

    Raises:
        FormatError: when the source is damaged or the arguments do not fit; no output appears then. OSError.
    """
    if codec not in CODECS or (dictionaries and codec != "zstd"):
        raise FormatError("codec", expected=f"{' or '.join(CODECS)}; zstd for dictionaries", found=codec)
    _refuse_same([source], output)
    with open_dataset([source]) as dataset, _writer_like(dataset, output, None) as writer:
        reader = dataset.readers[0]
        if reader.opened.header.profile == PROFILE_LFG and (dictionaries or codec == "bitpack"):
            raise FormatError("codec of a .lfg", path=source, expected="raw or zstd", found=codec)
        chosen = plan(reader, zstd_level) if dictionaries else Plan(CODECS.index(codec), None, {}, ())
        numbers = _add_dictionaries(chosen, writer)
        for number, block in enumerate(stored_blocks(reader)):
            coding = None
            if codec == "bitpack" or dictionaries:
                tokens = int(block.lengths.sum(dtype=np.int64))
                coding = chosen.coding(block.bucket, tokens, reader.vocab_size, reader.token_dtype)
            used, stored = encode(reader.block_payload(number), chosen.codec, zstd_level, coding)
            dictionary = numbers.get(block.bucket, numbers[None]) if used else 0
            writer.append_block(
                replace(block, codec=used, stored=stored, dictionary=dictionary if used != BITPACK else 0)
            )
        return ConvertReport(writer.close(), chosen.decisions)


def _add_dictionaries(chosen: Plan, writer: Writer) -> dict[int | None, int]:
    """Number of each bucket's dictionary in the new file; under None that of the other buckets."""
    table = 0 if chosen.ranks is None else writer.add_dictionary(chosen.ranks)
    numbers: dict[int | None, int] = {None: table}
    for bucket, entry in chosen.dictionaries.items():
        numbers[bucket] = writer.add_dictionary(replace(entry, base=table))
    return numbers


def _renumbered(reader: Reader, writer: Writer) -> list[int]:
    """Number in the new file of every dictionary of `reader`, from 0 = none; equal ones are stored once."""
    numbers = [0]
    entries = reader.opened.dictionaries.entries
    tables = {k: writer.add_dictionary(e) for k, e in enumerate(entries, 1) if e.kind == KIND_RANKS}
    for k, entry in enumerate(entries, 1):
        base = tables.get(entry.base, 0)
        numbers.append(tables[k] if k in tables else writer.add_dictionary(replace(entry, base=base)))
    return numbers


def stored_blocks(reader: Reader) -> Iterator[StoredBlock]:
    """Blocks of a file as they are stored, each checked against its hash; FormatError for a damaged one."""
    index, first = reader.opened.index, reader.opened.index.first_records()
    for block in range(len(index.block_count)):
        rows = slice(int(first[block]), int(first[block + 1]))
        yield StoredBlock(
            bucket=int(index.block_bucket[block]),
            codec=int(index.block_codec[block]),
            raw_len=int(index.block_raw[block]),
            stored=reader.block_stored(block),
            lengths=index.lengths[rows],
            hashes=index.hashes[rows],
            flags=index.flags[rows],
            max_id=int(index.block_max_id[block]),
            counts={name: column[rows] for name, column in index.counts.items()},
            dictionary=int(reader.opened.dictionaries.of_block[block]),
        )


def _writer_like(dataset: Dataset, output: PathLike, base_offset: int | None) -> Writer:
    first = dataset.readers[0]
    if first.opened.header.profile == PROFILE_LFG:
        for other in dataset.readers[1:]:
            if other.meta != first.meta:
                raise FormatError(f"meta differs from that of {first.path}", path=other.path)
        return Writer(
            output,
            vocab_size=dataset.vocab_size,
            tokenizer=dataset.tokenizer,
            buckets=dataset.buckets,
            fields=dataset.fields,
            meta=first.meta,
            _base_offset=base_offset,
        )
    return Writer(
        output,
        vocab_size=dataset.vocab_size,
        tokenizer=dataset.tokenizer,
        buckets=dataset.buckets,
        loss_mask=len(dataset.fields) == 2,
        _base_offset=base_offset,
    )


def _refuse_same(inputs: Sequence[PathLike], output: PathLike) -> None:
    for path in inputs:
        if Path(output).exists() and os.path.samefile(path, output):
            raise FormatError("output is one of the inputs", path=output)
