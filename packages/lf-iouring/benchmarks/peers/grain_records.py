"""Grain over ArrayRecord, and ArrayRecord alone; it checks a hash of every record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from peers.indexed import MANY, Read, by_array, by_number, queued
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run

FILE_BUFFER = 8192  # bytes; a row needs 4.1 KB, and the default of 32 KiB reads eight of them


def store(job: Job) -> str:
    return str(job.root / "records" / "t.array_record")


def write(job: Job) -> None:
    job.fresh("records")
    writer = ArrayRecordWriter(store(job), "group_size:1,uncompressed")
    for row in job.tokens():
        writer.write(row.tobytes())
    writer.close()


def joined(records: list[bytes]) -> np.ndarray:
    return np.frombuffer(bytearray(b"".join(records)), np.uint16).reshape(len(records), -1)


def source(job: Job) -> Read:
    records = ArrayRecordDataSource([store(job)])
    return lambda rows: joined(records.__getitems__(rows.tolist()))


def one_by_one(job: Job) -> Read:
    records = ArrayRecordDataSource([store(job)])
    return lambda rows: joined([records[row] for row in rows.tolist()])


def reader(job: Job, options: str = "", buffer: int = FILE_BUFFER) -> Read:
    """Its C++ reader, past the data source."""
    opened = ArrayRecordReader(
        store(job), options="readahead_buffer_size:0" + options, file_reader_buffer_size=buffer
    )
    return lambda rows: joined(opened.read(rows.tolist()))


class ReadBatch:
    """A transformation of row numbers into their rows; opens the file in the process that reads."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.read: Read | None = None

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.read = self.read or reader(self.job)
        return self.read(rows)

    def __reduce__(self) -> Any:
        return ReadBatch, (self.job,)


def numbers_first(job: Job, epoch: int, many: int = 1) -> grain.MapDataset:
    """Row numbers are shuffled and batched, and a batch is read by one call."""
    rows = grain.MapDataset.range(job.records).seed(epoch).shuffle()
    return rows.batch(many * job.batch, drop_remainder=True, batch_fn=np.array).map(ReadBatch(job))


def rows_first(job: Job, epoch: int) -> grain.MapDataset:
    """As documented: a data source, shuffled and batched."""
    rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([store(job)]))
    return rows.seed(epoch).shuffle().batch(job.batch, drop_remainder=True, batch_fn=joined)


def threads(data: grain.MapDataset, number: int) -> Iterable[Any]:
    options = grain.ReadOptions(num_threads=number, prefetch_buffer_size=4 * number)
    return data.to_iter_dataset(options)


def processes(job: Job, epoch: int, number: int, many: int = 1) -> Iterable[Any]:
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    workers = grain.MultiprocessingOptions(num_workers=number, per_worker_buffer_size=4)
    batches = numbers_first(job, epoch, many).to_iter_dataset(options).mp_prefetch(workers)
    return batches if many == 1 else job.cut(batches)


def prepare(job: Job) -> list[Case]:
    write(job)

    def indexed(way: Callable[..., Read], *options: Any) -> Any:
        return lambda e: by_number(job, e, way(job, *options))

    def workers(many: int) -> Any:
        return lambda e: by_array(job, e, lambda: reader(job), 2, many)

    return [
        Case("ArrayRecord, its reader", indexed(reader)),
        Case("ArrayRecord, data source, __getitems__", indexed(source)),
        Case("ArrayRecord, data source, one by one", indexed(one_by_one)),
        Case("ArrayRecord, buffer 32768", indexed(reader, "", 32768), tried=True),
        Case("ArrayRecord, max_parallelism 0", indexed(reader, ",max_parallelism:0"), tried=True),
        Case("ArrayRecord, max_parallelism 2", indexed(reader, ",max_parallelism:2"), tried=True),
        Case("grain, batches of numbers", lambda e: threads(numbers_first(job, e), 0)),
        Case("grain, batches of rows", lambda e: threads(rows_first(job, e), 0)),
        Case("grain, MapDataset", lambda e: numbers_first(job, e), tried=True),
        Case("grain, 1 thread", lambda e: threads(numbers_first(job, e), 1), 5, tried=True),
        Case("grain, rows, 16 threads", lambda e: threads(rows_first(job, e), 16), 65, tried=True),
        Case("grain, 2 workers", lambda e: processes(job, e, 2), 16, WORKERS),
        Case("ArrayRecord, torch DataLoader, 2 workers", workers(1), queued(2), WORKERS),
        Case("grain, 2 workers", lambda e: processes(job, e, 2, MANY), 12 * MANY, LARGE, tried=True),
        Case("ArrayRecord, its reader", lambda e: by_number(job, e, reader(job), MANY), MANY, LARGE),
        Case("ArrayRecord, torch DataLoader, 2 workers", workers(MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "grain", "array_record")
