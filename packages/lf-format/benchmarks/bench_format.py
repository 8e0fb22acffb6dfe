"""Write, random read and verify rates of .loongbin beside plain numpy files, in one run.

    python benchmarks/bench_format.py --json OUT [--megabytes 128] [--repeat 5]

Every row moves the same token ids (uint16, records of 2048). Reads are random batches of 8 records from the page
cache. Peers: np.save + memmap gather (no check at all), np.savez + np.load (CRC-32 of the whole array).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

import lf_format as lff

LENGTH, BATCH, VOCAB = 2048, 8, 50_257
XXH3 = "xxh3 per record and block"
TOKENIZER = lff.TokenizerInfo("bench", "")


@dataclass(frozen=True)
class Row:
    """One measured case: token rates in Mtok/s over the repeats, and the check it makes."""

    group: str
    name: str
    check: str
    median: float
    lowest: float
    highest: float
    ratio: float = 1.0


def measure(tokens: int, repeat: int, action: Callable[[], object]) -> tuple[float, float, float]:
    """Median, lowest and highest Mtok/s of `action`, which handles `tokens` tokens a call."""
    rates = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        rates.append(tokens / (time.perf_counter() - start) / 1e6)
    return statistics.median(rates), min(rates), max(rates)


def synced(path: Path, save: Callable[[Path], object]) -> None:
    """Saves and makes durable, as the Writer does."""
    save(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Cases:
    """The data set and every case on it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        random = np.random.default_rng(0)
        count = max(megabytes * 1_000_000 // (2 * LENGTH), BATCH)
        # Zipf-like ids, so that zstd has something to do, as in text.
        self.ids = (VOCAB ** random.random((count, LENGTH), np.float32) - 1).astype(np.uint16)
        self.tokens = self.ids.size
        self.folder = folder
        self.batches = np.array_split(random.permutation(count), max(count // BATCH, 1))

    def write_loongbin(self, name: str, codec: str) -> None:
        with lff.Writer(
            self.folder / name, vocab_size=VOCAB, tokenizer=TOKENIZER, buckets=(LENGTH,), codec=codec
        ) as writer:
            for record in self.ids:
                writer.append(record)

    def read_records(self, name: str) -> None:
        with lff.Reader(self.folder / name) as reader:
            out = np.empty((BATCH + 1, LENGTH), np.uint16)
            for batch in self.batches:
                for row, i in enumerate(batch.tolist()):
                    out[row] = reader.record(i).tokens

    def read_in_order(self, name: str) -> None:
        with lff.Reader(self.folder / name) as reader:
            for i in range(len(reader)):
                reader.record(i)

    def read_extents(self) -> None:
        with lff.Reader(self.folder / "raw.loongbin") as reader:
            out = np.empty((BATCH + 1, LENGTH), np.uint16)
            for batch in self.batches:
                for row, offset in enumerate(reader.extents(batch).offset.tolist()):
                    os.preadv(reader.fileno(), [out[row]], offset)

    def gather_memmap(self) -> None:
        data = np.load(self.folder / "ids.npy", mmap_mode="r")
        for batch in self.batches:
            data[batch]

    def load_npz(self) -> None:
        with np.load(self.folder / "ids.npz") as data:
            ids = data["ids"]
        for batch in self.batches:
            ids[batch]

    def test_npz(self) -> None:
        with zipfile.ZipFile(self.folder / "ids.npz") as archive:
            assert archive.testzip() is None

    def verify(self, name: str) -> None:
        assert lff.verify(self.folder / name).ok

    def listed(self) -> list[tuple[str, str, str, Callable[[], object]]]:
        """(group, name, check, action); the first of a group is its reference."""
        npy, npz = self.folder / "ids.npy", self.folder / "ids.npz"
        return [
            ("write", "np.save + fsync", "none", lambda: synced(npy, lambda p: np.save(p, self.ids))),
            ("write", "np.savez + fsync", "CRC-32", lambda: synced(npz, lambda p: np.savez(p, ids=self.ids))),
            ("write", "Writer raw", XXH3, lambda: self.write_loongbin("raw.loongbin", "raw")),
            ("write", "Writer zstd-3", XXH3, lambda: self.write_loongbin("zstd.loongbin", "zstd")),
            ("read", "memmap gather", "none", self.gather_memmap),
            ("read", "np.load of .npz, then gather", "CRC-32 of the array", self.load_npz),
            ("read", "Reader.extents + preadv", "none", self.read_extents),
            ("read", "Reader.record raw", "xxh3 per record", lambda: self.read_records("raw.loongbin")),
            ("read", "Reader.record zstd, in file order", XXH3, lambda: self.read_in_order("zstd.loongbin")),
            ("verify", "zipfile testzip of .npz", "CRC-32", self.test_npz),
            ("verify", "verify raw, deep", "every hash, id and padding", lambda: self.verify("raw.loongbin")),
            ("verify", "verify zstd, deep", "every hash, id and padding", lambda: self.verify("zstd.loongbin")),
        ]  # fmt: skip


def run(cases: Cases, repeat: int) -> list[Row]:
    """All rows; `ratio` is the median over that of the first row of the group."""
    rows: list[Row] = []
    reference: dict[str, float] = {}
    for group, name, check, action in cases.listed():
        median, lowest, highest = measure(cases.tokens, repeat, action)
        base = reference.setdefault(group, median)
        rows.append(Row(group, name, check, median, lowest, highest, median / base))
    return rows


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zstandard": zstandard.__version__,
        "xxhash": xxhash.VERSION,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--megabytes", type=int, default=128, help="size of the token ids")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder), args.megabytes)
        rows = run(cases, args.repeat)
        sizes = {p.name: p.stat().st_size for p in sorted(Path(folder).iterdir())}
    print("| | case | check | Mtok/s median (lowest - highest) | ratio |\n|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.group} | {r.name} | {r.check} | {r.median:.0f} ({r.lowest:.0f} - {r.highest:.0f}) | {r.ratio:.2f} |"
        )
    print(f"\n{cases.tokens} tokens; bytes: {sizes}\n{where}")
    if args.json:
        result = {
            "version": 1,
            "machine": where,
            "tokens": cases.tokens,
            "bytes": sizes,
            "rows": [asdict(r) for r in rows],
        }
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
