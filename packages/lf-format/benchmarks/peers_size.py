"""Bytes of the same token ids in the stores of other libraries, at one zstd level.

    PYTHON benchmarks/peers_size.py DOCS.npz --level 3 --folder SCRATCH

PYTHON has mosaicml-streaming, litdata, array_record, pyarrow and numpy; bench_size.py runs this with --peers PYTHON.
Prints one JSON object a store. Every store holds the same records; its folder is counted whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from litdata.streaming.writer import BinaryWriter
from streaming import MDSWriter

MAX_LEN = 2048
BLOCK = 32  # records of 4 KiB: about 128 KiB, like a block of .loongbin
ROWS = 1000  # row groups and record batches of Hugging Face datasets
SHARD = 1 << 26  # default of MDS, recommended by litdata
Make = Callable[[list[bytes], Path, int], None]


def records(path: Path) -> list[bytes]:
    """Documents of an .npz of uint16 ids, cut at MAX_LEN, in document order."""
    rows = np.load(path, allow_pickle=True)["input_ids"]
    return [row[at : at + MAX_LEN].tobytes() for row in rows for at in range(0, len(row), MAX_LEN)]


def mds(items: list[bytes], folder: Path, level: int) -> None:
    """MDS: bytes columns, whole shards compressed, no hashes."""
    with MDSWriter(
        columns={"ids": "bytes"}, out=str(folder), compression=f"zstd:{level}", size_limit=SHARD
    ) as writer:
        for item in items:
            writer.write({"ids": item})


def litdata(granularity: str) -> Make:
    """litdata: `granularity` is chunk, batch (of 256 items, its default) or sample."""

    def make(items: list[bytes], folder: Path, level: int) -> None:
        writer = BinaryWriter(
            str(folder), chunk_bytes=SHARD, compression=f"zstd:{level}", compression_level=granularity
        )
        for number, item in enumerate(items):
            writer[number] = item
        writer.done()
        writer.merge()

    return make


def array_record(group: int) -> Make:
    """ArrayRecord with `group` records a compressed chunk."""

    def make(items: list[bytes], folder: Path, level: int) -> None:
        folder.mkdir()
        writer = ArrayRecordWriter(str(folder / "ids"), f"group_size:{group},zstd:{level}")
        for item in items:
            writer.write(item)
        writer.close()

    return make


def _table(items: list[bytes]) -> pa.Table:
    values = pa.array(np.frombuffer(b"".join(items), np.uint16))
    ends = np.cumsum([0, *(len(item) // 2 for item in items)])
    return pa.table({"ids": pa.LargeListArray.from_arrays(pa.array(ends), values)})


def parquet(items: list[bytes], folder: Path, level: int) -> None:
    """Parquet with the row groups of Hugging Face datasets."""
    folder.mkdir()
    options = {"compression": "zstd", "compression_level": level, "use_dictionary": False}
    pq.write_table(_table(items), folder / "ids.parquet", row_group_size=ROWS, **options)


def arrow(items: list[bytes], folder: Path, level: int) -> None:
    """An Arrow file, as Hugging Face datasets write it, with compressed buffers."""
    folder.mkdir()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", level))
    table = _table(items)
    with pa.ipc.new_file(folder / "ids.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=ROWS)


# store: (what one record costs to reach, how it is made)
STORES: dict[str, tuple[str, Make]] = {
    "MDS, shards of 64 MiB": ("shard", mds),
    "litdata, chunks of 64 MiB": ("shard", litdata("chunk")),
    "litdata, batches of 256 (its default)": ("256 records", litdata("batch")),
    f"Parquet, row groups of {ROWS}": ("1000 records", parquet),
    f"Arrow IPC, batches of {ROWS}": ("1000 records", arrow),
    f"ArrayRecord, group_size:{BLOCK}": (f"{BLOCK} records", array_record(BLOCK)),
    "ArrayRecord, group_size:1": ("record", array_record(1)),
    "litdata, samples": ("record", litdata("sample")),
}


def main() -> None:
    """Prints the versions, then one line a store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    items = records(args.ids)
    names = ("mosaicml-streaming", "litdata", "array_record", "pyarrow")
    print(json.dumps({"versions": {name: version(name) for name in names}}), flush=True)
    for store, (access, make) in STORES.items():
        folder = args.folder / "store"
        start = time.process_time()
        make(items, folder, args.level)
        seconds = time.process_time() - start
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder)
        print(json.dumps({"store": store, "access": access, "bytes": size, "cpu_s": seconds}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
