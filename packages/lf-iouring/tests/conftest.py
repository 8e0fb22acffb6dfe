"""Data sets and helpers shared by the tests."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import LoongDataLoader

sys.path.append(str(Path(__file__).parent))  # tests and their processes import what lies beside them
from child_env import child_env

TOKENIZER = lff.TokenizerInfo("test", "00")


def _write(path, count, buckets, *, vocab=50_257, mask=False, codec="raw", seed=0, top=None):
    rng = np.random.default_rng(seed)
    with lff.Writer(
        path, vocab_size=vocab, tokenizer=TOKENIZER, buckets=buckets, loss_mask=mask, codec=codec
    ) as writer:
        for _ in range(count):
            length = int(rng.integers(1, buckets[-1] + 1))
            writer.append(rng.integers(0, top or vocab, length), rng.integers(0, 2, length) if mask else None)
    return path


@pytest.fixture(scope="session")
def write():
    """write(path, count, buckets, vocab=, mask=, codec=, seed=, top=): random records; returns the path.

    Ids lie below `top` where given, which makes them compressible."""
    return _write


@pytest.fixture(scope="session")
def masked_path(tmp_path_factory):
    """1,000 masked uint16 records in buckets 16, 64, 256."""
    return _write(tmp_path_factory.mktemp("data") / "masked.loongbin", 1000, (16, 64, 256), mask=True)


@pytest.fixture
def masked(masked_path):
    """The same, open."""
    with lff.open_dataset(masked_path) as dataset:
        yield dataset


@pytest.fixture(scope="session")
def ids_of():
    """ids_of(batches) -> list of id tuples."""
    return lambda batches: [tuple(np.asarray(batch.ids).tolist()) for batch in batches]


@pytest.fixture(scope="session")
def digest():
    """digest(batches) -> hex digest over everything a batch holds."""

    def run(batches):
        total = hashlib.sha256()
        for batch in batches:
            arrays = [batch.tokens, batch.lengths, batch.ids]
            arrays += [] if batch.loss_mask is None else [batch.loss_mask]
            for array in arrays:
                total.update(repr((array.shape, str(array.dtype))).encode() + np.asarray(array).tobytes())
            total.update(repr((batch.step, batch.epoch)).encode())
        return total.hexdigest()

    return run


@pytest.fixture
def loader_of(masked):
    """loader_of(**arguments) over the masked set; closed after the test."""
    made = []

    def make(dataset=None, **arguments):
        arguments = {"global_batch": 24, "seed": 7, "return_type": "numpy"} | arguments
        loader = LoongDataLoader(dataset or masked, **arguments)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()


@pytest.fixture(scope="session")
def in_fork():
    """in_fork(work) -> exit code of a forked child that ran work(); 0 if it raised nothing."""

    def run(work):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return run


@pytest.fixture(scope="session")
def in_child():
    """in_child(code, *arguments, timeout=60) -> what a fresh Python printed that has tests/limits.py at hand."""

    def run(code, *arguments, timeout=60):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=child_env(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def under_signals():
    """under_signals(loader, count, read) -> [read(batch)] of `count` batches, with Ctrl-C at 40 random moments."""
    moments = np.random.default_rng(1).exponential(0.002, 40).tolist()
    armed = False

    def strike(*_):
        if armed:
            raise KeyboardInterrupt

    def one(loader, read):
        nonlocal armed
        timer = threading.Timer(moments.pop() if moments else 60, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        try:
            armed = True
            return read(next(loader))
        finally:
            armed = False
            timer.cancel()

    def run(loader, count, read):
        seen = []
        while len(seen) < count:
            try:
                seen.append(one(loader, read))
            except KeyboardInterrupt:
                if loader.step > len(seen):  # it struck between the loader and the list
                    loader.set_step(len(seen))
        return seen

    before = signal.signal(signal.SIGUSR1, strike)
    yield run
    signal.signal(signal.SIGUSR1, before)
