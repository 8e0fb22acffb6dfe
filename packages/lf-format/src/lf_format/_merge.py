"""merge and convert: new files from the blocks of old ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lf_format._blocks import StoredBlock
from lf_format._codecs import CODEC_IDS, encode
from lf_format._dataset import Dataset, open_dataset
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG
from lf_format._reader import Reader
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
            for block in stored_blocks(reader):
                writer.append_block(block)
        return writer.close()


def convert(source: PathLike, output: PathLike, *, codec: str, zstd_level: int = 3) -> WriteReport:
    """The same records, numbers and blocks under another codec ("raw" or "zstd").

    Raises:
        FormatError: when the source is damaged or the codec is unknown; no output appears then. OSError.
    """
    if codec not in CODEC_IDS:
        raise FormatError("codec", expected=" or ".join(CODEC_IDS), found=codec)
    _refuse_same([source], output)
    with open_dataset([source]) as dataset, _writer_like(dataset, output, None) as writer:
        reader = dataset.readers[0]
        for number, block in enumerate(stored_blocks(reader)):
            payload = reader.block_payload(number)
            used, stored = encode(payload, CODEC_IDS[codec], zstd_level)
            writer.append_block(_recoded(block, used, stored))
        return writer.close()


def _recoded(block: StoredBlock, codec: int, stored: bytes) -> StoredBlock:
    return replace(block, codec=codec, stored=stored)


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
