"""JSONL of texts and image paths in, one .lfg out. Needs Pillow (extra `video`)."""

from __future__ import annotations

import io
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._atomic import check_output
from lf_format._container import WriteReport
from lf_format._documents import Inputs, input_files, stamps_digest
from lf_format._errors import FormatError, InputError
from lf_format._fields import Field
from lf_format._journal import Journal
from lf_format._layout import PROFILE_LFG, xxh3
from lf_format._options import CodecName, CodecOptions
from lf_format._sample_spool import SampleSpool
from lf_format._schema import TokenizerInfo
from lf_format._split import bucket_edges
from lf_format._tokenizers import Tokenizer, load_tokenizer
from lf_format._video import need
from lf_format._writer import Writer

Pixels = npt.NDArray[np.uint8]
MODE = "mode"  # field of the spool only: the mode of the image that was read
GAP = 2  # a JPEG may be decoded at 1/2, 1/4 or 1/8 as long as it stays this much larger than the result
Progress = Callable[[int, int], None]
Image = Pixels | bytes
Loader = Callable[["Pair"], tuple[Image, str]]


@dataclass(frozen=True)
class Pair:
    """A line: where it stands, its text, its image file."""

    name: str
    text: str
    image: Path


@dataclass(frozen=True)
class PairsReport:
    """What `preprocess_pairs` did.

    Attributes:
        records, tokens: written.
        vocab_size, tokenizer, buckets: of the file.
        empty: (line, reason) of every line that was skipped.
        notes: anything else that is not in the output as it was in the input.
        output: the file.
    """

    records: int
    tokens: int
    vocab_size: int
    tokenizer: TokenizerInfo
    buckets: tuple[int, ...]
    empty: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    output: WriteReport


def preprocess_pairs(
    inputs: Inputs,
    output: str | os.PathLike[str],
    *,
    image_key: str = "image",
    text_key: str = "text",
    image_size: tuple[int, int] | None = (224, 224),
    tokenizer: str | None = None,
    bucket_size: int | None = None,
    min_len: int | None = None,
    max_len: int = 2048,
    num_workers: int = 1,
    codec: CodecName | CodecOptions = "raw",
    progress: Progress | None = None,
) -> PairsReport:
    """Writes `output`/train.lfg with the fields `input_ids` and `image` for every line of .jsonl files.

    An interrupted run goes on behind its last complete part when it is called again.

    Args:
        image_key: key of the image's path, which starts at the folder of the .jsonl unless it is absolute.
        image_size: (height, width): images are decoded, turned as EXIF says, converted to RGB, resized once
            (bilinear, antialiased), stored raw. A JPEG of at least four times the size is decoded at a fraction of it.
            None = JPEG files are stored as they are, EXIF too.
        tokenizer, bucket_size, min_len, max_len: as for `preprocess`; a text of more tokens is refused.
        num_workers: threads that decode and resize; the bytes written do not depend on it.
        codec: how blocks are stored: "raw", "zstd" or "auto".
        progress: called with (records, tokens) stored so far.

    Raises:
        InputError: naming the line, for a text or image that cannot be stored. FormatError: options; another run
            writes into `output`.
    """
    if num_workers < 1:
        raise FormatError("num_workers", expected=">= 1", found=num_workers)
    CodecOptions.of(codec).check_profile(PROFILE_LFG)
    coder = load_tokenizer("bytes" if tokenizer is None else tokenizer)
    edges = bucket_edges(max_len, min_len, bucket_size)
    path = Path(output) / "train.lfg"
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path)
    job = _Job(input_files(inputs), text_key, image_key, image_size, coder, max_len)
    fields = (Field.tokens(), Field.image("image", None if image_size is None else (*image_size, 3)))
    options: dict[str, Any] = {"vocab_size": coder.vocab_size, "tokenizer": coder.info}
    modes: Counter[str] = Counter()
    with Journal(
        path.parent, job.key(), lambda folder: job.spool(folder, fields, options), "lines"
    ) as journal:
        job.load(journal, num_workers, progress)
        with Writer(path, fields=fields, buckets=edges, codec=codec, **options) as writer:
            for sample in journal.spool.samples():
                *parts, mode = sample.parts  # the mode is the last field, and has a column of counts
                writer.append_stored(parts, sample.length, sample.flags, sample.counts[:-1])
                modes[mode.tobytes().decode()] += 1
    notes = [
        f"{n} images of mode {m} became RGB" for m, n in sorted(modes.items()) if m not in ("RGB", "file")
    ]
    report = writer.close()
    counts = (report.records, report.tokens, coder.vocab_size, coder.info, edges)
    return PairsReport(*counts, tuple(journal.empty), (*journal.notes, *notes), report)


