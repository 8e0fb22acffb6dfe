"""mosaicml-streaming: MDS shards by row number, and through its own iterator."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from peers.indexed import MANY, Read, ahead, as_sent, by_array, by_number, queued, tensors
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run

if torch.version.cuda is None and "+" not in version("torchvision"):
    # streaming imports torchvision, whose wheel for CUDA cannot load its operators beside a CPU build of torch
    for operator in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{operator}", schema)

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def write(job: Job, encoding: str) -> None:
    with MDSWriter(
        out=str(job.fresh(f"mds-{encoding}")),
        columns={"t": "bytes" if encoding == "bytes" else f"ndarray:uint16:{job.length}"},
        size_limit=1 << 30,
    ) as writer:
        for row in job.tokens():
            writer.write({"t": row.tobytes() if encoding == "bytes" else row})


def dataset(job: Job, encoding: str, **options: Any) -> StreamingDataset:
    clean_stale_shared_memory()
    local = str(job.root / f"mds-{encoding}")
    return StreamingDataset(local=local, batch_size=job.batch, num_canonical_nodes=1, **options)


def stacked(samples: list[dict[str, Any]]) -> np.ndarray:
    return np.stack([sample["t"] for sample in samples])


def joined(samples: list[dict[str, Any]]) -> np.ndarray:
    """One copy of all rows, which may be written to."""
    data = bytearray(b"".join([sample["t"] for sample in samples]))
    return np.frombuffer(data, np.uint16).reshape(len(samples), -1)


def reader(job: Job, encoding: str) -> Read:
    data, collate = dataset(job, encoding), joined if encoding == "bytes" else stacked
    return lambda rows: collate(data[rows])


def shard_reader(job: Job) -> Read:
    """Its reader of one shard, past StreamingDataset and its bookkeeping."""
    (shard,) = dataset(job, "bytes").shards
    return lambda rows: joined([shard[row] for row in rows.tolist()])


def iterated(
    job: Job, epoch: int, encoding: str, workers: int, many: int = 1, **options: Any
) -> Iterable[torch.Tensor]:
    torch.set_num_threads(1)
    data = dataset(job, encoding, shuffle=True, shuffle_seed=epoch, **options)
    collate = joined if encoding == "bytes" else stacked
    loader = StreamingDataLoader(
        data, batch_size=many * job.batch, num_workers=workers, drop_last=True,
        collate_fn=lambda s: as_sent(collate(s)), prefetch_factor=ahead(workers, many),
    )  # fmt: skip
    return tensors(job, loader, many)


def prepare(job: Job) -> list[Case]:
    for encoding in ("bytes", "ndarray"):
        write(job, encoding)
    opened = reader(job, "bytes")

    def plain(workers: int, many: int = 1) -> Any:
        return lambda e: iterated(job, e, "bytes", workers, many)

    def numbers(many: int) -> Any:
        return lambda e: by_array(job, e, lambda: opened, 2, many)

    return [
        Case("MDS, by row number", lambda e: by_number(job, e, opened)),
        Case("MDS, by row number in its shard reader", lambda e: by_number(job, e, shard_reader(job))),
        Case("MDS, by row number, ndarray", lambda e: by_number(job, e, reader(job, "ndarray")), tried=True),
        Case("MDS, its iterator", plain(0)),
        Case("MDS, its iterator, ndarray", lambda e: iterated(job, e, "ndarray", 0), tried=True),
        Case("MDS, naive", lambda e: iterated(job, e, "bytes", 0, shuffle_algo="naive"), tried=True),
        Case("MDS, predownload", lambda e: iterated(job, e, "bytes", 0, predownload=1 << 16), tried=True),
        Case("MDS, its iterator, 2 workers", plain(2), queued(2), WORKERS),
        Case("MDS, by row number, 2 workers", numbers(1), queued(2), WORKERS),
        Case("MDS, its iterator, 2 workers", plain(2, MANY), queued(2, MANY), LARGE, tried=True),
        Case("MDS, by row number, 2 workers", numbers(MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "mosaicml-streaming")
