"""`lf-format inspect | verify | stats | head | merge | convert | salvage | overlap`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from lf_format._codecs import CODEC_NAMES
from lf_format._dataset import shard_paths
from lf_format._dictionary import DICTIONARY_NAMES
from lf_format._errors import FormatError
from lf_format._output import printing
from lf_format._reader import Reader
from lf_format._tools_cli import add_commands
from lf_format._verify import verify

_USAGE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lf-format", description="Looks into .loongbin files, makes new ones of them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="header, fields, buckets and counts")
    inspect.add_argument("path", help="a file, or a directory of .loongbin files")
    inspect.add_argument("--split", help="only this split of a directory: train or eval")
    inspect.add_argument("--json", action="store_true", help="JSON instead of text")
    check = commands.add_parser("verify", help="exit 1 when a file is not exactly what was written")
    check.add_argument("path", nargs="+", help="files, or directories of .loongbin files")
    check.add_argument("--deep", action="store_true", help="read and hash every block and record too")
    inspect.set_defaults(run=_inspect)
    check.set_defaults(run=_verify)
    add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry. Returns 0; 1 for a damaged file or a full disk; 2 for usage (no such file, bad options); 141
    when the output is not read to its end; 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        return printing(lambda: args.run(args))
    except KeyboardInterrupt:
        print("lf-format: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"lf-format: {error}", file=sys.stderr)
        return 2 if isinstance(error, _USAGE) else 1
    except FormatError as error:
        print(f"lf-format: {error}", file=sys.stderr)
        return 1


def _verify(args: argparse.Namespace) -> int:
    damaged = False
    for path in [shard for given in args.path for shard in _all_shards(given)]:
        report = verify(path, deep=args.deep)
        damaged |= not report.ok
        for offset, what in report.problems:
            print(f"{path}: byte {offset}: {what}", file=sys.stderr)
        if report.ok:
            depth = "deep" if args.deep else "metadata; --deep reads the content too"
            print(f"{path}: ok ({report.records} records, {report.tokens} tokens, {depth})")
    return int(damaged)


def _all_shards(given: str) -> list[str]:
    """Train and eval files of a directory alike: verifying mixes nothing."""
    try:
        return [str(p) for p in shard_paths(given)]
    except FormatError:
        return [str(p) for split in ("train", "eval") for p in shard_paths(given, split)]


def _inspect(args: argparse.Namespace) -> int:
    shards = []
    for path in shard_paths(args.path, args.split):
        with Reader(path) as reader:
            shards.append(describe(reader))
    print(
        json.dumps({"version": 1, "files": shards}, indent=2)
        if args.json
        else "\n\n".join(map(_text, shards))
    )
    return 0


def describe(reader: Reader) -> dict[str, Any]:
    """What `inspect --json` prints about one file."""
    header, trailer, index = reader.opened.header, reader.opened.trailer, reader.opened.index
    counts = np.bincount(reader.bucket_of, minlength=len(reader.buckets))
    sums = np.bincount(reader.bucket_of, reader.lengths, minlength=len(reader.buckets)).astype(np.int64)
    buckets = [
        {
            "edge": edge,
            "records": int(n),
            "tokens": int(t),
            "padding": 1 - int(t) / (int(n) * edge) if n else 0.0,
        }
        for edge, n, t in zip(reader.buckets, counts, sums, strict=True)
    ]
    return {
        "path": reader.path,
        "format": f"{header.major}.{header.minor}",
        "creator": header.creator,
        "uuid": header.uuid.hex(),
        "fingerprint": reader.fingerprint,
        "vocab_size": reader.vocab_size,
        "max_id": reader.max_id(),
        "tokenizer": {"name": reader.tokenizer.name, "hash": reader.tokenizer.hash},
        "fields": [{"name": f.name, "kind": f.kind, "dtype": f.dtype, "role": f.role} for f in reader.fields],
        "records": trailer.n_records,
        "tokens": trailer.n_tokens,
        "blocks": trailer.n_blocks,
        "documents": int((reader.flags & 1).sum()),
        "bytes": {
            "decoded": int(index.block_raw.sum()),
            "stored": int(index.block_stored.sum()),
            "index": trailer.index_len,
        },
        "codecs": {name: int((index.block_codec == codec).sum()) for codec, name in CODEC_NAMES.items()},
        "dictionaries": [
            {"kind": DICTIONARY_NAMES[entry.kind], "bytes": len(entry.stored), "decoded": len(entry.content)}
            for entry in reader.opened.dictionaries.entries
        ],
        "buckets": buckets,
    }


def _text(info: dict[str, Any]) -> str:
    fields = ", ".join(f"{f['name']} ({f['dtype']})" for f in info["fields"])
    size = info["bytes"]
    lines = [
        f"{info['path']}: format {info['format']}, fingerprint {info['fingerprint']}, by {info['creator']}",
        f"  tokenizer {info['tokenizer']['name']}, vocabulary {info['vocab_size']}, largest id {info['max_id']}",
        f"  fields: {fields}",
        f"  {info['documents']} documents, {info['records']} records, {info['tokens']} tokens, {info['blocks']} blocks",
        f"  {size['stored']} bytes stored, {size['decoded']} decoded, index {size['index']}",
        "  blocks: " + (", ".join(f"{n} {name}" for name, n in info["codecs"].items() if n) or "none"),
        *(f"  {d['kind']} of {d['bytes']} bytes, {d['decoded']} decoded" for d in info["dictionaries"]),
        "  bucket    records      tokens  padding",
    ]
    lines += [
        f"  {b['edge']:>6} {b['records']:>10} {b['tokens']:>11} {b['padding']:>7.1%}" for b in info["buckets"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
