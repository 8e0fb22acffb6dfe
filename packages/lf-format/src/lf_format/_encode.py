"""Tokenizing documents, in this process or in spawned ones."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy.typing as npt

from lf_format._documents import Document
from lf_format._errors import FormatError, InputError, WorkerError
from lf_format._tokenizers import Tokenizer, loads_tokenizer

_BATCH = 64  # documents per message: one document a message spends its time in pickling
Array = npt.NDArray[Any]
Encoded = tuple[str, Array, Array | None]


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


def _serve(connection: Connection, tokenizer_text: str) -> None:
    """A worker: batches in, results out, until the parent closes its end or dies."""
    tokenizer = loads_tokenizer(tokenizer_text)
    try:
        while True:
            connection.send(_answer(connection.recv(), tokenizer))
    except (EOFError, OSError):
        return


def _answer(batch: list[Document], tokenizer: Tokenizer) -> list[Encoded] | FormatError:
    try:
        return [_encode(document, tokenizer) for document in batch]
    except FormatError as error:
        return error
    except Exception as error:
        return WorkerError(f"tokenizing failed: {error!r}", document=batch[0].name)


class _Worker:
    """One spawned process on its own pipe, with at most one batch under way.

    Not a shared pool: the queue locks of concurrent.futures die with a killed worker and can hang the parent
    (seen here with Python 3.11.7), while a pipe of one's own reports its end at once. One batch at a time, because
    two ends that both wait to send would wait for ever.
    """

    def __init__(self, tokenizer_text: str) -> None:
        # spawn: a fork of a process with threads (a trainer, a tokenizer library) may deadlock.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tokenizer_text), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, batch: list[Document]) -> None:
        try:
            self._connection.send(batch)
        except OSError:
            raise self._died() from None

    def receive(self) -> list[Encoded]:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, FormatError):
            raise answer
        assert isinstance(answer, list)
        return answer

    def _died(self) -> WorkerError:
        self._process.join(1)
        return WorkerError(
            "a tokenizing process died (killed, out of memory, or the calling script lacks "
            'if __name__ == "__main__")',
            expected="a live process",
            found=f"exit code {self._process.exitcode}",
        )

    def stop(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _parallel(documents: Iterable[Document], tokenizer: Tokenizer, num_workers: int) -> Iterator[Encoded]:
    """Batch k goes to worker k mod n, and results are taken in that order."""
    source, text = iter(documents), tokenizer.dumps()
    workers: list[_Worker] = []
    try:
        workers.extend(_Worker(text) for _ in range(num_workers))
        sent = taken = 0
        for batch in iter(lambda: list(itertools.islice(source, _BATCH)), []):
            worker = workers[sent % num_workers]
            if sent >= num_workers:
                done = worker.receive()
                worker.send(batch)  # before the result is used, so that the worker does not wait for it
                taken += 1
                yield from done
            else:
                worker.send(batch)
            sent += 1
        for k in range(taken, sent):
            yield from workers[k % num_workers].receive()
    finally:
        for worker in workers:
            worker.stop()
