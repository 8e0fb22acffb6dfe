"""Writer: validates records, gathers them into blocks, leaves a complete file or none."""

from __future__ import annotations

import os
import uuid as uuid_module
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from lf_format import _layout as lay
from lf_format._atomic import AtomicFile
from lf_format._blocks import IndexRows, PendingBlock, StoredBlock
from lf_format._codecs import CODEC_IDS, encode
from lf_format._dictionary import MAX_ALL_BYTES, Dictionary, features
from lf_format._errors import FormatError, InputError
from lf_format._fields import Field
from lf_format._records import check_mask, check_tokens, pack_bits
from lf_format._samples import encode_sample
from lf_format._schema import Schema, TokenizerInfo

DEFAULT_BLOCK_BYTES = 131_072


@dataclass(frozen=True)
class WriteReport:
    """What a finished file holds: counts, size in bytes, where it is, and its fingerprint (16 hex digits)."""

    path: str
    records: int
    tokens: int
    bytes: int
    fingerprint: str


class Writer:
    """Writes one .loongbin or, when `fields` are given, .lfg file; a context manager. For one thread.

    Args:
        path: final name. Until `close` the data lie under a temporary name in the same directory.
        vocab_size: ids are 0..vocab_size-1; decides the stored width (uint8, uint16 or uint32).
        tokenizer: which tokenizer made the ids.
        buckets: increasing lengths in tokens; a record goes to the first bucket that holds it.
        loss_mask: store one bit per token (.loongbin).
        fields: what a sample holds (.lfg); vocabulary, tokenizer and, when the number of token ids is fixed or
            zero, buckets may be left out then.
        meta: a JSON object kept with the fields (.lfg).
        codec: "raw" (fixed offsets, read without decoding) or "zstd".
        block_bytes: decoded size at which a block is closed; 64-256 KiB is sensible.
        zstd_level: for codec "zstd".
        uuid: 16 bytes; derived from the content when None, so that equal input gives equal bytes.

    Raises:
        FormatError: for arguments out of range.
        OSError: when the directory cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer: TokenizerInfo | None = None,
        buckets: Sequence[int] | None = None,
        loss_mask: bool = False,
        fields: Sequence[Field] | None = None,
        meta: Mapping[str, Any] | None = None,
        codec: str = "raw",
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        zstd_level: int = 3,
        uuid: bytes | None = None,
        _base_offset: int | None = None,
    ) -> None:
        if codec not in CODEC_IDS:
            raise FormatError("codec", expected=" or ".join(CODEC_IDS), found=codec)
        if not 1 <= block_bytes <= lay.MAX_BLOCK_BYTES:
            raise FormatError("block_bytes", expected=f"1..{lay.MAX_BLOCK_BYTES}", found=block_bytes)
        if uuid is not None and len(uuid) != 16:
            raise FormatError("uuid", expected="16 bytes", found=len(uuid))
        self._schema = _schema(vocab_size, tokenizer, buckets, loss_mask, fields, meta)
        self._schema_json = self._schema.to_json()
        if len(self._schema_json) > lay.MAX_SCHEMA_BYTES:
            size = len(self._schema_json)
            raise FormatError("bytes of fields and meta", expected=f"<= {lay.MAX_SCHEMA_BYTES}", found=size)
        self._header = self._make_header(vocab_size or 1, tokenizer or TokenizerInfo("", ""))
        self._header.pack()  # refuses names that do not fit, before any file exists
        self._codec, self._level, self._block_bytes, self._uuid = (
            CODEC_IDS[codec],
            zstd_level,
            block_bytes,
            uuid,
        )
        self._bucket_of = partial(bisect_left, self._schema.buckets)
        self._pending: dict[int, PendingBlock] = {}
        self._counted = [self._schema.fields.index(f) for f in self._schema.counted]
        self._rows = IndexRows([f.name for f in self._schema.counted])
        self._documents = 0
        self._report: WriteReport | None = None
        self._sealed = self._failed = False
        # Tests move the blocks beyond 2**31 and 2**32; the gap is a hole that reads as zero padding.
        self._at = self._header.data_offset if _base_offset is None else _base_offset
        self._file = AtomicFile(Path(path))

    def _make_header(self, vocab_size: int, tokenizer: TokenizerInfo) -> lay.Header:
        size = len(self._schema_json)
        data = lay.align(lay.HEADER_SIZE + size, lay.SECTION_ALIGN)
        schema_hash = lay.xxh3(self._schema_json)
        return lay.Header(
            bytes(16),
            vocab_size,
            lay.HEADER_SIZE,
            size,
            schema_hash,
            data,
            tokenizer.name,
            tokenizer.hash,
            _creator(),
            self._schema.profile,
        )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bucket edges in tokens."""
        return self._schema.buckets

    def append(
        self,
        tokens: object,
        loss_mask: object = None,
        document_start: bool = True,
        document_end: bool = True,
    ) -> None:
        """Adds one record; its id is assigned when its block is written.

        Args:
            tokens: integers, shape [n], 1 <= n <= buckets[-1], each in 0..vocab_size-1. For a .lfg: a mapping of
                every field's name to its value; floats are rounded to the stored width, integers must fit.
            loss_mask: booleans or 0/1, shape [n]; None = all true. Refused when the file has no such field.
            document_start, document_end: False where a longer document was split.

        Raises:
            InputError: naming document (counted by document_start) and position; nothing is written then.
            OSError: when the disk refuses; the temporary file is removed.
        """
        self._check_open()
        document = self._documents if document_start else max(self._documents - 1, 0)
        counts = None
        if self._schema.profile == lay.PROFILE_LFG:
            if loss_mask is not None:
                raise InputError("a mask is a field of the sample", document=document)
            sample: Any = tokens
            parts, steps, length = encode_sample(sample, self._schema, self._header.vocab_size, document)
            counts = [steps[k] for k in self._counted]
        else:
            parts, length = self._encode_tokens(tokens, loss_mask, document)
        self._documents += bool(document_start)
        self._add(parts, length, bool(document_start) | bool(document_end) << 1, counts)

    def _encode_tokens(self, tokens: object, loss_mask: object, document: int) -> tuple[list[bytes], int]:
        ids = check_tokens(
            tokens, self._header.vocab_size, self._schema.buckets[-1], self._schema.numpy_dtype, document
        )
        parts = [ids.tobytes()]
        if len(self._schema.fields) == 2:
            parts.append(pack_bits(check_mask(loss_mask, len(ids), document)))
        elif loss_mask is not None:
            raise InputError(
                "this file has no loss mask; open the Writer with loss_mask=True", document=document
            )
        return parts, len(ids)

    def _add(self, parts: list[bytes], length: int, flags: int, counts: list[int] | None) -> None:
        size = sum(map(len, parts)) + lay.BLOCK_ALIGN * len(parts)
        if size > lay.MAX_BLOCK_BYTES:
            raise InputError("a record must fit a block", expected=f"<= {lay.MAX_BLOCK_BYTES}", found=size)
        bucket = self._bucket_of(length)
        pending = self._pending.get(bucket)
        if pending is not None and pending.nbytes + size > lay.MAX_BLOCK_BYTES:
            self._flush(bucket)
            pending = None
        if pending is None:
            pending = self._pending[bucket] = PendingBlock(len(parts))
        pending.add(parts, length, flags, counts)
        if pending.nbytes >= self._block_bytes:
            self._flush(bucket)

    def append_block(self, block: StoredBlock) -> None:
        """Adds a block as it is, for merge and convert: what it holds must agree with this file's schema.

        Raises:
            OSError: when the disk refuses; the temporary file is removed.
        """
        self._check_open()
        self._guarded(self._put, block)

    def add_dictionary(self, dictionary: Dictionary) -> int:
        """Number for StoredBlock.dictionary; an equal one that is there already keeps its number."""
        known = self._rows.dictionaries
        if dictionary not in known:
            size = sum(len(d.content) for d in known) + len(dictionary.content)
            if size > MAX_ALL_BYTES:
                raise FormatError("bytes of all dictionaries", expected=f"<= {MAX_ALL_BYTES}", found=size)
            known.append(dictionary)
        return known.index(dictionary) + 1

    def close(self) -> WriteReport:
        """Finishes the file and gives it its final name; the same report again when called twice."""
        if self._report is None:
            if not self._sealed:
                self.seal()
            self.publish()
        assert self._report is not None
        return self._report

    def seal(self) -> None:
        """First half of `close`: everything written and durable, still under the temporary name."""
        self._check_open()
        for bucket in sorted(self._pending):
            self._flush(bucket)
        self._guarded(self._finish)
        self._sealed = True

    def publish(self) -> None:
        """Second half of `close`: the rename."""
        self._guarded(self._file.publish)
        self._report = self._sealed_report

    def abort(self) -> None:
        """Removes the temporary file; the writer is of no use afterwards. No effect after `close`."""
        if self._report is None:
            self._failed = True
            self._file.discard()

    def _check_open(self) -> None:
        if self._failed or self._sealed:
            raise FormatError("the writer is closed", path=self._file.path)

    def _guarded(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except BaseException:
            self.abort()
            raise

    def _flush(self, bucket: int) -> None:
        self._guarded(self._write_block, bucket, self._pending.pop(bucket))

    def _write_block(self, bucket: int, pending: PendingBlock) -> None:
        payload = pending.payload()
        if len(payload) > lay.MAX_BLOCK_BYTES:
            raise FormatError("block is too large", expected=f"<= {lay.MAX_BLOCK_BYTES}", found=len(payload))
        codec, stored = encode(payload, self._codec, self._level)
        counts = pending.step_columns([f.name for f in self._schema.counted])
        largest = pending.max_id(self._schema.fields)
        block = StoredBlock(bucket, codec, len(payload), stored, *pending.rows(), largest, counts=counts)
        self._put(block)

    def _put(self, block: StoredBlock) -> None:
        head = block.header(self._rows.records)
        offset = self._at
        self._file.write_at(head.pack() + block.stored, offset)
        self._at = lay.align(offset + lay.BLOCK_HEADER_SIZE + len(block.stored), lay.BLOCK_ALIGN)
        self._rows.add(block, head, offset)

    def _finish(self) -> None:
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
        self._file.write_at(self._schema_json, lay.HEADER_SIZE)
        self._file.write_at(header, 0)
        self._file.seal()
        size = trailer_at + lay.TRAILER_SIZE
        self._sealed_report = WriteReport(
            str(self._file.path), self._rows.records, tokens, size, f"{root:016x}"
        )

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._failed:
            self.close()


def _schema(
    vocab_size: int | None,
    tokenizer: TokenizerInfo | None,
    buckets: Sequence[int] | None,
    loss_mask: bool,
    fields: Sequence[Field] | None,
    meta: Mapping[str, Any] | None,
) -> Schema:
    """Schema from the arguments of Writer."""
    if fields is None:
        if vocab_size is None or tokenizer is None or buckets is None or meta is not None:
            raise FormatError(
                "arguments of a .loongbin", expected="vocab_size, tokenizer and buckets; meta needs fields"
            )
        return Schema.of(vocab_size, tuple(int(e) for e in buckets), loss_mask)
    tokens = next((f for f in fields if f.kind == "tokens"), None)
    if loss_mask or (tokens is not None and vocab_size is None):
        raise FormatError("arguments of a .lfg", expected="a mask as a field; vocab_size with token fields")
    if buckets is None and tokens is not None and tokens.ragged:
        raise FormatError("arguments of a .lfg", expected="buckets, because the number of ids differs")
    edges = buckets or ((tokens.shape[0],) if tokens is not None else (1,))
    return Schema.of_samples(tuple(fields), vocab_size or 1, tuple(int(e) for e in edges), meta or {})


def _creator() -> str:
    try:
        return f"lf-format {version('lf-format')}"
    except PackageNotFoundError:
        return "lf-format"


def _uuid8(digest: bytes) -> bytes:
    """RFC 9562 version 8: an identifier made from the content."""
    value = int.from_bytes(digest, "big") & ~(0xF << 76) & ~(0x3 << 62) | 0x8 << 76 | 0x2 << 62
    return uuid_module.UUID(int=value).bytes
