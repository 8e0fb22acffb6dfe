"""`loongforge-preprocess`: text, JSONL or .npz to .loongbin; JSONL with images and LeRobot data to .lfg."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lf_format._codec_cli import NAMES as CODEC_NAMES
from lf_format._codec_cli import add_codec_arguments, codec_options
from lf_format._errors import FormatError, InputError, WorkerError
from lf_format._lerobot import is_robot_set
from lf_format._output import printing
from lf_format._pairs import PairsReport, preprocess_pairs
from lf_format._preprocess import PreprocessReport, preprocess
from lf_format._preprocess_options import Advance
from lf_format._robot import preprocess_robot
from lf_format._robot_options import RobotReport


class _Bar:
    """A progress bar on a terminal, nothing elsewhere.

    Args:
        unit: what is counted.
        second: what else is told.
    """

    def __init__(self, unit: str, second: str) -> None:
        self._unit, self._second = unit, second
        self._bar = tqdm(unit=f" {unit}", disable=None, dynamic_ncols=True)

    def count(self, done: int, second: int) -> None:
        """`done` units and `second` of the other kind are behind us; how many there are is not known."""
        self._bar.set_postfix_str(f"{second:,} {self._second}", refresh=False)
        self._bar.update(done - self._bar.n)

    def of_input(self, advance: Advance) -> None:
        """The bar counts bytes of input, whose total is known."""
        if self._bar.total is None:
            self._bar.total, self._bar.unit, self._bar.unit_scale = advance.bytes_total, "B", True
        text = f"{advance.documents:,} {self._unit}, {advance.tokens:,} {self._second}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(advance.bytes_read - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._bar.total is not None:
            self._bar.update(
                self._bar.total - self._bar.n
            )  # the end of the last file is after its last document
        self._bar.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loongforge-preprocess",
        description="Packs text, .jsonl, tokenized .npz, Megatron .idx, MDS or datasets folders, WebDataset .tar and "
        ".parquet into train.loongbin (and eval.loongbin), "
        "or .jsonl with images (--image-key) or a LeRobot data set (a folder with meta/info.json) into train.lfg.",
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files or directories")
    add("--output", required=True, help="output directory")
    add("--tokenizer", help='"bytes" or a tokenizer.json (default: bytes for text, none for .npz)')
    add("--vocab-size", type=int, help="for .npz without a tokenizer (default: largest id + 1)")
    add("--text-key", default="text", help="key or column of the text (default: text)")
    add("--ids-key", help="column of token ids instead, in MDS, datasets folders, .tar, .parquet")
    add("--bucket-size", type=int, help="bucket width in tokens (default: halvings of --max-len)")
    add("--min-len", type=int, help="first bucket edge; shorter records go there too (default: 16)")
    add("--max-len", type=int, help="longest record; longer documents are split (default: 2048)")
    add("--too-long", choices=("split", "raise"), default="split", help="documents (default: split)")
    add("--empty", choices=("skip", "raise"), default="skip", help="documents (default: skip, and name them)")
    add(
        "--eval-fraction",
        type=float,
        default=0.0,
        help="share of tokens (robot data: frames) held out (default: 0)",
    )
    add("--seed", type=int, default=0, help="seed of the choice of held-out documents")
    add("--num-workers", type=int, default=1, help="tokenizing processes (default: 1, in-process)")
    add_codec_arguments(parser)
    add_robot = parser.add_argument_group("images and robot data, to .lfg").add_argument
    add_robot("--image-key", metavar="KEY", help="key of an image path in .jsonl lines")
    add_robot(
        "--image-size", type=int, nargs=2, metavar=("H", "W"), help="pixels (default: 224 224; 0 0 = as is)"
    )
    add_robot("--action-horizon", type=int, help="actions in a record (default: 16)")
    add_robot("--eval-episodes", type=int, nargs="+", metavar="N", help="episodes for eval.lfg, whole")
    add_robot("--relative-actions", nargs="+", metavar="NAME", help="parts of modality.json, or all")
    add_robot(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="robot data in parts, so that a killed run goes on, or straight (default: parts for 1 GiB or more)",
    )
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry. Returns 0; 1 for a bad document, dead worker or full disk; 2 for usage; 130 when interrupted;
    141 when the output is not read to its end, with the files complete."""
    args = _parser().parse_args(argv)
    options = vars(args)
    as_json, inputs, output = options.pop("json"), options.pop("input"), options.pop("output")
    try:
        report = _run(inputs, output, options)
    except KeyboardInterrupt:
        print("loongforge-preprocess: interrupted; the same command continues", file=sys.stderr)
        return 130
    except (InputError, WorkerError, OSError) as error:
        print(f"loongforge-preprocess: {error}", file=sys.stderr)
        return 1
    except FormatError as error:
        print(f"loongforge-preprocess: {error}", file=sys.stderr)
        return 2
    text = json.dumps(dataclasses.asdict(report) | {"version": 1}) if as_json else _text(report)
    return printing(lambda: print(text))


