"""Options of preprocess, checked; what it tells while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, get_args

from lf_format._errors import FormatError
from lf_format._options import CodecName, CodecOptions
from lf_format._split import bucket_edges

DEFAULT_MAX_LEN = 2048
TooLong = Literal["split", "raise"]
Empty = Literal["skip", "raise"]


@dataclass(frozen=True)
class Advance:
    """How far preprocess is: documents and tokens stored, bytes of input read and in all (0 = not known)."""

    documents: int
    tokens: int
    bytes_read: int
    bytes_total: int


Progress = Callable[[Advance], None]


class OptionKeys(TypedDict, total=False):
    """Keyword arguments that `preprocess` and `preprocess_documents` share."""

    tokenizer: str | os.PathLike[str] | None
    buckets: Iterable[int] | None
    bucket_size: int | None
    min_len: int | None
    max_len: int | None
    eval_fraction: float
    seed: int
    num_workers: int
    codec: CodecName | CodecOptions
    too_long: TooLong
    empty: Empty
    progress: Progress | None


@dataclass(frozen=True)
class Options:
    """OptionKeys with defaults; checked when made."""

    tokenizer: str | os.PathLike[str] | None = None
    buckets: Iterable[int] | None = None
    bucket_size: int | None = None
    min_len: int | None = None
    max_len: int | None = None
    eval_fraction: float = 0.0
    seed: int = 0
    num_workers: int = 1
    codec: CodecName | CodecOptions = "raw"
    too_long: TooLong = "split"
    empty: Empty = "skip"
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.eval_fraction < 1:
            raise FormatError("eval_fraction", expected="0 <= fraction < 1", found=self.eval_fraction)
        if self.num_workers < 1:
            raise FormatError("num_workers", expected=">= 1", found=self.num_workers)
        for what, value, known in (("too_long", self.too_long, TooLong), ("empty", self.empty, Empty)):
            if value not in get_args(known):
                raise FormatError(what, expected=" or ".join(get_args(known)), found=value)
        self.codec_options()

    def codec_options(self) -> CodecOptions:
        """How blocks are stored. With a min_len, the first bucket has the short records, which stay raw."""
        options = CodecOptions.of(self.codec)
        if self.min_len is None or options.codec == "raw" or options.raw_up_to:
            return options
        return replace(options, raw_up_to=self.edges()[0])

    def edges(self) -> tuple[int, ...]:
        """Bucket edges in tokens; FormatError when the options that give them do not fit together."""
        derived = (self.bucket_size, self.min_len, self.max_len)
        if self.buckets is None:
            longest = DEFAULT_MAX_LEN if self.max_len is None else self.max_len
            return bucket_edges(longest, self.min_len, self.bucket_size)
        if derived != (None, None, None):
            raise FormatError("buckets exclude bucket_size, min_len and max_len", found=derived)
        return tuple(self.buckets)
