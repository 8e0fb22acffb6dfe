"""The rows of bench_ckpt.py: ways to save and load a dict of tensors, and the floors that bound them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import lf_ckpt

Tensors = dict[str, torch.Tensor]
Finish = Callable[[], object]
_PIECE = 8 << 20
_THREADS = 4


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """A row that cannot be had here, with the reason."""


@dataclass
class Run:
    """One save or load, in seconds and bytes."""

    stall: float
    durable: float
    cpu: float
    size: int


class Saver:
    """A way to save: `save` returns what must still be called for the data to be written, if anything.

    Skipped from the constructor when it is not installed.
    """

    name: str
    fsynced = False  # whether `save` fsyncs by itself; otherwise the benchmark does, as part of durable
    loads = False
    full = True  # whether each save writes the whole state; the bars compare these

    def __init__(self, path: Path, state: Tensors) -> None:
        self.path, self.state = path, state

    def save(self, step: int) -> Finish | None:
        raise NotImplementedError

    def load(self, into: Tensors) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Free what the saver holds."""


class Memcpy(Saver):
    """The floor of any stall: one copy into memory that is there already."""

    name = "memcpy into reused buffers (floor)"

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def save(self, step: int) -> Finish | None:
        for name, tensor in self.state.items():
            self.copies[name].copy_(tensor)
        return None


class HashPass(Saver):
    """One xxh3-128 over every 1 MiB, in one thread."""

    name = "one xxh3-128 pass (floor)"

    def save(self, step: int) -> Finish | None:
        for tensor in self.state.values():
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            for at in range(0, len(data), 1 << 20):
                xxhash.xxh3_128_digest(data[at : at + (1 << 20)])
        return None


