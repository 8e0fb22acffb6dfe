"""How the blocks of a new file are to be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lf_format._codecs import PACKED, RAW, ZSTD
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG

CodecName = Literal["raw", "zstd", "packed", "auto"]
Choice = Literal["auto", "off"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)
_IDS = {"raw": RAW, "zstd": ZSTD, "packed": PACKED, "auto": RAW}


@dataclass(frozen=True)
class CodecOptions:
    """How the blocks of a new file are stored. FormatError for values that do not go together.

    What says "auto" is measured on blocks that it was not made from and kept where it saves at least 2 % with its
    own bytes counted; `WriteReport.decisions` says what was kept or dropped and why. That needs every record first,
    so the writer keeps a raw copy of them beside the output until it is done.

    Attributes:
        codec: "raw" (fixed offsets, read without decoding), "zstd", "packed" (ceil(log2 vocabulary) bits an id), or
            "auto": for each bucket the first of these three that no other undercuts by 2 %.
        level: of zstd, 1..22.
        dictionary: "auto" = a zstd dictionary for each bucket.
        rank_table: "auto" = a table of the ids by falling frequency, zstd over ranks.
        raw_up_to: buckets whose edge is at most this stay raw, whatever the codec: the short records.

    A .lfg has "raw", "zstd" and "auto" between these two, without dictionary and rank table.
    """

    codec: CodecName = "raw"
    level: int = 3
    dictionary: Choice = "off"
    rank_table: Choice = "off"
    raw_up_to: int = 0

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise FormatError("codec", expected=" or ".join(CODECS), found=self.codec)
        if type(self.level) is not int or not 1 <= self.level <= 22:
            raise FormatError("zstd level", expected="1..22", found=self.level)
        for what, value in (("dictionary", self.dictionary), ("rank_table", self.rank_table)):
            if value not in get_args(Choice):
                raise FormatError(what, expected="auto or off", found=value)
            if value == "auto" and self.codec not in ("zstd", "auto"):
                raise FormatError(f"codec for {what} auto", expected="zstd or auto", found=self.codec)

    @classmethod
    def of(cls, codec: CodecName | CodecOptions) -> CodecOptions:
        """Options from a codec's name, or as they are."""
        return codec if isinstance(codec, CodecOptions) else cls(codec)

    @property
    def measured(self) -> bool:
        """Whether something is decided by measuring, which needs all records first."""
        return "auto" in (self.codec, self.dictionary, self.rank_table)

    def codec_id(self, edge: int) -> int:
        """Codec of blocks of the bucket that ends at `edge`, as long as nothing was measured."""
        return RAW if edge <= self.raw_up_to else _IDS[self.codec]

    def check_profile(self, profile: int) -> None:
        """FormatError for what a .lfg cannot have."""
        coded = self.codec == "packed" or "auto" in (self.dictionary, self.rank_table)
        if profile == PROFILE_LFG and coded:
            raise FormatError(
                "codec of a .lfg", expected="raw, zstd or auto, dictionary and rank_table off", found=self
            )
