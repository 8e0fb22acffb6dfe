"""Writer: validates records, gathers them into blocks, leaves a complete file or none."""

from __future__ import annotations

import operator
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._batch import encode_batch
from lf_format._blocks import Part, PendingBlock, StoredBlock
from lf_format._codecs import RAW, Coding, bits_of, encode
from lf_format._container import NO_TOKENIZER, Container, Identity, WriteReport
from lf_format._decision import Decision
from lf_format._errors import FormatError, InputError
from lf_format._fields import Field
from lf_format._options import CodecName, CodecOptions
from lf_format._reader import Reader
from lf_format._recode import recode
from lf_format._records import DOCUMENT_END, DOCUMENT_START, check_mask, check_tokens, pack_bits
from lf_format._samples import encode_sample
from lf_format._schema import Schema, TokenizerInfo

DEFAULT_BLOCK_BYTES = 131_072  # the smallest files of bench_size.py; a random read decodes one block


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
        codec: "raw" (fixed offsets, read without decoding), "zstd", "packed", "auto", or CodecOptions, which also
            have the level, dictionaries and a rank table.
        block_bytes: decoded size at which a block is closed; 64-256 KiB is sensible.
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
        codec: CodecName | CodecOptions = "raw",
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        uuid: bytes | None = None,
        _base_offset: int | None = None,
    ) -> None:
        if not 1 <= block_bytes <= lay.MAX_BLOCK_BYTES:
            raise FormatError("block_bytes", expected=f"1..{lay.MAX_BLOCK_BYTES}", found=block_bytes)
        if uuid is not None and len(uuid) != 16:
            raise FormatError("uuid", expected="16 bytes", found=len(uuid))
        if vocab_size is not None:
            (vocab_size,) = _integers("vocabulary size", [vocab_size])
        self._schema = _schema(vocab_size, tokenizer, buckets, loss_mask, fields, meta)
        self._options = CodecOptions.of(codec)
        self._options.check_profile(self._schema.profile)
        self._vocab_size = vocab_size or 1
        self._bits = bits_of(self._vocab_size)
        self._block_bytes, self._uuid = block_bytes, uuid
        self._bucket_of = partial(bisect_left, self._schema.buckets)
        self._pending: dict[int, PendingBlock] = {}
        self._counted = [self._schema.fields.index(f) for f in self._schema.counted]
        self._documents = 0
        self._report: WriteReport | None = None
        self._sealed = self._failed = False
        self._path = Path(path)
        identity = Identity(self._schema, self._vocab_size, tokenizer or NO_TOKENIZER)
        self._out = Container(self._path, identity, uuid, _base_offset)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bucket edges in tokens."""
        return self._schema.buckets

    @property
    def nbytes(self) -> int:
        """Bytes written so far: whole blocks."""
        return self._out.nbytes

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
        counts: list[int] = []
        if self._schema.profile == lay.PROFILE_LFG:
            if loss_mask is not None:
                raise InputError("a mask is a field of the sample", document=document)
            sample: Any = tokens
            parts, steps, length = encode_sample(sample, self._schema, self._vocab_size, document)
            counts = [steps[k] for k in self._counted]
        else:
            parts, length = self._encode_tokens(tokens, loss_mask, document)
        self._documents += bool(document_start)
        self._add(parts, length, bool(document_start) | bool(document_end) << 1, counts)

    def append_batch(self, columns: Mapping[str, Any], flags: Sequence[int] | npt.NDArray[Any]) -> None:
        """Adds n records of a .lfg, faster than `append` and with the same bytes.

        Args:
            columns: by field name the values of the records: an array [n, *shape], a sequence of n values as
                `append` takes them or, for a fixed shape, an iterator over them. It is drawn from record by
                record, so that large values need not be in memory together.
            flags: [n], 1 where a document starts plus 2 where it ends.

        Raises:
            InputError: as `append`; no record is written then, unless an iterator gave the wrong value: those
                before it are. OSError: as `append`.
        """
        self._check_open()
        if self._schema.profile != lay.PROFILE_LFG:
            raise FormatError("a batch needs a .lfg", path=self._path)
        marks = [int(flag) for flag in flags]
        if not all(0 <= mark <= DOCUMENT_START | DOCUMENT_END for mark in marks):
            raise InputError("flags of a batch", expected="0..3", found=marks[:8])
        starts = [mark & DOCUMENT_START for mark in marks]
        documents = [max(self._documents + k - 1, 0) for k in accumulate(starts)]
        batch = encode_batch(columns, self._schema, self._vocab_size, documents)
        self._documents += sum(starts)
        steps = zip(*batch.steps, strict=True) if batch.steps else repeat(())
        records = zip(zip(*batch.parts, strict=False), batch.lengths, marks, steps, strict=False)
        missing = len(marks)
        for record in records:
            self._add(*record)
            missing -= 1
        if missing:
            raise InputError(
                "an iterator of a batch ended early", expected=len(marks), found=len(marks) - missing
            )

    def append_stored(self, parts: Sequence[Part], length: int, flags: int, counts: Sequence[int]) -> None:
        """Adds one record as a file of the same fields holds it; nothing but its size is checked.

        Args:
            parts: bytes of every field.
            length, flags: as in the index.
            counts: steps of the fields with a column of them.
        """
        self._check_open()
        self._add(parts, length, flags, counts)

    def _encode_tokens(self, tokens: object, loss_mask: object, document: int) -> tuple[list[bytes], int]:
        ids = check_tokens(
            tokens, self._vocab_size, self._schema.buckets[-1], self._schema.numpy_dtype, document
        )
        parts = [ids.tobytes()]
        if len(self._schema.fields) == 2:
            parts.append(pack_bits(check_mask(loss_mask, len(ids), document)))
        elif loss_mask is not None:
            raise InputError(
                "this file has no loss mask; open the Writer with loss_mask=True", document=document
            )
        return parts, len(ids)

    def _add(self, parts: Sequence[Part], length: int, flags: int, counts: Sequence[int]) -> None:
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
        self._report = self._out.publish()

    def abort(self) -> None:
        """Removes the temporary file; the writer is of no use afterwards. No effect after `close`."""
        if self._report is None:
            self._failed = True
            self._out.discard()

    def _check_open(self) -> None:
        if self._failed or self._sealed:
            raise FormatError("the writer is closed", path=self._path)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException:
            self.abort()
            raise

    def _flush(self, bucket: int) -> None:
        pending = self._pending.pop(bucket)
        self._guarded(lambda: self._write_block(bucket, pending))

    def _write_block(self, bucket: int, pending: PendingBlock) -> None:
        pieces = pending.pieces()
        size = sum(map(len, pieces))
        if size > lay.MAX_BLOCK_BYTES:
            raise FormatError("block is too large", expected=f"<= {lay.MAX_BLOCK_BYTES}", found=size)
        lengths, hashes, flags = pending.rows()
        edge = self._schema.buckets[bucket]
        wanted = RAW if self._options.measured else self._options.codec_id(edge)
        codec: int = RAW
        stored: bytes | list[Part] = pieces
        if wanted != RAW:
            coding = Coding(self._bits, self._schema.numpy_dtype, int(lengths.sum()))
            codec, stored = encode(b"".join(pieces), wanted, self._options.level, coding)
        counts = pending.step_columns([f.name for f in self._schema.counted])
        largest = pending.max_id(self._schema.fields)
        rows = (lengths, hashes, flags, largest)
        self._out.append_block(StoredBlock(bucket, codec, size, stored, *rows, counts=counts))

    def _finish(self) -> None:
        decisions: tuple[Decision, ...] = ()
        if self._options.measured:
            decisions = self._recode()
        self._out.finish(decisions)

    def _recode(self) -> tuple[Decision, ...]:
        """What is written so far becomes a scratch copy, and its blocks go on as the measurements say."""
        scratch = self._out
        with scratch:
            scratch.finish(durable=False)
            self._out = Container(self._path, scratch.identity, self._uuid)
            with Reader(scratch.temporary) as reader:
                return recode(reader, self._out, self._options)

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
        return Schema.of(vocab_size, _integers("bucket edges", buckets), loss_mask)
    tokens = next((f for f in fields if f.kind == "tokens"), None)
    if loss_mask or (tokens is not None and vocab_size is None):
        raise FormatError("arguments of a .lfg", expected="a mask as a field; vocab_size with token fields")
    if buckets is None and tokens is not None and tokens.ragged:
        raise FormatError("arguments of a .lfg", expected="buckets, because the number of ids differs")
    edges = buckets or ((tokens.shape[0],) if tokens is not None else (1,))
    return Schema.of_samples(tuple(fields), vocab_size or 1, _integers("bucket edges", edges), meta or {})


def _integers(what: str, values: Iterable[object]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)  # type: ignore[arg-type]
    except TypeError:
        raise FormatError(what, expected="integers", found=values) from None
