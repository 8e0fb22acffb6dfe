"""The blocks of a file on their way into another one, under another codec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lf_format._blocks import StoredBlock
from lf_format._codecs import PACKED, RAW, encode
from lf_format._container import Container
from lf_format._decision import Decision
from lf_format._options import CodecOptions
from lf_format._reader import Reader
from lf_format._train import Plan, plan


def recode(reader: Reader, out: Container, options: CodecOptions) -> tuple[Decision, ...]:
    """Appends every block of `reader` to `out`, stored as `options` say; what was measured for it.

    Raises:
        FormatError: when a block is damaged, or the profile cannot have such options. OSError.
    """
    options.check_profile(reader.opened.header.profile)
    chosen = plan(reader, options)
    numbers = _add_dictionaries(chosen, out)
    for number, block in enumerate(stored_blocks(reader)):
        wanted, dictionary = chosen.codec(block.bucket), numbers.get(block.bucket, numbers[None])
        tokens = int(block.lengths.sum(dtype=np.int64))
        coding = chosen.coding(block.bucket, tokens)
        used, stored = encode(reader.block_payload(number), wanted, options.level, coding)
        dictionary = 0 if used in (RAW, PACKED) else dictionary
        out.append_block(replace(block, codec=used, stored=stored, dictionary=dictionary))
    return chosen.decisions


def _add_dictionaries(chosen: Plan, out: Container) -> dict[int | None, int]:
    """Number of each bucket's dictionary in the new file; under None that of the other buckets."""
    table = 0 if chosen.ranks is None else out.add_dictionary(chosen.ranks)
    numbers: dict[int | None, int] = {None: table}
    for bucket, way in chosen.ways.items():
        if way.dictionary is not None:
            numbers[bucket] = out.add_dictionary(replace(way.dictionary, base=table))
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