Report = PreprocessReport | RobotReport | PairsReport
# Options by kind of input; those of another kind are refused, never ignored.
_ROBOT = {"image_size", "action_horizon", "relative_actions", "eval_episodes", "num_workers"}
_ROBOT |= {"tokenizer", "eval_fraction", "seed", "resume"}
_PAIRS = {
    "image_key",
    "text_key",
    "image_size",
    "tokenizer",
    "bucket_size",
    "min_len",
    "max_len",
    "num_workers",
}
_ONLY_SAMPLES = {"image_size", "action_horizon", "relative_actions", "eval_episodes", "image_key", "resume"}


def _run(inputs: list[str], output: str, options: dict[str, Any]) -> Report:
    """Dispatches by what the input is."""
    if any(is_robot_set(Path(name)) for name in inputs):
        if len(inputs) > 1:
            raise FormatError("a robot data set is one input", found=inputs)
        chosen = _sample_options(options, _ROBOT, "robot data")
        with _Bar("episodes", "frames") as bar:
            return preprocess_robot(inputs[0], output, progress=bar.count, **chosen)
    if options["image_key"] is not None:
        chosen = _sample_options(options, _PAIRS, "image pairs")
        with _Bar("records", "tokens") as bar:
            return preprocess_pairs(inputs, output, progress=bar.count, **chosen)
    _chosen(options, set(options) - _ONLY_SAMPLES, "text")
    rest = {k: v for k, v in options.items() if k not in _ONLY_SAMPLES and k not in CODEC_NAMES}
    rest["codec"] = codec_options(options)
    with _Bar("documents", "tokens") as bar:
        return preprocess(inputs, output, progress=bar.of_input, **rest)


def _sample_options(options: dict[str, Any], known: set[str], kind: str) -> dict[str, Any]:
    """Arguments for a .lfg: `_chosen`, with those of the codec as one."""
    chosen = _chosen(options, known | set(CODEC_NAMES), kind)
    rest = {k: v for k, v in chosen.items() if k not in CODEC_NAMES}
    return rest | {"codec": codec_options(options, samples=True)}


def _chosen(options: dict[str, Any], known: set[str], kind: str) -> dict[str, Any]:
    """Options that were given; FormatError for one that this kind of input does not have."""
    given = {k: v for k, v in options.items() if v != _parser().get_default(k)}
    if given.keys() - known:
        raise FormatError(f"options for {kind}", expected=sorted(known), found=sorted(given.keys() - known))
    if "image_size" in given:
        height, width = given["image_size"]
        given["image_size"] = (height, width) if height or width else None
    return given


def _text(report: Report) -> str:
    if isinstance(report, RobotReport):
        return _robot_text(report)
    if isinstance(report, PairsReport):
        return _pairs_text(report)
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
            lines += [f"  {decision}" for decision in part.decisions]
    return "\n".join(lines)


def _robot_text(report: RobotReport) -> str:
    lines = [
        f"{report.version}: {report.episodes} episodes, {report.frames} frames, cameras {list(report.cameras)}"
    ]
    lines += [f"skipped camera {name}: {reason}" for name, reason in report.skipped_cameras]
    lines += [f"dropped episode {index}: {reason}" for index, reason in report.dropped_episodes]
    lines += [f"note: {note}" for note in report.notes]
    if report.eval is not None:
        lines.append(f"{report.eval.path}: episodes {list(report.eval_episodes)}, {report.eval.bytes} bytes")
        lines += [f"  {decision}" for decision in report.eval.decisions]
    lines.append(f"{report.output.path}: {report.output.bytes} bytes")
    return "\n".join([*lines, *(f"  {decision}" for decision in report.output.decisions)])


def _pairs_text(report: PairsReport) -> str:
    lines = [
        f"{report.records} records, {report.tokens} tokens, {len(report.empty)} lines skipped",
        f"tokenizer {report.tokenizer.name}, vocabulary {report.vocab_size}, buckets {list(report.buckets)}",
    ]
    lines += [f"  skipped {name}: {reason}" for name, reason in report.empty]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"{report.output.path}: {report.output.bytes} bytes")
    return "\n".join([*lines, *(f"  {decision}" for decision in report.output.decisions)])


if __name__ == "__main__":
    sys.exit(main())
