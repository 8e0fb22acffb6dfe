"""Bytes of the same token ids in several stores, at the same zstd level.

    python benchmarks/real_ids.py OUT --megabytes 64
    python benchmarks/bench_size.py OUT/docs.npz --vocab-size 32000 --json RESULT

Every store holds the same records (documents cut at 2048 tokens). "whole file" is what shard stores without random
access do; "per record" are one frame a record and 8 bytes of offset. Everything that a reader needs is counted:
dictionaries, offsets, index, hashes, padding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import zstandard

import lf_format as lff

MAX_LEN = 2048
OFFSET = 8  # bytes that a store of single records keeps for each


def records(path: Path) -> list[bytes]:
    """Documents of an .npz of uint16 ids, cut at MAX_LEN, in document order."""
    rows = np.load(path, allow_pickle=True)["input_ids"]
    return [row[at : at + MAX_LEN].tobytes() for row in rows for at in range(0, len(row), MAX_LEN)]


def per_record(items: list[bytes], level: int, dictionary: zstandard.ZstdCompressionDict | None) -> int:
    """One frame a record."""
    coder = zstandard.ZstdCompressor(level=level, dict_data=dictionary, write_dict_id=False)
    extra = len(dictionary.as_bytes()) if dictionary is not None else 0
    return sum(len(coder.compress(item)) for item in items) + OFFSET * len(items) + extra


def loongbin(source: Path, folder: Path, options: dict[str, object]) -> tuple[int, list[str]]:
    """Size after convert, and which dictionaries were kept."""
    report = lff.convert(source, folder / "out.loongbin", **options)  # type: ignore[arg-type]
    kept = [f"{d.kind} {d.bucket or ''}".strip() for d in report.decisions if d.kept]
    return report.bytes, kept


def write(path: Path, items: list[bytes], vocab_size: int, block_bytes: int) -> Path:
    """A raw .loongbin of the records."""
    info = lff.TokenizerInfo("bench", "")
    edges = lff.bucket_edges(MAX_LEN)
    with lff.Writer(
        path, vocab_size=vocab_size, tokenizer=info, buckets=edges, block_bytes=block_bytes
    ) as writer:
        for item in items:
            writer.append(np.frombuffer(item, np.uint16))
    return path


def rows(items: list[bytes], vocab_size: int, level: int, folder: Path) -> list[dict[str, object]]:
    """Bytes and seconds of every store."""
    found: list[dict[str, object]] = []

    def row(store: str, access: str, action: object) -> None:
        start = time.perf_counter()
        size, note = action()  # type: ignore[operator]
        found.append(
            {
                "store": store,
                "access": access,
                "bytes": size,
                "seconds": time.perf_counter() - start,
                "note": note,
            }
        )

    raw = b"".join(items)
    row("ids as uint16", "record", lambda: (len(raw), ""))
    row("whole file zstd", "none", lambda: (len(zstandard.compress(raw, level)), ""))
    row("per record zstd", "record", lambda: (per_record(items, level, None), ""))
    trained = zstandard.train_dictionary(112_640, items[:: max(len(items) // 4000, 1)])
    row("per record zstd, dictionary of 110 KiB", "record", lambda: (per_record(items, level, trained), ""))
    for kib in (256, 128, 64):
        source = write(folder / f"{kib}.loongbin", items, vocab_size, kib << 10)
        row(f".loongbin zstd, {kib} KiB blocks", "block", lambda s=source: loongbin(s, folder, zstd(level)))
        row(
            f".loongbin zstd and dictionaries, {kib} KiB blocks",
            "block",
            lambda s=source: loongbin(s, folder, zstd(level) | {"dictionaries": True}),
        )
    source = folder / "128.loongbin"
    row(".loongbin raw", "record", lambda: (source.stat().st_size, ""))
    row(".loongbin packed", "block", lambda: loongbin(source, folder, {"codec": "packed"}))
    return found


def zstd(level: int) -> dict[str, object]:
    """Options of convert."""
    return {"codec": "zstd", "zstd_level": level}


def main() -> None:
    """Prints a Markdown table; JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", type=Path, help=".npz of real_ids.py")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--levels", type=int, nargs="+", default=[3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    items = records(args.ids)
    result: dict[str, object] = {
        "version": 1,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "zstandard": zstandard.__version__},
        "records": len(items),
        "bytes": sum(map(len, items)),
        "levels": {},
    }
    for level in args.levels:
        with tempfile.TemporaryDirectory(dir=args.ids.parent) as folder:
            found = rows(items, args.vocab_size, level, Path(folder))
        result["levels"][str(level)] = found  # type: ignore[index]
        whole, frames = int(found[1]["bytes"]), min(int(r["bytes"]) for r in found[2:4])  # type: ignore[call-overload]
        print(
            f"\n| level {level} | access | MB | to whole file | to per record | kept |\n|---|---|---|---|---|---|"
        )
        for r in found:
            size = int(r["bytes"])  # type: ignore[call-overload]
            kept = ", ".join(r["note"]) if r["note"] else ""  # type: ignore[arg-type]
            ratios = f"{size / 1e6:.2f} | {size / whole:.3f} | {size / frames:.3f}"
            print(f"| {r['store']} | {r['access']} | {ratios} | {kept} |")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
