"""Hugging Face datasets: Arrow tables, a batch by one index of its row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from peers.indexed import MANY, Read, by_array, by_number, queued
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run


def write(job: Job) -> None:
    """As lists of uint16, and as binary values, which Arrow joins faster."""
    tokens = job.tokens()
    features = datasets.Features({"t": datasets.List(datasets.Value("uint16"), length=job.length)})
    lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), job.length)
    table = pa.table({"t": lists}).cast(features.arrow_schema)
    datasets.Dataset(table).save_to_disk(str(job.fresh("hf-lists")), num_shards=1)
    table = pa.table({"t": pa.array([row.tobytes() for row in tokens], pa.binary())})
    datasets.Dataset(table).save_to_disk(str(job.fresh("hf-binary")), num_shards=1)


def formatted(job: Job, kind: str, form: str, in_memory: bool = False) -> Any:
    folder = str(job.root / f"hf-{kind}")
    return datasets.load_from_disk(folder, keep_in_memory=in_memory).with_format(form)


def arrays(data: Any) -> Read:
    return lambda rows: data[rows]["t"]


def joined_lists(data: Any) -> Read:
    """The table of a batch holds a slice a row; Arrow joins them."""

    def read(rows: np.ndarray) -> np.ndarray:
        column = data[rows].column("t").combine_chunks()
        return np.asarray(column.flatten()).reshape(len(rows), -1)

    return read


def joined_bytes(data: Any) -> Read:
    def read(rows: np.ndarray) -> np.ndarray:
        values = data[rows].column("t").combine_chunks().buffers()[2]
        return np.frombuffer(values, np.uint16).reshape(len(rows), -1)

    return read


def selected(job: Job, epoch: int) -> Iterable[Any]:
    data = formatted(job, "lists", "numpy").select(job.batches(epoch).reshape(-1))
    return (batch["t"] for batch in data.iter(job.batch))


def streamed(job: Job, epoch: int) -> Iterable[Any]:
    data = formatted(job, "lists", "numpy").to_iterable_dataset().shuffle(seed=epoch, buffer_size=1000)
    return (batch["t"] for batch in data.iter(job.batch))


def prepare(job: Job) -> list[Case]:
    write(job)

    def table() -> Read:
        return joined_bytes(formatted(job, "binary", "arrow", True))

    def indexed(reader: Callable[[Any], Read], kind: str, form: str, memory: bool = False) -> Any:
        return lambda e: by_number(job, e, reader(formatted(job, kind, form, memory)))

    def workers(many: int) -> Any:
        return lambda e: by_array(job, e, table, 2, many)

    return [
        Case("HF datasets, numpy format", indexed(arrays, "lists", "numpy")),
        Case("HF datasets, torch format", indexed(arrays, "lists", "torch")),
        Case("HF datasets, arrow format joined", indexed(joined_bytes, "binary", "arrow")),
        Case("HF datasets, arrow format joined, in memory", indexed(joined_bytes, "binary", "arrow", True)),
        Case("HF, arrow lists", indexed(joined_lists, "lists", "arrow"), tried=True),
        Case("HF, numpy format in memory", indexed(arrays, "lists", "numpy", True), tried=True),
        Case("HF, select and iter", lambda e: selected(job, e), tried=True),
        Case("HF, iterable with a buffer of 1000", lambda e: streamed(job, e), tried=True),
        Case("HF datasets, arrow format joined, 2 workers", workers(1), queued(2), WORKERS),
        Case("HF datasets, arrow", lambda e: by_number(job, e, table(), MANY), MANY, LARGE),
        Case("HF datasets, arrow, 2 workers", workers(MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "datasets", "pyarrow")
