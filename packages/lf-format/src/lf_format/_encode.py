"""Tokenizing documents, in this process or in spawned ones."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy.typing as npt

from lf_format._documents import Document
from lf_format._errors import InputError, WorkerError
from lf_format._tokenizers import Tokenizer, loads_tokenizer

_BATCH = 64  # documents per message: one document a message spends its time in pickling
_BATCHES_AHEAD = 4  # per worker; bounds memory
Array = npt.NDArray[Any]
Encoded = tuple[str, Array, Array | None]

_worker_tokenizer: Tokenizer | None = None


def encoded(documents: Iterable[Document], tokenizer: Tokenizer, num_workers: int) -> Iterator[Encoded]:
    """(name, ids, loss mask or None) of every document, in order.

    Args:
        documents: consumed lazily.
        tokenizer: for documents that are text.
        num_workers: 1 = in this process; more = spawned processes.

    Raises:
        InputError: naming the document. WorkerError: when a process died.
    """
    if num_workers <= 1:
        for document in documents:
            yield _encode(document, tokenizer)
    else:
        yield from _parallel(documents, tokenizer, num_workers)


def _encode(document: Document, tokenizer: Tokenizer) -> Encoded:
    if document.ids is not None:
        return document.name, document.ids, document.loss_mask
    try:
        return document.name, tokenizer.encode(document.text or ""), None
    except InputError as error:
        raise InputError(
            error.what, document=document.name, position=error.position, found=error.found
        ) from None


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers; without this they would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start(text: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _worker_tokenizer  # a process pool has no other place for per-process state
    _worker_tokenizer = loads_tokenizer(text)


def _work(batch: list[Document]) -> list[Encoded]:
    assert _worker_tokenizer is not None
    return [_encode(document, _worker_tokenizer) for document in batch]


def _parallel(documents: Iterable[Document], tokenizer: Tokenizer, num_workers: int) -> Iterator[Encoded]:
    # spawn: a fork of a process with threads (a trainer, a tokenizer library) may deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start, (tokenizer.dumps(),))
    waiting: deque[Future[list[Encoded]]] = deque()
    source = iter(documents)
    try:
        for batch in iter(lambda: list(itertools.islice(source, _BATCH)), []):
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= num_workers * _BATCHES_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise WorkerError(
            "a tokenizing process died (killed, out of memory, or the calling script lacks "
            'if __name__ == "__main__")',
            expected=f"{num_workers} live workers",
            found="a broken pool",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
