"""Documents in, train.loongbin and eval.loongbin out."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from lf_format._container import WriteReport
from lf_format._convert_megatron import megatron_largest_id
from lf_format._documents import (
    Document,
    Inputs,
    Position,
    file_documents,
    holds_ids,
    input_files,
    stamps,
    stamps_digest,
)
from lf_format._encode import encoded
from lf_format._errors import FormatError, InputError
from lf_format._fields import TOKEN_DTYPES
from lf_format._journal import Journal
from lf_format._layout import MAX_RECORD_TOKENS
from lf_format._npz import largest_id, npz_members
from lf_format._preprocess_options import Advance, OptionKeys, Options
from lf_format._publish import publish
from lf_format._records import check_mask, check_tokens
from lf_format._schema import TokenizerInfo, token_dtype
from lf_format._split import choose_eval, document_key, pieces
from lf_format._spool import Spool
from lf_format._tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from lf_format._writer import Writer

_LARGEST = {".npz": largest_id, ".idx": megatron_largest_id}


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PreprocessReport:
    """What was written, and what was not.

    Attributes:
        train: report of train.loongbin.
        eval: report of eval.loongbin, None when nothing was held out.
        documents: documents stored; eval_documents of them in eval.loongbin.
        split_documents: documents longer than max_len, stored as several records with boundary flags.
        tokens: stored tokens, all files.
        records: stored records, all files.
        empty: (name, reason) of every document without a token; nothing else is ever skipped.
        buckets: bucket edges.
        vocab_size: of the files.
        tokenizer: of the files.
        notes: automatic choices and their reasons.
    """

    train: WriteReport
    eval: WriteReport | None
    documents: int
    eval_documents: int
    split_documents: int
    tokens: int
    records: int
    empty: tuple[tuple[str, str], ...]
    buckets: tuple[int, ...]
    vocab_size: int
    tokenizer: TokenizerInfo
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Vocabulary:
    """Where ids come from and which are valid."""

    tokenizer: Tokenizer
    info: TokenizerInfo
    size: int
    note: str | None = None


@dataclass(frozen=True)
class _Job:
    """Everything decided before the first document is read."""

    output_dir: Path
    options: Options
    vocabulary: _Vocabulary
    buckets: tuple[int, ...]
    loss_mask: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        return TOKEN_DTYPES[token_dtype(self.vocabulary.size)]

    def writer(self, split: str) -> Writer:
        return Writer(
            self.output_dir / f"{split}.loongbin",
            vocab_size=self.vocabulary.size,
            tokenizer=self.vocabulary.info,
            buckets=self.buckets,
            loss_mask=self.loss_mask,
            codec=self.options.codec_options(),
        )


@dataclass
class _Tally:
    split: int = 0
    held_out: int = 0
    notes: list[str] = field(default_factory=list)


def preprocess(
    inputs: Inputs,
    output_dir: str | os.PathLike[str],
    *,
    text_key: str = "text",
    ids_key: str | None = None,
    vocab_size: int | None = None,
    **options: Unpack[OptionKeys],
) -> PreprocessReport:
    """Packs files into output_dir/train.loongbin and, with `eval_fraction`, output_dir/eval.loongbin.

    Args:
        inputs: files or directories: .jsonl (one document a line), .npz and Megatron .idx (token ids), MDS and
            Hugging Face datasets folders, WebDataset .tar, .parquet; any other file is one UTF-8 document.
        output_dir: made when missing; earlier outputs in it are replaced at the end.
        text_key: key or column of the text.
        ids_key: column of token ids instead, in MDS, datasets folders, .tar and .parquet; needs vocab_size or a
            tokenizer.
        vocab_size: for .npz input without a tokenizer; otherwise the tokenizer's.
        tokenizer: "bytes" (default for text) or the path of a tokenizer.json.
        buckets: bucket edges in tokens, or `bucket_size`, `min_len`, `max_len` to derive them (bucket_edges).
        max_len: longest record, default 2048.
        too_long: longer documents are split into records with boundary flags, or "raise" refuses them; never cut.
        empty: documents without a token are skipped and reported, or "raise" refuses them.
        eval_fraction: held-out share of the tokens: whole documents chosen by a hash of (seed, content).
            Of a single document the tail is held out, which the report notes.
        num_workers: tokenizing processes (spawned); 1 = this process. Not needed, so not started, when all input
            is .npz.
        codec: how blocks are stored: "raw", "zstd", "packed", "auto" or CodecOptions. With `min_len` the first
            bucket stays raw.
        progress: called with an Advance after every document.

    Raises:
        InputError: naming document and position. FormatError: for the arguments. WorkerError: when a process
            died. OSError. No new file has a final name then.
    """
    files, chosen = input_files(inputs), Options(**options)
    tokenized = [f for f in files if holds_ids(f, ids_key)]
    only_ids = chosen.tokenizer is None and len(tokenized) == len(files)
    vocabulary = _of_ids(tokenized, vocab_size) if only_ids else _of_tokenizer(chosen, vocab_size)
    if only_ids:  # workers tokenize, and here is nothing to tokenize
        chosen = replace(chosen, num_workers=1)
    masks = any("loss_mask" in npz_members(f) for f in tokenized if f.suffix == ".npz")
    job = _Job(Path(output_dir), chosen, vocabulary, chosen.edges(), masks)
    position = Position(sum(size for _, size, _ in stamps(files)))
    documents = file_documents(files, text_key, ids_key, position)
    return _run(documents, job, position, _key(files, job, text_key, ids_key))


def preprocess_documents(
    documents: Iterable[tuple[str, str]],
    output_dir: str | os.PathLike[str],
    **options: Unpack[OptionKeys],
) -> PreprocessReport:
    """`preprocess` for (name, text) pairs in memory; consumed once, lazily. Options and errors as there."""
    chosen = Options(**options)
    job = _Job(Path(output_dir), chosen, _of_tokenizer(chosen, None), chosen.edges(), False)
    return _run((Document(name, text=text) for name, text in documents), job, Position(0), None)


def _key(files: list[Path], job: _Job, text_key: str, ids_key: str | None) -> dict[str, Any]:
    """What decides which ids the input becomes. An interrupted run with the same goes on."""
    return {
        "inputs": stamps_digest(files),
        "text key": text_key,
        "ids key": ids_key,
        "tokenizer": [job.vocabulary.info.name, job.vocabulary.info.hash],
        "vocabulary": job.vocabulary.size,
        "loss mask": job.loss_mask,
        "policies": [job.options.empty, job.buckets[-1] if job.options.too_long == "raise" else None],
    }


def _of_tokenizer(options: Options, vocab_size: int | None) -> _Vocabulary:
    tokenizer = load_tokenizer("bytes" if options.tokenizer is None else options.tokenizer)
    if vocab_size not in (None, tokenizer.vocab_size):
        raise FormatError(
            "vocab_size is not that of the tokenizer", expected=tokenizer.vocab_size, found=vocab_size
        )
    return _Vocabulary(tokenizer, tokenizer.info, tokenizer.vocab_size)


def _of_ids(files: list[Path], vocab_size: int | None) -> _Vocabulary:
    """Tokenized input says nothing about its tokenizer."""
    note = None
    if vocab_size is None:
        unknown = [f for f in files if f.suffix not in _LARGEST]
        if unknown:
            raise FormatError("vocab_size is needed for ids of this kind", path=unknown[0])
        vocab_size = max(max(_LARGEST[f.suffix](f) for f in files) + 1, 1)
        note = f"vocabulary size {vocab_size} is the largest id + 1; vocab_size fixes it"
    return _Vocabulary(ByteTokenizer(), TokenizerInfo("unknown", ""), vocab_size, note)


def _run(
    documents: Iterable[Document], job: _Job, position: Position, key: dict[str, Any] | None
) -> PreprocessReport:
    job.output_dir.mkdir(parents=True, exist_ok=True)
    with Journal(job.output_dir, key, lambda folder: Spool(folder, job.dtype, job.loss_mask)) as journal:
        note = job.vocabulary.note
        tally = _Tally(notes=[*([] if note is None else [note]), *journal.notes])
        _tokenize(documents, job, position, journal)
        if len(journal.spool) == 0:
            found = f"{len(journal.empty)} empty documents"
            raise InputError("no document with a token", expected=">= 1", found=found)
        with ExitStack() as stack:
            writers = {"train": _opened(stack, job, "train")}
            if job.options.eval_fraction:
                writers["eval"] = _opened(stack, job, "eval")
            _distribute(journal.spool, writers, job, tally)
            reports = publish(writers, job.output_dir, ".loongbin")
        return _report(reports, job, tally, journal)


def _tokenize(documents: Iterable[Document], job: _Job, position: Position, journal: Journal[Spool]) -> None:
    """Everything into the spool, behind what an interrupted run left there."""
    rest = itertools.islice(documents, journal.consumed, None)
    for name, ids, mask in encoded(rest, job.vocabulary.tokenizer, job.options.num_workers):
        if len(ids) == 0:
            if job.options.empty == "raise":
                raise InputError("document without a token", document=name, expected=">= 1 token", found=0)
            journal.leave_out(name, "no tokens")
            continue
        if job.options.too_long == "raise" and len(ids) > job.buckets[-1]:
            expected = f"<= {job.buckets[-1]} tokens"
            raise InputError("document is too long", document=name, expected=expected, found=len(ids))
        # Whole documents are checked, so that an error names the position in the document, not in a piece.
        narrow = check_tokens(ids, job.vocabulary.size, MAX_RECORD_TOKENS, job.dtype, name)
        journal.spool.add(narrow, check_mask(mask, len(narrow), name) if job.loss_mask else None)
        journal.count()
        if job.options.progress is not None:
            spool = journal.spool
            job.options.progress(Advance(len(spool), spool.tokens, position.read, position.total))
    if journal.resumable:
        journal.commit()


def _opened(stack: ExitStack, job: _Job, split: str) -> Writer:
    """A writer whose temporary file goes when the stack is left, unless it was published."""
    writer = job.writer(split)
    stack.callback(writer.abort)
    return writer


def _store(writer: Writer, ids: Array, mask: Array | None, tally: _Tally) -> None:
    parts = pieces(len(ids), writer.buckets[-1])
    tally.split += len(parts) > 1
    for start, end in parts:
        part = None if mask is None else mask[start:end]
        writer.append(ids[start:end], part, document_start=start == 0, document_end=end == len(ids))


def _distribute(spool: Spool, writers: dict[str, Writer], job: _Job, tally: _Tally) -> None:
    """Documents to train and eval. An exact share needs the total, which only the end of the input knows."""
    if len(spool) == 1 and "eval" in writers:
        _hold_out_tail(*spool.get(0), writers, job, tally)
        return
    held = np.zeros(len(spool), bool)
    if "eval" in writers:
        keys = [document_key(job.options.seed, spool.get(i)[0].tobytes()) for i in range(len(spool))]
        held = choose_eval(keys, spool.lengths(), job.options.eval_fraction)
        tally.held_out = int(held.sum())
    for i in range(len(spool)):
        _store(writers["eval" if held[i] else "train"], *spool.get(i), tally)


def _hold_out_tail(
    ids: Array, mask: Array | None, writers: dict[str, Writer], job: _Job, tally: _Tally
) -> None:
    """One document cannot be divided by documents: its tail is held out, and the report says so."""
    if len(ids) < 2:
        raise InputError(
            "one document of one token cannot be divided", expected=">= 2 tokens", found=len(ids)
        )
    cut = max(len(ids) - math.ceil(job.options.eval_fraction * len(ids)), 1)
    tally.notes.append(f"there is one document: its last {len(ids) - cut} of {len(ids)} tokens are held out")
    for split, part in (("train", slice(0, cut)), ("eval", slice(cut, None))):
        _store(writers[split], ids[part], None if mask is None else mask[part], tally)
    tally.held_out = 1


def _report(
    reports: dict[str, WriteReport], job: _Job, tally: _Tally, journal: Journal[Spool]
) -> PreprocessReport:
    return PreprocessReport(
        train=reports["train"],
        eval=reports.get("eval"),
        documents=len(journal.spool),
        eval_documents=tally.held_out,
        split_documents=tally.split,
        tokens=sum(r.tokens for r in reports.values()),
        records=sum(r.records for r in reports.values()),
        empty=tuple(journal.empty),
        buckets=job.buckets,
        vocab_size=job.vocabulary.size,
        tokenizer=job.vocabulary.info,
        notes=tuple(tally.notes),
    )
