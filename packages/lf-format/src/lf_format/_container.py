"""Container: blocks in, a complete file under its final name out, or none."""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from lf_format import _layout as lay
from lf_format._atomic import AtomicFile
from lf_format._blocks import IndexRows, StoredBlock
from lf_format._decision import Decision
from lf_format._dictionary import MAX_ALL_BYTES, Dictionary, features
from lf_format._errors import FormatError
from lf_format._schema import Schema, TokenizerInfo

NO_TOKENIZER = TokenizerInfo("", "")


@dataclass(frozen=True)
class WriteReport:
    """What a finished file holds.

    Attributes:
        path: where it is.
        records, tokens: in it.
        bytes: of the file.
        fingerprint: 16 hex digits over all content.
        decisions: what was measured about codecs, dictionaries and the rank table; empty when nothing was.
    """

    path: str
    records: int
    tokens: int
    bytes: int
    fingerprint: str
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True)
class Identity:
    """What a file is, apart from its records: schema, vocabulary, tokenizer."""

    schema: Schema
    vocab_size: int
    tokenizer: TokenizerInfo = NO_TOKENIZER

    def header(self) -> lay.Header:
        """Header of a new file, without uuid and features. FormatError for names or a schema that do not fit."""
        schema = self.schema.to_json()
        if len(schema) > lay.MAX_SCHEMA_BYTES:
            raise FormatError(
                "bytes of fields and meta", expected=f"<= {lay.MAX_SCHEMA_BYTES}", found=len(schema)
            )
        data = lay.align(lay.HEADER_SIZE + len(schema), lay.SECTION_ALIGN)
        header = lay.Header(
            bytes(16),
            self.vocab_size,
            lay.HEADER_SIZE,
            len(schema),
            lay.xxh3(schema),
            data,
            self.tokenizer.name,
            self.tokenizer.hash,
            _creator(),
            self.schema.profile,
        )
        header.pack()  # refuses names that do not fit, before any file exists
        return header


class Container:
    """A file in the making: stored blocks and dictionaries, then index, trailer and header. A context manager.

    An exception removes the temporary file, whatever caused it.

    Args:
        path: final name.
        identity: schema, vocabulary, tokenizer.
        uuid: 16 bytes; None = derived from the content.
        base_offset: where the first block starts. Tests move it beyond 2**31 and 2**32; the gap is a hole that
            reads as zero padding.

    Raises:
        FormatError: for an identity that does not fit a header. OSError: when the directory cannot be written.
    """

    def __init__(
        self, path: Path, identity: Identity, uuid: bytes | None = None, base_offset: int | None = None
    ) -> None:
        self.identity = identity
        self._header = identity.header()
        self._uuid = uuid
        self._rows = IndexRows([f.name for f in identity.schema.counted])
        self._at = self._header.data_offset if base_offset is None else base_offset
        self._report: WriteReport | None = None
        self._file = AtomicFile(path)

    @property
    def temporary(self) -> Path:
        """Where the data lie until `publish`."""
        return self._file.temporary

    @property
    def nbytes(self) -> int:
        """Bytes of the file up to the end of its last block."""
        return self._at

    def append_block(self, block: StoredBlock) -> None:
        """Adds a block as it is; what it holds must agree with the schema. OSError when the disk refuses."""
        self._guarded(lambda: self._put(block))

    def _put(self, block: StoredBlock) -> None:
        head = block.header(self._rows.records)
        offset = self._at
        self._file.write_pieces_at((head.pack(), *block.pieces), offset)
        self._at = lay.align(offset + lay.BLOCK_HEADER_SIZE + head.stored_len, lay.BLOCK_ALIGN)
        self._rows.add(block, head, offset)

    def add_dictionary(self, dictionary: Dictionary) -> int:
        """Number for StoredBlock.dictionary; an equal one that is there already keeps its number."""
        known = self._rows.dictionaries
        if dictionary not in known:
            size = sum(len(d.content) for d in known) + len(dictionary.content)
            if size > MAX_ALL_BYTES:
                raise FormatError("bytes of all dictionaries", expected=f"<= {MAX_ALL_BYTES}", found=size)
            known.append(dictionary)
        return known.index(dictionary) + 1

    def finish(self, decisions: tuple[Decision, ...] = (), durable: bool = True) -> None:
        """Writes index, trailer and header; the file is whole then, still under its temporary name.

        Args:
            decisions: for the report.
            durable: sync it; a scratch copy does not need that.
        """
        self._guarded(lambda: self._finish(decisions, durable))

    def _finish(self, decisions: tuple[Decision, ...], durable: bool) -> None:
        index = self._rows.index()
        incompat = features(index.block_codec, self._rows.dictionaries)
        self._header = self._header._replace(incompat=incompat)
        packed = index.pack()
        digest = lay.xxh3(packed)
        hashes = index.block_hash.astype("<u8").tobytes()
        identity = self._header.pack()
        derived = xxhash.xxh3_128_digest(identity[lay.IDENTITY] + hashes + digest.to_bytes(8, "little"))
        header = self._header._replace(uuid=self._uuid or _uuid8(derived)).pack()
        index_at = lay.align(self._at, lay.SECTION_ALIGN)
        trailer_at = lay.align(index_at + len(packed), lay.BLOCK_ALIGN)
        tokens = int(index.lengths.sum(dtype=np.int64))
        root = lay.root_hash(header, hashes, digest)
        counts = (self._rows.records, tokens, self._rows.blocks)
        trailer = lay.Trailer(index_at, len(packed), digest, *counts, trailer_at, 0, root)
        self._file.write_at(packed, index_at)
        self._file.write_at(trailer.pack(), trailer_at)
        self._file.write_at(self.identity.schema.to_json(), lay.HEADER_SIZE)
        self._file.write_at(header, 0)
        if durable:
            self._file.seal()
        size = trailer_at + lay.TRAILER_SIZE
        totals = (self._rows.records, tokens, size, f"{root:016x}")
        self._report = WriteReport(str(self._file.path), *totals, decisions)

    def publish(self) -> WriteReport:
        """Gives the finished file its final name."""
        self._guarded(self._file.publish)
        assert self._report is not None
        return self._report

    def discard(self) -> None:
        """Removes the temporary file; no effect after `publish`."""
        self._file.discard()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def _creator() -> str:
    try:
        return f"lf-format {version('lf-format')}"
    except PackageNotFoundError:
        return "lf-format"


def _uuid8(digest: bytes) -> bytes:
    """RFC 9562 version 8: an identifier made from the content."""
    value = int.from_bytes(digest, "big") & ~(0xF << 76) & ~(0x3 << 62) | 0x8 << 76 | 0x2 << 62
    return uuid_module.UUID(int=value).bytes
