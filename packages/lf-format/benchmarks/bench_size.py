"""Bytes of the same token ids in several stores, at the same zstd level.

    python benchmarks/bench_size.py --peers PYTHON --json RESULT

Every store holds the same records (documents cut at 2048 tokens). Everything that a reader needs is counted:
dictionaries, offsets, index, hashes, padding. PYTHON runs peers_size.py, which says what it needs; without it the
table has our rows and two baselines made by zstandard alone. The ids come from real_ids.py, once, into a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from real_ids import DEFAULT_ROOTS, VOCAB, build

import lf_format as lff

MAX_LEN = 2048
MEGABYTES = 272
OFFSET = 8  # bytes that a store of single records keeps for each
SAMPLED = 1000  # records read in random order
DEFAULT_KIB = 128
MEASURED: dict[str, Any] = {"dictionary": "auto", "rank_table": "auto"}
Row = dict[str, Any]


def records(path: Path) -> list[bytes]:
    """Documents of an .npz of uint16 ids, cut at MAX_LEN, in document order."""
    rows = np.load(path, allow_pickle=True)["input_ids"]
    return [row[at : at + MAX_LEN].tobytes() for row in rows for at in range(0, len(row), MAX_LEN)]


def per_record(items: list[bytes], level: int, dictionary: zstandard.ZstdCompressionDict | None) -> int:
    """One frame a record."""
    coder = zstandard.ZstdCompressor(level=level, dict_data=dictionary, write_dict_id=False)
    extra = len(dictionary.as_bytes()) if dictionary is not None else 0
    return sum(len(coder.compress(item)) for item in items) + OFFSET * len(items) + extra


def baselines(items: list[bytes], level: int) -> list[Row]:
    """The ids as they are, and single frames with and without a dictionary."""
    trained = zstandard.train_dictionary(112_640, items[:: max(len(items) // 4000, 1)])
    sizes = {
        "ids as uint16": sum(map(len, items)),
        "zstandard, a frame a record": per_record(items, level, None),
        "zstandard, a frame a record, dictionary of 110 KiB": per_record(items, level, trained),
    }
    return [{"store": store, "access": "record", "bytes": size} for store, size in sizes.items()]


def write(path: Path, items: list[bytes], kib: int) -> Path:
    """A raw .loongbin of the records."""
    settings: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer": lff.TokenizerInfo("bench", "")}
    with lff.Writer(path, buckets=lff.bucket_edges(MAX_LEN), block_bytes=kib << 10, **settings) as writer:
        for item in items:
            writer.append(np.frombuffer(item, np.uint16))
    return path


def converted(source: Path, options: lff.CodecOptions, name: str) -> Row:
    """Size after convert, what was kept, and what reading costs."""
    target = source.with_name("out.loongbin")
    start = time.process_time()
    report = lff.convert(source, target, codec=options)
    seconds = time.process_time() - start
    kept = [f"{d.kind} {d.bucket or ''}".strip() for d in report.decisions if d.kept]
    row = {"store": name, "access": "block", "bytes": report.bytes, "cpu_s": seconds, "kept": kept}
    return row | reading(target)


def reading(path: Path) -> Row:
    """CPU time of reading: microseconds a record in random order, million tokens a second in block order."""
    with lff.Reader(path) as reader:
        ids = np.random.default_rng(0).integers(0, len(reader), SAMPLED).tolist()
        start = time.process_time()
        for i in ids:
            reader.record(i)
        random = (time.process_time() - start) / SAMPLED
        blocks = range(0, len(reader.opened.index.block_count), 8)
        tokens = reader.opened.index.block_raw[list(blocks)].sum() / reader.token_dtype.itemsize
        start = time.process_time()
        for block in blocks:
            reader.block_payload(block)
        return {"record_us": random * 1e6, "mtok_s": tokens / (time.process_time() - start) / 1e6}


def ours(items: list[bytes], level: int, folder: Path) -> list[Row]:
    """Rows of .loongbin: blocks of several sizes with what pays, and the other codecs at the default size."""
    found = []
    for kib in (256, DEFAULT_KIB, 64):
        source = write(folder / "raw.loongbin", items, kib)
        options = lff.CodecOptions("zstd", level, **MEASURED)
        found.append(converted(source, options, f".loongbin zstd, what pays, {kib} KiB blocks"))
        if kib == DEFAULT_KIB:
            found.append(
                converted(source, lff.CodecOptions("zstd", level), f".loongbin zstd, {kib} KiB blocks")
            )
            found.append(converted(source, lff.CodecOptions("packed"), ".loongbin packed"))
            raw = {"store": ".loongbin raw", "access": "record", "bytes": source.stat().st_size}
            found.append(raw | reading(source))
    return found


def peers(python: str, ids: Path, level: int, folder: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows of the libraries in their own environment, and their versions."""
    script = Path(__file__).with_name("peers_size.py")
    command = [python, str(script), str(ids), "--level", str(level), "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "store" in line], lines[0]["versions"]


def table(rows: list[Row], level: int) -> str:
    """Markdown; ratios to the smallest store of whole shards and the smallest with access to single records."""
    shard, record = _smallest(rows, "shard"), _smallest(rows, "record")
    names = (f"level {level}", "one access reads", "MB", "to whole shards", "to single records")
    lines = ["| " + " | ".join((*names, "record, us CPU", "Mtok/s", "kept")) + " |", "|---" * 8 + "|"]
    for r in rows:
        ratio = f"{r['bytes'] / shard:.3f}" if shard else ""
        cost = f"{r['record_us']:.0f} | {r['mtok_s']:.0f}" if "record_us" in r else " | "
        first = f"{r['store']} | {r['access']} | {r['bytes'] / 1e6:.2f} | {ratio} | {r['bytes'] / record:.3f}"
        lines.append(f"| {first} | {cost} | {', '.join(r.get('kept', []))} |")
    return "\n".join(lines)


def _smallest(rows: list[Row], access: str) -> int:
    """Bytes of the smallest compressed store of others with this access; 0 when there is none."""
    others = [r for r in rows if not r["store"].startswith((".loongbin", "ids"))]
    return min((r["bytes"] for r in others if r["access"] == access), default=0)


def cached_ids() -> Path:
    """The .npz of real_ids.py, built on first use."""
    folder = Path(tempfile.gettempdir()) / f"lf-real-ids-{MEGABYTES}"
    if not (folder / "docs.npz").exists():
        build(folder, MEGABYTES, DEFAULT_ROOTS)
    return folder / "docs.npz"


def main() -> None:
    """Prints a Markdown table a level; JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ids", type=Path, help=".npz of real_ids.py (default: one in a cache, made when missing)"
    )
    parser.add_argument("--levels", type=int, nargs="+", default=[3])
    parser.add_argument("--peers", help="a Python with the libraries of peers_size.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.ids or cached_ids()
    items = records(path)
    result: Row = {
        "version": 2,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "zstandard": zstandard.__version__},
        "records": len(items),
        "bytes": sum(map(len, items)),
        "levels": {},
    }
    for level in args.levels:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            rows = baselines(items, level) + ours(items, level, Path(scratch))
            if args.peers:
                found, result["versions"]["peers"] = peers(args.peers, path, level, Path(scratch))
                rows += found
        result["levels"][str(level)] = rows
        print(table(rows, level), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
