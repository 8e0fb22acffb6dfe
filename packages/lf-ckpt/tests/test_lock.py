"""One writer at a time; the dead do not block, strangers are not robbed, readers need nothing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ckpt_states import assert_same, state

import lf_ckpt
from lf_ckpt.lock import Owner, this_process


def leave_record(path: Path, owner: Owner) -> None:
    lf_ckpt.open(path).close()
    (path / "LOCK").write_text(json.dumps(asdict(owner)))


def dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_a_second_writer_is_refused_and_told_who_holds_the_store(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        with pytest.raises(lf_ckpt.LockedError, match=f"pid {os.getpid()}"):
            lf_ckpt.open(tmp_path)
        store.save(1, state()).wait()
        with lf_ckpt.open(tmp_path, read_only=True) as reader:
            assert_same(reader.load().tensors, state())
    lf_ckpt.open(tmp_path).close()


def test_a_writer_in_another_process_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = lf_ckpt.open(tmp_path)
        os.write(done, b"x")
        signal.pause()
        store.close()
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(lf_ckpt.LockedError, match=f"pid {pid}"):
            lf_ckpt.open(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)

    lf_ckpt.open(tmp_path).close()


def test_the_record_of_a_dead_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_record(tmp_path, replace(this_process(), pid=dead_pid()))

    lf_ckpt.open(tmp_path).close()

    assert "taking over" in caplog.text


def test_a_recycled_pid_is_told_apart_by_its_start_time(tmp_path: Path) -> None:
    leave_record(tmp_path, replace(this_process(), pid=os.getppid(), start_time=1))

    lf_ckpt.open(tmp_path).close()


def test_a_live_owner_is_respected_where_the_file_system_does_not_lock(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        with open(f"/proc/{pid}/stat") as file:
            start = int(file.read().rpartition(")")[2].split()[19])
        leave_record(tmp_path, replace(this_process(), pid=pid, start_time=start))
        with pytest.raises(lf_ckpt.LockedError, match="alive"):
            lf_ckpt.open(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_an_owner_on_another_host_is_never_pushed_aside(tmp_path: Path) -> None:
    leave_record(tmp_path, Owner("elsewhere", "another boot", 1, 1))

    with pytest.raises(lf_ckpt.LockedError, match="elsewhere"):
        lf_ckpt.open(tmp_path)


def test_an_unreadable_record_does_not_block(tmp_path: Path) -> None:
    lf_ckpt.open(tmp_path).close()
    (tmp_path / "LOCK").write_bytes(b"\xff not json")

    lf_ckpt.open(tmp_path).close()


def test_a_symlinked_store_is_resolved_once_and_locked_as_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with lf_ckpt.open(tmp_path / "link") as store:
        with pytest.raises(lf_ckpt.LockedError):
            lf_ckpt.open(tmp_path / "real")
        (tmp_path / "link").unlink()
        store.save(1, state()).wait()

    with lf_ckpt.open(tmp_path / "real", read_only=True) as store:
        assert store.steps() == (1,)


def test_a_forked_child_can_load_but_not_save_and_does_not_hold_the_lock(tmp_path: Path) -> None:
    store = lf_ckpt.open(tmp_path)
    store.save(1, state()).wait()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            assert_same(store.load().tensors, state())
            with pytest.raises(lf_ckpt.CkptError, match="forked"):
                store.save(2, state())
            store.close()
            os.write(tell, b"y")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(told, 1) == b"y"
        store.save(3, state()).wait()
        store.close()
        lf_ckpt.open(tmp_path).close()  # the child is still alive
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


def test_leftovers_of_a_dead_writer_are_swept_and_foreign_files_are_not(tmp_path: Path) -> None:
    lf_ckpt.open(tmp_path).close()
    for folder, name in (
        ("7", "rank-0.lfckpt"),
        ("8", "MANIFEST.tmp"),
        ("9", "notes.txt"),
        ("mine", "rank-0.lfckpt"),
    ):
        (tmp_path / "steps" / folder).mkdir()
        (tmp_path / "steps" / folder / name).write_bytes(b"x")
    (tmp_path / "steps/9/rank-0.lfckpt").write_bytes(b"x")

    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert store.steps() == ()
    assert (tmp_path / "steps/7").exists()  # a reader removes nothing
    lf_ckpt.open(tmp_path).close()

    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == ["9", "mine"]
    assert (tmp_path / "steps/9/rank-0.lfckpt").exists()


def test_using_a_closed_or_read_only_store_is_an_error(tmp_path: Path) -> None:
    store = lf_ckpt.open(tmp_path)
    store.close()
    store.close()
    for use in (store.load, store.steps, store.latest, store.wait, lambda: store.save(1, {})):
        with pytest.raises(lf_ckpt.CkptError, match="closed"):
            use()
    with lf_ckpt.open(tmp_path, read_only=True) as reader:
        with pytest.raises(lf_ckpt.CkptError, match="read_only"):
            reader.save(1, {})
        with pytest.raises(lf_ckpt.NoCheckpointError):
            reader.load()
        with pytest.raises(lf_ckpt.NoCheckpointError, match="step 3"):
            reader.load(3)


def test_reading_what_is_no_store_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(lf_ckpt.CkptError, match="not a checkpoint store"):
            lf_ckpt.open(path, read_only=True)
    lf_ckpt.open(tmp_path / "s").close()
    (tmp_path / "s/FORMAT").write_bytes(b'{"format":"lfckpt-store","store":1}')
    for read_only in (True, False):
        with pytest.raises(lf_ckpt.CorruptError):
            lf_ckpt.open(tmp_path / "s", read_only=read_only)
