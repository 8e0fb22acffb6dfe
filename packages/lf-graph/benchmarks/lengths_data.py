"""Documents of real lengths, and the batches that padded and packed training make of them.

Half of the documents fill a row of 2048 (texts are cut there), the others are of 516 to 2048 tokens, evenly: a mean
of 1665, so that rows padded to 2048 are empty by 18.7 %. The same ids lie in a .loongbin for LoongDataLoader and in one
array for torch's DataLoader. Batches hold the same places either way, 8 x 2048; how many of them are useful differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import lf_format
from lf_iouring import LoongDataLoader

Document = npt.NDArray[np.uint16]
Batch = tuple[tuple[Tensor, ...], int]  # what is trained on, and the useful tokens in it
IGNORE = -100  # label of a place that is not predicted
WORKERS = 2
CHOICE = 64  # documents that stock packing chooses from


@dataclass(frozen=True)
class Shape:
    """Documents and batches."""

    vocab: int
    rows: int = 8
    length: int = 2048
    shortest: int = 516
    documents: int = 2000

    @property
    def capacity(self) -> int:
        """Places of a batch, padded or packed."""
        return self.rows * self.length

    @property
    def borders(self) -> int:
        """Entries of cu_seqlens, whatever the batch: a row full of the shortest documents needs so many."""
        return self.capacity // self.shortest + 2

    def lengths(self, seed: int = 0) -> npt.NDArray[np.int64]:
        """Tokens of every document, int64 [documents]."""
        full = np.full(self.documents // 2, self.length)
        others = np.linspace(self.shortest, self.length, self.documents - len(full)).round().astype(np.int64)
        return np.random.default_rng(seed).permutation(np.concatenate((full, others)))


class Corpus:
    """Random documents on disk, in both forms, under a folder of the caller's."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.folder = shape, folder
        self.lengths = shape.lengths()
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))
        ids = np.random.default_rng(1).integers(0, shape.vocab, int(self.starts[-1]), dtype=np.uint16)
        ids.tofile(folder / "documents.bin")
        self._write(ids)
        self.ids: Document = np.memmap(folder / "documents.bin", np.uint16, "r")

    def _write(self, ids: Document) -> None:
        info = lf_format.TokenizerInfo("random", "00")
        length, path = self.shape.length, self.folder / "documents.loongbin"
        edges = sorted({length // 2, length})
        with lf_format.Writer(path, vocab_size=self.shape.vocab, tokenizer=info, buckets=edges) as writer:
            for first, end in itertools.pairwise(self.starts):
                writer.append(ids[first:end])

    def __getitem__(self, number: int) -> Document:
        return self.ids[self.starts[number] : self.starts[number + 1]]


def padded(documents: Sequence[Document], shape: Shape) -> Batch:
    """ids and labels int64 [rows, length]; labels are the next token of the document, else IGNORE."""
    ids = np.zeros((shape.rows, shape.length), np.int64)
    labels = np.full_like(ids, IGNORE)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = document
        labels[row, : len(document) - 1] = document[1:]
    return (torch.from_numpy(ids), torch.from_numpy(labels)), sum(map(len, documents))


def packed(documents: Sequence[Document], shape: Shape, fill_end: bool) -> Batch:
    """ids and labels int64 [capacity], and cu_seqlens int32 [borders], the last of which repeats.

    ``fill_end`` makes sequences of the unused end too, none longer than a document: torch's ``varlen_attn`` leaves rows
    of no sequence, and those beyond the length it is told, as the memory was.
    """
    ids = np.zeros(shape.capacity, np.int64)
    labels = np.full_like(ids, IGNORE)
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    useful = ends[-1]
    for document, at in zip(documents, ends, strict=False):
        ids[at : at + len(document)] = document
        labels[at : at + len(document) - 1] = document[1:]
    while fill_end and ends[-1] < shape.capacity:
        ends.append(min(ends[-1] + shape.length, shape.capacity))
    borders = np.full(shape.borders, ends[-1], np.int32)
    borders[: len(ends)] = ends
    return (torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(borders)), useful


class Padded(Dataset[Document]):
    """One document an item."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus.lengths)

    def __getitem__(self, number: int) -> Document:
        return self.corpus[number]


class Packed(IterableDataset[Batch]):
    """Stock packing, endless: the longest document that still fits, of a choice of 64 drawn at random."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = np.random.default_rng(worker.id if worker else 0)
        lengths, shape = self.corpus.lengths, self.corpus.shape
        choice = rng.integers(0, len(lengths), CHOICE)
        while True:
            numbers: list[int] = []
            room = shape.capacity
            while (fits := np.where(lengths[choice] <= room, lengths[choice], 0)).any():
                best = int(fits.argmax())
                numbers.append(int(choice[best]))
                room -= int(fits[best])
                choice[best] = rng.integers(0, len(lengths))
            yield packed([self.corpus[n] for n in numbers], shape, fill_end=True)


def torch_feed(corpus: Corpus, layout: str, device: torch.device) -> Iterator[Batch]:
    """torch's DataLoader as one would set it up: two workers and pinned memory on a GPU; endless."""
    here = device.type == "cuda"
    common: dict[str, Any] = {"num_workers": WORKERS if here else 0, "pin_memory": here}
    loader: Iterable[Any]
    if layout == "padded":
        rows = corpus.shape.rows

        def collate(documents: Sequence[Document]) -> Batch:
            return padded(documents, corpus.shape)

        order = torch.Generator().manual_seed(0)
        loader = DataLoader(
            Padded(corpus), rows, True, collate_fn=collate, drop_last=True, generator=order, **common
        )
    else:
        loader = DataLoader(Packed(corpus), batch_size=None, **common)
    while True:
        for tensors, useful in loader:
            yield tuple(t.to(device, non_blocking=True) for t in tensors), useful


def loong_feed(corpus: Corpus, device: torch.device) -> Iterator[Batch]:
    """LoongDataLoader: rows of the whole capacity, packed by first fit, hashes checked, copied ahead; endless."""
    shape = corpus.shape
    with (
        lf_format.open_dataset(corpus.folder / "documents.loongbin") as dataset,
        LoongDataLoader(
            dataset,
            global_batch=1,
            pack=shape.capacity,
            device="cuda" if device.type == "cuda" else None,
            return_type="torch",
        ) as loader,
    ):
        lengths = dataset.lengths.astype(np.int64)  # in the order of the file, which is by length
        for batch in loader:
            useful = int(lengths[np.asarray(batch.ids)].sum())
            yield laid(batch, shape, useful), useful


def laid(batch: Any, shape: Shape, useful: int) -> tuple[Tensor, ...]:
    """A packed batch of one row as :func:`packed` lays it, without waiting for the device.

    The loader's last segment is the unused end, which is left out.
    """
    ids = batch.tokens.view(-1).to(torch.int64)
    labels = torch.where(batch.loss_mask.view(-1)[1:].bool(), ids[1:], IGNORE)
    borders = batch.cu_seqlens[: len(batch.ids) + 1]
    return (
        ids,
        F.pad(labels, (0, 1), value=IGNORE),
        F.pad(borders, (0, shape.borders - len(borders)), value=useful),
    )
