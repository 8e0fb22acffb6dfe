"""The commands of `lf-format` beyond inspect and verify: arguments in, library call, report out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from lf_format._codec_cli import add_codec_arguments, codec_options
from lf_format._dataset import open_dataset, shard_paths
from lf_format._errors import FormatError
from lf_format._layout import PROFILE_LFG
from lf_format._merge import convert, merge
from lf_format._overlap import overlap
from lf_format._reader import Reader
from lf_format._salvage import salvage
from lf_format._stats import BucketSet, LengthSummary, bucket_set, suggest_buckets, summarize

Command = Callable[[argparse.Namespace], int]


def add_commands(commands: Any) -> None:
    """Adds the parsers of stats, head, merge, convert, salvage and overlap to a subparsers action."""
    _stats_parser(commands)
    _head_parser(commands)
    _merge_parser(commands)
    _convert_parser(commands)
    _salvage_parser(commands)
    _overlap_parser(commands)


def _command(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.set_defaults(run=run)
    return parser


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {value}")
    return value


def _print(args: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    print(json.dumps({"version": 1} | value, indent=2) if args.json else text)


def _stats_parser(commands: Any) -> None:
    parser = _command(commands, "stats", _stats, "lengths, padding of the buckets, suggested buckets")
    parser.add_argument("path", help="a file, or a directory of .loongbin files")
    parser.add_argument("--split", help="only this split of a directory: train or eval")
    parser.add_argument(
        "--buckets", type=_at_least_one, help="number of suggested edges (default: as many as now)"
    )
    parser.add_argument(
        "--multiple", type=_at_least_one, default=16, help="suggested edges are multiples (default: 16)"
    )


def _stats(args: argparse.Namespace) -> int:
    with open_dataset(args.path, args.split) as dataset:
        lengths, now = dataset.lengths, bucket_set(dataset.lengths, dataset.buckets)
        summary = summarize(lengths)
        count = len(dataset.buckets) if args.buckets is None else args.buckets
        edges = suggest_buckets(lengths, count, args.multiple) if len(lengths) else dataset.buckets
        sets = {"buckets": now, "suggested": bucket_set(lengths, edges)}
    value = {"lengths": dataclasses.asdict(summary)} | {k: dataclasses.asdict(s) for k, s in sets.items()}
    _print(args, value, _stats_text(summary, sets))
    return 0


def _stats_text(summary: LengthSummary, sets: dict[str, BucketSet]) -> str:
    lines = [
        f"{summary.records} records, {summary.tokens} tokens; length {summary.shortest} - {summary.longest}, "
        f"mean {summary.mean:.1f}, p50 {summary.p50}, p90 {summary.p90}, p99 {summary.p99}"
    ]
    for name, found in sets.items():
        lines.append(f"{name}: padding {found.padding:.1%} with edges {list(found.edges)}")
        rows = zip(found.edges, found.records, found.tokens, strict=True)
        lines += [f"  {edge:>9} {records:>10} records {tokens:>12} tokens" for edge, records, tokens in rows]
    return "\n".join(lines)


def _head_parser(commands: Any) -> None:
    parser = _command(commands, "head", _head, "the first records, read and checked")
    parser.add_argument("path", help="a file, or a directory of .loongbin files")
    parser.add_argument("--split", help="only this split of a directory: train or eval")
    parser.add_argument("-n", type=_at_least_one, default=5, help="records (default: 5)")
    parser.add_argument("--tokens", type=_at_least_one, default=16, help="tokens shown of each (default: 16)")


def _head(args: argparse.Namespace) -> int:
    rows = []
    with open_dataset(args.path, args.split) as dataset:
        for i in range(min(args.n, len(dataset))):
            record = dataset.record(i)
            row: dict[str, Any] = {"record": i, "length": len(record.tokens), "flags": record.flags}
            row["tokens"] = record.tokens[: args.tokens].tolist()
            if record.loss_mask is not None:
                row["loss_tokens"] = int(record.loss_mask.sum())
            rows.append(row)
    text = "\n".join(" ".join(f"{k}={v}" for k, v in row.items()) for row in rows)
    _print(args, {"records": rows}, text)
    return 0


def _merge_parser(commands: Any) -> None:
    parser = _command(commands, "merge", _merge, "one file with the records of several, in order")
    parser.add_argument("inputs", nargs="+", help=".loongbin files")
    parser.add_argument("-o", "--output", required=True, help="new file")


def _merge(args: argparse.Namespace) -> int:
    report = merge(args.inputs, args.output)
    text = f"{report.path}: {report.records} records, {report.tokens} tokens, {report.bytes} bytes"
    _print(args, dataclasses.asdict(report), text)
    return 0


def _convert_parser(commands: Any) -> None:
    parser = _command(commands, "convert", _convert, "the same records under another codec")
    parser.add_argument("input", help="a .loongbin or .lfg file")
    parser.add_argument("-o", "--output", required=True, help="new file")
    add_codec_arguments(parser)


def _convert(args: argparse.Namespace) -> int:
    with Reader(args.input) as reader:
        samples = reader.opened.header.profile == PROFILE_LFG
    try:
        options = codec_options(vars(args), samples)
        options.check_profile(reader.opened.header.profile)
    except FormatError as error:  # usage, not damage
        print(f"lf-format: {error}", file=sys.stderr)
        return 2
    report = convert(args.input, args.output, codec=options)
    text = f"{report.path}: {report.records} records, {report.tokens} tokens, {report.bytes} bytes"
    _print(args, dataclasses.asdict(report), "\n".join([text, *(f"  {d}" for d in report.decisions)]))
    return 0


def _salvage_parser(commands: Any) -> None:
    parser = _command(commands, "salvage", _salvage, "what a damaged or truncated file still holds")
    parser.add_argument("input", help="the damaged file; it is not changed")
    parser.add_argument("-o", "--output", required=True, help="new file")
    parser.add_argument("--like", help="a whole file of the same data set, when header or schema are damaged")
    parser.add_argument("--recut", action="store_true", help="keep blocks whose record boundaries are lost")


def _salvage(args: argparse.Namespace) -> int:
    report = salvage(args.input, args.output, like=args.like, recut=args.recut)
    text = f"{report.output.path}: {report.records} records in {report.whole_blocks} whole blocks of {report.blocks}"
    lines = [f"{text}, {report.recut_records} records cut anew", *(f"note: {note}" for note in report.notes)]
    _print(args, dataclasses.asdict(report), "\n".join(lines))
    for offset, what in report.lost:
        print(f"{args.input}: byte {offset}: lost: {what}", file=sys.stderr)
    return 0


def _overlap_parser(commands: Any) -> None:
    parser = _command(
        commands, "overlap", _overlap, "how much of CHECKED is found in REFERENCE; exit 1 if any"
    )
    parser.add_argument("reference", help="a file or directory, say the training data")
    parser.add_argument("checked", help="a file or directory, say the evaluation data")
    parser.add_argument("--reference-split", help="only this split of a directory")
    parser.add_argument("--checked-split", help="only this split of a directory")
    parser.add_argument("--ngram", type=_at_least_one, default=13, help="tokens (default: 13)")
    parser.add_argument("--threshold", type=float, default=0.8, help="share of n-grams (default: 0.8)")
    parser.add_argument(
        "--memory-mb", type=_at_least_one, default=256, help="for hashes of CHECKED (default: 256)"
    )


def _overlap(args: argparse.Namespace) -> int:
    report = overlap(
        shard_paths(args.reference, args.reference_split),
        shard_paths(args.checked, args.checked_split),
        ngram=args.ngram,
        threshold=args.threshold,
        memory=args.memory_mb << 20,
    )
    lines = [
        f"{report.records} records checked: {report.equal_records} equal a record of the reference",
        f"{report.common_ngrams} of {report.ngrams} {report.ngram}-grams occur in the reference",
        f"{len(report.contaminated)} records at or above {report.threshold:.0%}: {report.contaminated[:20]}",
    ]
    _print(args, dataclasses.asdict(report), "\n".join(lines))
    return int(bool(report.contaminated))
