"""`loongforge-preprocess`: text, JSONL or .npz to .loongbin."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from lf_format._errors import FormatError, InputError, WorkerError
from lf_format._preprocess import PreprocessReport, preprocess


class _Progress:
    """One line on a terminal, rewritten at most ten times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.1
            print(f"\r{documents} documents, {tokens} tokens", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loongforge-preprocess",
        description="Packs text, .jsonl or tokenized .npz files into train.loongbin (and eval.loongbin).",
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files or directories")
    add("--output", required=True, help="output directory")
    add("--tokenizer", help='"bytes" or a tokenizer.json (default: bytes for text, none for .npz)')
    add("--vocab-size", type=int, help="for .npz without a tokenizer (default: largest id + 1)")
    add("--text-key", default="text", help="key of the text in .jsonl lines (default: text)")
    add("--bucket-size", type=int, help="bucket width in tokens (default: halvings of --max-len)")
    add("--min-len", type=int, help="first bucket edge; shorter records go there too (default: 16)")
    add("--max-len", type=int, help="longest record; longer documents are split (default: 2048)")
    add("--eval-fraction", type=float, default=0.0, help="share of tokens for eval.loongbin (default: 0)")
    add("--seed", type=int, default=0, help="seed of the choice of held-out documents")
    add("--num-workers", type=int, default=1, help="tokenizing processes (default: 1, in-process)")
    add("--zstd-level", type=int, help="compress blocks, 1..22 (default: raw)")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry. Returns 0; 1 for a bad document, dead worker or full disk; 2 for usage."""
    args = _parser().parse_args(argv)
    options = vars(args)
    as_json, inputs, output = options.pop("json"), options.pop("input"), options.pop("output")
    try:
        report = preprocess(inputs, output, progress=_Progress() if sys.stderr.isatty() else None, **options)
    except (InputError, WorkerError, OSError) as error:
        print(f"loongforge-preprocess: {error}", file=sys.stderr)
        return 1
    except FormatError as error:
        print(f"loongforge-preprocess: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(report) | {"version": 1}) if as_json else _text(report))
    return 0


def _text(report: PreprocessReport) -> str:
    lines = [
        f"{report.documents} documents, {report.records} records, {report.tokens} tokens",
        f"tokenizer {report.tokenizer.name}, vocabulary {report.vocab_size}, buckets {list(report.buckets)}",
        f"{report.split_documents} documents were split, {len(report.empty)} empty ones skipped",
    ]
    lines += [f"  skipped {name}: {reason}" for name, reason in report.empty]
    lines += [f"note: {note}" for note in report.notes]
    for part in (report.train, report.eval):
        if part is not None:
            lines.append(f"{part.path}: {part.records} records, {part.tokens} tokens, {part.bytes} bytes")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
