"""Command line options that choose how blocks are stored, the same for preprocess and convert."""

from __future__ import annotations

import argparse
from typing import Any

from lf_format._errors import FormatError
from lf_format._options import CODECS, Choice, CodecName, CodecOptions

NAMES = ("codec", "zstd_level", "dictionary", "rank_table")


def add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --codec, --zstd-level, --dictionary and --rank-table."""
    add = parser.add_argument_group("how blocks are stored").add_argument
    add("--codec", choices=CODECS, help="default: raw, or zstd when --zstd-level is given")
    add("--zstd-level", type=int, metavar="1..22", help="of zstd (default: 3)")
    for name, what in (("--dictionary", "zstd dictionaries a bucket"), ("--rank-table", "ids by frequency")):
        text = f"{what}, kept where they save 2 %% (default: auto with zstd, off otherwise)"
        add(name, choices=("auto", "off"), help=text)


def codec_options(chosen: dict[str, Any], samples: bool = False) -> CodecOptions:
    """CodecOptions from the values of these arguments, None = not given.

    Args:
        samples: for a .lfg, which has neither dictionaries nor a rank table: they are off unless asked for.

    Raises:
        FormatError: for values that do not go together.
    """
    level = chosen["zstd_level"]
    codec: CodecName = chosen["codec"] or ("raw" if level is None else "zstd")
    if level is not None and codec in ("raw", "packed"):
        raise FormatError("codec for --zstd-level", expected="zstd or auto", found=codec)
    default: Choice = "auto" if codec in ("zstd", "auto") and not samples else "off"
    dictionary, ranks = (chosen[name] or default for name in ("dictionary", "rank_table"))
    return CodecOptions(codec, 3 if level is None else level, dictionary, ranks)
