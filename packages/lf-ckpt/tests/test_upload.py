"""Local disk first, then upload: the copy is a store of its own, complete or behind, never torn."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import ckpt_group_jobs as jobs
import pytest
import torch
from ckpt_ranks import Ranks
from ckpt_states import assert_same, bits, files_under, state
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt.cli import main
from lf_ckpt.objects import ObjectLayer
from lf_ckpt.retention import Candidate
from lf_ckpt.storage import Buffer
from lf_ckpt.upload import Upload, needed_bases, to_upload

STATES = {step: {**state(step // 4, size=4_000), "step": torch.tensor(step)} for step in range(1, 9)}


class Remote(lf_ckpt.FileLayer):
    """A place that can refuse, wait, and count what it is sent."""

    def __init__(self) -> None:
        self.refuse: str | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.sent: dict[str, int] = {}
        self.paths: dict[int, str] = {}

    def create(self, path: str) -> int:
        assert self.gate.wait(60)
        if self.refuse is not None and path.rpartition("/")[2].startswith(self.refuse):
            raise OSError(errno.ECONNRESET, "connection reset", path)
        fd = super().create(path)
        self.paths[fd] = path
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        path = self.paths[fd]
        self.sent[path] = self.sent.get(path, 0) + sum(len(buffer) for buffer in buffers)
        super().write(fd, buffers, offset)


def place(tmp_path: Path, files: lf_ckpt.FileLayer | None = None, **options: object) -> Upload:
    return Upload(tmp_path / "remote", files=files, pause=0.0, **options)  # type: ignore[arg-type]


def save(store: lf_ckpt.Store, *steps: int) -> None:
    for step in steps:
        store.save(step, STATES[step]).wait()


def check_copy(path: Path | str, steps: tuple[int, ...]) -> None:
    """The copy holds exactly these steps, bit for bit, and needs nothing else."""
    with lf_ckpt.open(path, read_only=True) as copy:
        assert copy.steps() == steps
        for step in steps:
            assert_same(copy.load(step).tensors, STATES[step])


def test_every_durable_step_becomes_one_of_an_ordinary_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lf_ckpt.open(tmp_path / "local", upload=tmp_path / "remote") as store:
        save(store, 1, 2, 3)
        store.wait_uploaded()
        check_copy(tmp_path / "remote", (1, 2, 3))
        save(store, 4)

    check_copy(tmp_path / "remote", (1, 2, 3, 4))  # closing has waited
    assert main(["verify", str(tmp_path / "remote"), "--deep"]) == 0
    assert files_under(tmp_path / "remote/steps") == files_under(tmp_path / "local/steps")
    assert "damaged" not in capsys.readouterr().out.lower()


def test_an_object_store_gets_the_manifest_last(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    with lf_ckpt.open(tmp_path, upload=url) as store:
        save(store, 1, 2)
    check_copy(url, (1, 2))
    for path in [path for path in MemoryFileSystem.store if path.startswith(str(tmp_path))]:
        del MemoryFileSystem.store[path]


def test_what_is_missing_is_uploaded_when_a_store_is_opened(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "local") as store:
        save(store, 1, 2)
    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path)) as store:
        store.wait_uploaded()
        check_copy(tmp_path / "remote", (1, 2))


def test_local_retention_waits_for_the_upload(tmp_path: Path) -> None:
    remote = Remote()
    with lf_ckpt.open(
        tmp_path / "local", upload=place(tmp_path, remote), keep=[lf_ckpt.Last(1)], full_every=0
    ) as store:
        remote.gate.clear()
        save(store, 1, 2, 3)
        assert store.steps() == (1, 2, 3)
        remote.gate.set()
        store.wait_uploaded()
        save(store, 4)
        assert store.steps() == (4,)
    check_copy(tmp_path / "remote", (1, 2, 3, 4))


def test_unless_told_not_to(tmp_path: Path) -> None:
    remote = Remote()
    upload = place(tmp_path, remote, hold=False)
    with lf_ckpt.open(tmp_path / "local", upload=upload, keep=[lf_ckpt.Last(1)], full_every=0) as store:
        store.wait_uploaded()
        remote.gate.clear()
        save(store, 1, 2, 3)
        assert store.steps() == (3,)
        remote.gate.set()
        store.wait_uploaded()
    with lf_ckpt.open(tmp_path / "remote", read_only=True) as copy:
        assert_same(copy.load().tensors, STATES[3])


def test_an_upload_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FailsTwice(Remote):
        left = 2

        def sync(self, fd: int) -> None:
            if "steps" in self.paths[fd] and self.left:
                self.left -= 1
                raise OSError(errno.ECONNRESET, "connection reset")
            super().sync(fd)

    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path, FailsTwice())) as store:
        save(store, 1)
    check_copy(tmp_path / "remote", (1,))
    assert caplog.text.count("is tried again") == 2


def test_an_upload_that_keeps_failing_is_raised_at_the_next_call_and_costs_no_step(tmp_path: Path) -> None:
    remote = Remote()
    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path, remote, attempts=2)) as store:
        remote.refuse = "rank-"
        save(store, 1)
        with pytest.raises(lf_ckpt.UploadError, match=r"step 1: .*connection reset") as caught:
            store.wait_uploaded()
        assert (caught.value.steps, isinstance(caught.value.__cause__, OSError)) == ((1,), True)
        assert_same(store.load().tensors, STATES[1])
        with pytest.raises(lf_ckpt.UploadError):
            save(store, *[2] * 1000)  # the thread tries again behind them
        with pytest.raises(lf_ckpt.UploadError):
            store.wait_uploaded()  # also for a try that has begun before the network comes back
        remote.refuse = None
        save(store, 3)
        store.wait_uploaded()
    with lf_ckpt.open(tmp_path / "local", read_only=True) as local:
        check_copy(tmp_path / "remote", local.steps())


def test_warn_logs_it_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = Remote()
    upload = place(tmp_path, remote, attempts=1)
    with lf_ckpt.open(tmp_path / "local", upload=upload, on_error="warn") as store:
        remote.refuse = "MANIFEST"
        save(store, 1, 2)
    assert "an upload failed and training goes on" in caplog.text

    check_copy(tmp_path / "local", (1, 2))
    check_copy(tmp_path / "remote", ())


def test_closing_waits_no_longer_than_told_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    remote = Remote()
    store = lf_ckpt.open(tmp_path / "local", upload=place(tmp_path, remote, timeout=0.0))
    remote.gate.clear()
    save(store, 1)
    threading.Timer(0.3, remote.gate.set).start()
    with pytest.raises(lf_ckpt.UploadError, match=r"not done after 0.0 s.*not uploaded: 1"):
        store.close()

    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path)) as store:
        store.wait_uploaded()
    check_copy(tmp_path / "remote", (1,))


def test_files_that_an_object_store_has_whole_are_not_sent_again(tmp_path: Path) -> None:
    class Counting(MemoryFileSystem):
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            self.store, self.pseudo_dirs, self.put, self.refuse = {}, [""], [], "MANIFEST"

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
            if path.endswith(self.refuse):
                raise OSError("lost")
            self.put.append(path)
            super().pipe_file(path, value, mode, **kwargs)

    system = Counting()
    upload = Upload("/r", files=ObjectLayer(system), attempts=1, pause=0.0)
    store = lf_ckpt.open(tmp_path / "local", upload=upload)
    save(store, 1)
    with pytest.raises(lf_ckpt.UploadError):
        store.close()
    assert system.put.count("/r/steps/1/rank-0.lfckpt") == 1
    system.refuse = "nothing"
    system.store["/r/steps/1/rank-0.lfckpt"].getbuffer()[-20] ^= 1  # not the file that is here: sent again

    for sent in (2, 2):
        with lf_ckpt.open(tmp_path / "local", upload=upload) as store:
            store.wait_uploaded()
        assert system.put.count("/r/steps/1/rank-0.lfckpt") == sent
    with lf_ckpt.open("/r", files=ObjectLayer(system), read_only=True) as copy:
        assert_same(copy.load().tensors, STATES[1])


@pytest.mark.parametrize("name", ["rank-0.lfckpt", "MANIFEST.tmp", "MANIFEST"])
def test_kill_9_in_an_upload_leaves_no_torn_step_and_the_next_process_finishes_it(
    tmp_path: Path, name: str
) -> None:
    class Kills(lf_ckpt.FileLayer):
        def __init__(self) -> None:
            self.fds: set[int] = set()

        def create(self, path: str) -> int:
            fd = super().create(path)
            if path.endswith(f"steps/2/{name}"):
                self.fds.add(fd)
            return fd

        def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
            if fd in self.fds:
                super().write(fd, [bytes(buffers[0])[:100]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            super().write(fd, buffers, offset)

    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path)) as store:
        save(store, 1)
    pid = os.fork()
    if pid == 0:
        try:
            upload = Upload(tmp_path / "remote", files=Kills(), mode="shared")
            store = lf_ckpt.open(tmp_path / "local", upload=upload)
            save(store, 2)
            store.close()
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    check_copy(tmp_path / "remote", (1,))

    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path)) as store:
        store.wait_uploaded()
    check_copy(tmp_path / "remote", (1, 2))


def test_the_copy_has_rules_of_its_own_and_keeps_what_deltas_to_come_may_need(tmp_path: Path) -> None:
    upload = place(tmp_path, keep=[lf_ckpt.Every(steps=4)])
    with lf_ckpt.open(tmp_path / "local", upload=upload, keep=[lf_ckpt.Last(2)], full_every=3) as store:
        for step in range(1, 9):
            save(store, step)
            store.wait_uploaded()
    with lf_ckpt.open(tmp_path / "remote", read_only=True) as copy:
        assert {4, 8} <= set(copy.steps())
        for step in copy.steps():
            assert_same(copy.load(step).tensors, STATES[step])
    sent = files_under(tmp_path / "remote/steps")

    with lf_ckpt.open(tmp_path / "local", upload=upload, keep=[lf_ckpt.Last(2)]) as store:
        store.wait_uploaded()
    assert files_under(tmp_path / "remote/steps") == sent, "what the copy has retired is not sent again"


def test_a_copy_of_another_store_is_refused(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "a", upload=place(tmp_path)) as store:
        save(store, 1)
    lf_ckpt.open(tmp_path / "b").close()

    with pytest.raises(lf_ckpt.CkptError, match="copies of another store"):
        lf_ckpt.open(tmp_path / "b", upload=place(tmp_path))

    lf_ckpt.open(tmp_path / "b").close()  # both locks are free again
    lf_ckpt.open(tmp_path / "a", upload=place(tmp_path)).close()


def test_a_lost_local_disk_goes_on_from_its_copy(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "old", upload=place(tmp_path)) as store:
        save(store, 1, 2)

    with lf_ckpt.open(tmp_path / "new", upload=place(tmp_path)) as store:
        with lf_ckpt.open(tmp_path / "remote", read_only=True) as copy:
            assert copy.load().step == 2
        report = store.save(2, STATES[2]).wait()
        assert report.folder == "2.1", "the copy's step 2 is not overwritten"
        save(store, 3)
    check_copy(tmp_path / "remote", (1, 2, 3))


def test_two_writers_cannot_fill_one_copy(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "a", upload=place(tmp_path)):
        with pytest.raises(lf_ckpt.LockedError, match="remote/LOCK"):
            lf_ckpt.open(tmp_path / "b", upload=place(tmp_path))
        lf_ckpt.open(tmp_path / "b").close()


def test_rank_0_uploads_what_a_group_has_written_to_a_shared_file_system(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved, *_ = ranks.call(
        jobs.save_uploaded, 3, path=str(tmp_path / "shared"), copy=str(tmp_path / "remote")
    )

    names = {
        f"{step}/{name}" for step in (1, 2) for name in ("MANIFEST", *(f"rank-{r}.lfckpt" for r in range(3)))
    }
    assert files_under(tmp_path / "remote/steps") == names
    with lf_ckpt.open(tmp_path / "remote", read_only=True) as copy:
        assert {name: bits(tensor) for name, tensor in copy.load().tensors.items()} == saved


def test_requests_that_cannot_be_met_are_named(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store, pytest.raises(lf_ckpt.CkptError, match="without upload="):
        store.wait_uploaded()
    with pytest.raises(ValueError, match="upload= is for the writer"):
        lf_ckpt.open(tmp_path, read_only=True, upload=tmp_path / "x")
    with pytest.raises(ValueError, match="at least one attempt"):
        Upload("x", attempts=0)


def candidates(shape: Sequence[tuple[int, int | None]]) -> list[Candidate]:
    """Steps in the order in which they were saved, each with the place of its base in that order."""
    return [
        Candidate(str(step), step, 0, None if base is None else str(shape[base][0])) for step, base in shape
    ]


def test_a_base_goes_before_its_deltas_also_when_its_step_is_later() -> None:
    local = candidates([(100, None), (50, 0), (60, 0), (10, None)])

    assert to_upload(local, [], []) == ["10", "100", "50", "60"]
    assert to_upload(local, local[:1], []) == ["10", "50", "60"]
    assert needed_bases(local) == {"100"}


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([(), (lf_ckpt.Last(1),), (lf_ckpt.Last(3),), (lf_ckpt.Every(steps=2),)]),
)
@settings(max_examples=60, deadline=None)
def test_every_delta_that_is_sent_finds_its_base_and_nothing_is_sent_twice(
    steps: list[tuple[bool, bool]], rules: tuple[lf_ckpt.Every | lf_ckpt.Last, ...]
) -> None:
    base, local, there = None, [], []
    for step, (full, sent) in enumerate(steps):
        base = str(step) if full or base is None else base
        local.append(Candidate(str(step), step, 0, None if base == str(step) else base))
        if sent and local[-1].parent in (None, *(c.folder for c in there)):
            there.append(local[-1])

    order = to_upload(local, there, rules)

    arrived = [c.folder for c in there]
    for folder in order:
        parent = local[int(folder)].parent
        assert folder not in arrived
        assert parent is None or parent in arrived
        arrived.append(folder)
    assert str(len(steps) - 1) in arrived