class DirectIo(Saver):
    """Four threads with O_DIRECT between one reused buffer and a file; nothing checked, no metadata.

    The buffer asks for huge pages, as lf-ckpt's do: of 4 KiB pages the kernel makes many small requests, which took
    2.4 times as long to write and 5 times as long to read on a virtual disk.
    """

    name = "O_DIRECT, 4 threads, nothing checked (floor)"
    loads = True

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.bytes = -(-sum(t.nbytes for t in state.values()) // 4096) * 4096
        memory = mmap.mmap(-1, self.bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(memory)
        self.fill()

    def fill(self) -> None:
        """Bring the buffer up to date with the state."""
        at, flat = 0, np.frombuffer(self.memory, np.uint8)
        for tensor in self.state.values():
            flat[at : at + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy()
            at += tensor.nbytes

    def save(self, step: int) -> Finish | None:
        new = self.path / "new"
        self._each(new, os.O_WRONLY | os.O_CREAT, os.pwrite)
        new.replace(self.path / "data")
        return None

    def load(self, into: Tensors) -> None:
        self._each(self.path / "data", os.O_RDONLY, lambda fd, view, at: os.preadv(fd, [view], at))
        at, flat = 0, torch.frombuffer(self.memory, dtype=torch.uint8)
        for tensor in into.values():  # for the check that follows; not in `seconds`
            tensor.view(-1).view(torch.uint8).copy_(flat[at : at + tensor.nbytes])
            at += tensor.nbytes

    def _each(self, path: Path, flags: int, call: Callable[[int, memoryview, int], int]) -> None:
        began = time.perf_counter()
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
        with ThreadPoolExecutor(_THREADS) as pool:
            places = range(0, self.bytes, _PIECE)
            done = sum(pool.map(lambda at: call(fd, self.memory[at : at + _PIECE], at), places))
        assert done == self.bytes, "short transfer"
        if flags != os.O_RDONLY:
            os.fsync(fd)
        os.close(fd)
        self.seconds = time.perf_counter() - began


class TorchSave(Saver):
    name = "torch.save"
    loads = True

    def save(self, step: int) -> Finish | None:
        torch.save(self.state, self.path / "data.pt")
        return None

    def load(self, into: Tensors) -> None:
        for name, tensor in torch.load(self.path / "data.pt", weights_only=True, mmap=True).items():
            into[name].copy_(tensor)


class TorchSaveNoCrc(TorchSave):
    """Its fastest; nothing is lost, as torch.load does not look at the sums."""

    name = "torch.save, CRC32 off"
    loads = False  # the same file, but for zeros in place of the sums

    def save(self, step: int) -> Finish | None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().save(step)
        finally:
            torch.serialization.set_crc32_options(before)


class Safetensors(Saver):
    name = "safetensors save_file"
    loads = True

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        try:
            import safetensors.torch
        except ImportError as error:
            raise Skipped(str(error)) from error
        self.module: Any = safetensors.torch

    def save(self, step: int) -> Finish | None:
        self.module.save_file(self.state, self.path / "data.safetensors")
        return None

    def load(self, into: Tensors) -> None:
        for name, tensor in self.module.load_file(self.path / "data.safetensors").items():
            into[name].copy_(tensor)


class DcpSave(Saver):
    name = "DCP save, 4 threads"
    loads = True

    def save(self, step: int) -> Finish | None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(self.path / "dcp", thread_count=_THREADS))
        return None

    def load(self, into: Tensors) -> None:
        dcp.load(into, checkpoint_id=self.path / "dcp")


class DcpThread(Saver):
    name = "DCP async_save, 4 threads, shared memory reused"
    how = AsyncCheckpointerType.THREAD

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
            use_non_blocking_copy=False,
        )  # fmt: skip
        self.stager = DefaultStager(options)

    def save(self, step: int) -> Finish | None:
        future = dcp.async_save(
            self.state,
            storage_writer=dcp.FileSystemWriter(self.path / "dcp", thread_count=_THREADS),
            async_stager=self.stager,
            async_checkpointer_type=self.how,
        )
        return getattr(future, "upload_completion", future).result

    def close(self) -> None:
        self.stager.close()


class DcpProcess(DcpThread):
    name = "DCP async_save, process of 4 threads (its CPU not counted)"
    how = AsyncCheckpointerType.PROCESS


class Moonclip(Saver):
    """Fulls of bytes as they are: its fastest. One snapshot is kept, as lf-ckpt's rows keep one step."""

    name = "moonclip, not compressed"
    options: dict[str, Any] = {"compression_level": 0, "full_every_steps": 1, "keep_base_in_memory": False}  # noqa: RUF012
    fsynced = loads = True

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.manager = self._open()

    def _open(self) -> Any:
        try:
            from moonclip import CheckpointManager
        except ImportError as error:
            raise Skipped(f"{error}: pip install -r benchmarks/peers/requirements.txt") from error
        return CheckpointManager(
            str(self.path / "moonclip"), world_size=1, rank=0, max_full_snapshots=1, rollback_interval_steps=0,
            **self.options,
        )  # fmt: skip

    def save(self, step: int) -> Finish | None:
        self.manager.save(step=step, extra={"state": self.state})
        return self.manager.flush  # type: ignore[no-any-return]

    def load(self, into: Tensors) -> None:
        _, items = self._open().load_latest()  # a new process, which holds nothing in memory
        for name, tensor in items["extra/state"].items():
            into[name].copy_(tensor)

    def close(self) -> None:
        del self.manager


class MoonclipZstd(Moonclip):
    name = "moonclip, zstd 1"
    options = {**Moonclip.options, "compression_level": 1}  # noqa: RUF012
    loads = False  # slower than the above


class MoonclipDelta(Moonclip):
    """Deltas against a base in memory."""

    name = "moonclip, zstd 1, delta, 1 tensor in 8 changed"
    options: dict[str, Any] = {  # noqa: RUF012
        "compression_level": 1,
        "full_every_steps": 10**6,
        "max_deltas_per_full": 10**6,
        "merge_max_chain": 10**6,
    }
    loads = full = False

    def save(self, step: int) -> Finish | None:
        change_one_in_eight(self.state)
        return super().save(step)


class LfCkpt(Saver):
    """Full steps only, so that every row writes the whole state."""

    name = "lf-ckpt, raw"
    options: dict[str, Any] = {"compress": "raw", "full_every": 0}  # noqa: RUF012 - read only
    fsynced = loads = True

    def __init__(self, path: Path, state: Tensors) -> None:
        super().__init__(path, state)
        self.store = lf_ckpt.open(path / "store", keep=[lf_ckpt.Last(1)], **self.options)

    def save(self, step: int) -> Finish | None:
        handle = self.store.save(step, self.state)

        def finish() -> float:
            self.report = handle.wait()  # which also removes the step before
            return self.report.seconds_durable

        return finish

    def load(self, into: Tensors) -> None:
        self.loaded = self.store.load(into=into, precheck=False).report

    def close(self) -> None:
        self.store.close()


class LfCkptThreads(LfCkpt):
    name = "lf-ckpt, raw, threads instead of io_uring"
    options = {**LfCkpt.options, "engine": "threads"}  # noqa: RUF012
    loads = False


class LfCkptChecked(LfCkpt):
    name = "lf-ckpt, raw, into untouched until all is verified"
    loads = True

    def load(self, into: Tensors) -> None:
        self.loaded = self.store.load(into=into).report


class LfCkptAuto(LfCkpt):
    name = 'lf-ckpt, compress="auto"'
    options = {"compress": "auto", "full_every": 0}  # noqa: RUF012


class LfCkptUnchanged(LfCkpt):
    """Delta of a state in which one tensor of the list has changed."""

    name = "lf-ckpt, delta, 1 tensor in 8 changed"
    options = {"compress": "raw", "full_every": 10**6}  # noqa: RUF012
    loads = full = False

    def save(self, step: int) -> Finish | None:
        change_one_in_eight(self.state)
        return super().save(step)


def change_one_in_eight(state: Tensors) -> None:
    """Change one tensor in eight, and of it a few elements in every 1 MiB."""
    for name in list(state)[::8]:
        state[name].view(-1)[:: 1 << 16].add_(1)


class LfCkptDelta(LfCkptUnchanged):
    """With codecs against the base, as moonclip has."""

    name = 'lf-ckpt, compress="auto", delta, 1 tensor in 8 changed'
    options = {"compress": "auto", "full_every": 10**6}  # noqa: RUF012


FLOORS = (Memcpy, HashPass, DirectIo)
PEERS = (
    TorchSave,
    TorchSaveNoCrc,
    Safetensors,
    DcpSave,
    DcpThread,
    DcpProcess,
    Moonclip,
    MoonclipZstd,
    MoonclipDelta,
)
OURS = (LfCkpt, LfCkptThreads, LfCkptChecked, LfCkptAuto, LfCkptUnchanged, LfCkptDelta)


def add_peers_path() -> None:
    """Make the libraries of LF_PEERS_PYTHON importable here, behind our own."""
    python = os.environ.get("LF_PEERS_PYTHON")
    if python:
        command = [python, "-c", "import site; print(*site.getsitepackages(), sep='\\n')"]
        sys.path += subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