@dataclass(frozen=True)
class _Job:
    """What decides which samples the lines become."""

    files: list[Path]
    text_key: str
    image_key: str
    size: tuple[int, int] | None
    coder: Tokenizer
    max_len: int

    def pairs(self) -> Iterator[Pair]:
        return _pairs(self.files, self.text_key, self.image_key)

    def key(self) -> dict[str, Any]:
        """An interrupted run with the same goes on. Reads every line and asks for the stamp of every image."""
        images = 0
        for pair in self.pairs():
            images = xxh3(repr(_stamp(pair.image)).encode(), images)
        return {
            "kind": "image pairs",
            "inputs": stamps_digest([path for path in self.files if path.suffix == ".jsonl"]),
            "images": f"{images:016x}",
            "keys": [self.text_key, self.image_key],
            "image size": None if self.size is None else list(self.size),
            "tokenizer": [self.coder.info.name, self.coder.info.hash],
            "max_len": self.max_len,
            "Pillow": None if self.size is None else need("PIL").__version__,
        }

    def spool(self, folder: Path, fields: Sequence[Field], options: Mapping[str, Any]) -> SampleSpool:
        return SampleSpool(folder, (*fields, Field.bytes(MODE)), buckets=(self.max_len,), **options)

    def load(self, journal: Journal[SampleSpool], workers: int, progress: Progress | None) -> None:
        """Everything into the spool, behind what an interrupted run left there."""
        records, tokens = len(journal.spool), journal.spool.tokens
        rest = islice(self.pairs(), journal.consumed, None)
        for pair, (image, mode) in _loaded(rest, _loader(self.size), workers):
            ids = self.coder.encode(pair.text)
            if not len(ids):
                journal.leave_out(pair.name, "no token")
                continue
            if len(ids) > self.max_len:
                raise InputError(
                    "more tokens than max_len; an image's text is not split", document=pair.name,
                    expected=f"<= {self.max_len}", found=len(ids),
                )  # fmt: skip
            try:
                journal.spool.writer.append({"input_ids": ids, "image": image, MODE: mode.encode()})
            except InputError as error:
                raise InputError(
                    error.what, document=pair.name, expected=error.expected, found=error.found
                ) from None
            journal.count()
            records, tokens = records + 1, tokens + len(ids)
            if progress is not None:
                progress(records, tokens)
        journal.commit()


def _stamp(path: Path) -> tuple[int, int] | None:
    """(bytes, time of change in ns); None for a path that its line will be refused for."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def _pairs(files: list[Path], text_key: str, image_key: str) -> Iterator[Pair]:
    """Lines of the .jsonl files among `files`; images may lie beside them in the same folder."""
    lines = [path for path in files if path.suffix == ".jsonl"]
    if not lines:
        raise InputError("no .jsonl file among the inputs", found=len(files))
    for path in lines:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _pair(raw, path, f"{path}:{number}", text_key, image_key)


def _pair(raw: bytes, path: Path, name: str, text_key: str, image_key: str) -> Pair:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", document=name) from None
    keys = (text_key, image_key)
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in keys):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise InputError("a line needs a text and an image path", document=name, expected=keys, found=found)
    return Pair(name, value[text_key], path.parent / value[image_key])


def _loader(size: tuple[int, int] | None) -> Loader:
    if size is None:
        return lambda pair: (_bytes(pair), "file")
    pil = need("PIL.Image")

    ops = need("PIL.ImageOps")

    def load(pair: Pair) -> tuple[Image, str]:
        raw = _bytes(pair)
        try:
            with pil.open(io.BytesIO(raw)) as image:
                if image.mode[:1] in "IF":  # 16 bits and more would be clipped to 8, not scaled
                    raise InputError(
                        "image of more than 8 bits a channel", document=pair.name, found=image.mode
                    )
                # A JPEG decoder halves sizes almost for free; what is left is at least twice the result, either way up.
                image.draft(None, (GAP * max(size), GAP * max(size)))
                mode = image.mode
                ops.exif_transpose(image, in_place=True)
                rgb = image if mode == "RGB" else image.convert("RGB")
                if rgb.size != (size[1], size[0]):
                    rgb = rgb.resize((size[1], size[0]), pil.Resampling.BILINEAR)
        except InputError:
            raise
        except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
            raise InputError(f"image cannot be decoded: {error}", document=pair.name) from None
        return np.frombuffer(rgb.tobytes(), np.uint8).reshape(*size, 3), mode

    return load


def _bytes(pair: Pair) -> bytes:
    try:
        if pair.image.exists() and not pair.image.is_file():  # a FIFO would wait for a writer
            raise InputError("image is no regular file", document=pair.name, found=pair.image)
        return pair.image.read_bytes()
    except OSError as error:
        raise InputError(f"image cannot be read: {error}", document=pair.name) from None


def _loaded(pairs: Iterator[Pair], load: Loader, workers: int) -> Iterator[tuple[Pair, tuple[Image, str]]]:
    """Pairs with their images, in order; at most four a worker in memory."""
    if workers == 1:
        yield from ((pair, load(pair)) for pair in pairs)
        return
    waiting: deque[tuple[Pair, Future[tuple[Image, str]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for pair in pairs:
            waiting.append((pair, pool.submit(load, pair)))
            if len(waiting) > 4 * workers:
                first, image = waiting.popleft()
                yield first, image.result()
        for first, image in waiting:
            yield first, image.result()
