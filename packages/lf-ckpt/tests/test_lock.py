"""One writer at a time; the dead do not block, strangers are not robbed, readers need nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ckpt_children import living, wait_status
from ckpt_states import assert_same, state

import lf_ckpt
from lf_ckpt import files as posix
from lf_ckpt.owner import UNKNOWN, Owner, dump_owner, objection, parse_owner, start_of, this_process

CLONE_NEWPID = 0x20000000


def leave_record(path: Path, owner: Owner) -> None:
    lf_ckpt.open(path).close()
    (path / "LOCK").write_bytes(dump_owner(owner))


def in_new_pid_namespace(work: Callable[[], None]) -> Callable[[], None]:
    """`work` in a grandchild that is pid 1 of a namespace of its own; skips where that is not allowed."""

    def child() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
            os._exit(77)
        os._exit(os.waitstatus_to_exitcode(wait_status(work)) & 0xFF)

    return child


def exit_code(work: Callable[[], None]) -> int:
    code = os.waitstatus_to_exitcode(wait_status(work))
    if code == 77:
        pytest.skip("unshare is not allowed here")
    return code


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
    with (
        living(lambda: lf_ckpt.open(tmp_path)) as pid,
        pytest.raises(lf_ckpt.LockedError, match=f"pid {pid}"),
    ):
        lf_ckpt.open(tmp_path)

    lf_ckpt.open(tmp_path).close()


def test_the_record_of_a_dead_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_record(tmp_path, replace(this_process(), pid=dead_pid()))

    lf_ckpt.open(tmp_path).close()

    assert "taking over" in caplog.text


def test_a_recycled_pid_is_told_apart_by_its_start_time(tmp_path: Path) -> None:
    leave_record(tmp_path, replace(this_process(), pid=os.getppid(), start_time=1))

    lf_ckpt.open(tmp_path).close()


def test_a_live_owner_is_respected_where_the_file_system_does_not_lock(tmp_path: Path) -> None:
    with living(lambda: None) as pid:
        leave_record(tmp_path, replace(this_process(), pid=pid, start_time=start_of(pid) or 0))
        with pytest.raises(lf_ckpt.LockedError, match=rf"pid {pid}.*alive.*break_lock"):
            lf_ckpt.open(tmp_path)


STRANGERS = {
    "elsewhere": lambda me: replace(me, host="elsewhere", boot_id="another boot"),
    "without a boot id": lambda me: replace(me, boot_id=""),
}


@pytest.mark.parametrize("words", STRANGERS)
def test_an_unknown_owner_is_never_pushed_aside_until_somebody_breaks_its_lock(
    tmp_path: Path, words: str
) -> None:
    owner = STRANGERS[words](this_process())
    leave_record(tmp_path, owner)

    with pytest.raises(lf_ckpt.LockedError, match=words) as caught:
        lf_ckpt.open(tmp_path)
    assert caught.value.owner == str(owner)
    assert "lf_ckpt.break_lock(" in str(caught.value)
    assert parse_owner((tmp_path / "LOCK").read_bytes()) == owner

    assert lf_ckpt.break_lock(tmp_path) == str(owner)
    lf_ckpt.open(tmp_path).close()


GARBAGE = [
    b"\xff not json",
    b"\0",
    b"{}",
    b"null",
    b"[1]",
    b'{"host":1}',
    b"[" * 5000,
    dump_owner(this_process())[:-9],
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_record_that_cannot_be_read_blocks_and_can_be_broken(tmp_path: Path, garbage: bytes) -> None:
    lf_ckpt.open(tmp_path).close()
    (tmp_path / "LOCK").write_bytes(garbage)

    with pytest.raises(lf_ckpt.LockedError, match=r"unknown.*not an owner record.*break_lock"):
        lf_ckpt.open(tmp_path)
    assert (tmp_path / "LOCK").read_bytes() == garbage

    assert lf_ckpt.break_lock(tmp_path) is not None
    lf_ckpt.open(tmp_path).close()


def test_a_lock_in_use_cannot_be_broken(tmp_path: Path) -> None:
    assert lf_ckpt.break_lock(tmp_path / "nothing") is None
    with lf_ckpt.open(tmp_path), pytest.raises(lf_ckpt.LockedError, match=f"pid {os.getpid()}"):
        lf_ckpt.break_lock(tmp_path)
    assert lf_ckpt.break_lock(tmp_path) is None


def test_a_host_that_was_started_again_takes_its_store_over_and_a_shared_one_only_by_hand(
    tmp_path: Path,
) -> None:
    leave_record(tmp_path, replace(this_process(), boot_id="before"))

    with pytest.raises(lf_ckpt.LockedError, match="another host of the same name"):
        lf_ckpt.open(tmp_path, mode="shared")
    lf_ckpt.open(tmp_path).close()


def test_a_living_writer_in_another_pid_namespace_is_refused(tmp_path: Path) -> None:
    def other() -> None:
        with pytest.raises(lf_ckpt.LockedError, match=f"pid {holder} on"):
            lf_ckpt.open(tmp_path)

    with lf_ckpt.open(tmp_path):
        holder = os.getpid()
        assert exit_code(in_new_pid_namespace(other)) == 0


def test_a_container_that_died_gives_its_store_back_but_not_a_shared_one(tmp_path: Path) -> None:
    def open_and_die() -> None:
        lf_ckpt.open(tmp_path)
        os._exit(0)

    assert exit_code(in_new_pid_namespace(open_and_die)) == 0
    owner = parse_owner((tmp_path / "LOCK").read_bytes())
    assert owner is not None
    assert (owner.pid, owner.boot_id) == (1, this_process().boot_id)
    assert owner.pid_namespace != this_process().pid_namespace

    with pytest.raises(lf_ckpt.LockedError, match=r"pid 1 .*another pid namespace"):
        lf_ckpt.open(tmp_path, mode="shared")
    lf_ckpt.open(tmp_path).close()


def test_the_lock_is_an_ofd_lock_and_survives_closing_another_descriptor_of_its_file(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        assert store.info()["lock"] == "OFD"
        os.close(os.open(tmp_path / "LOCK", os.O_RDWR))  # a process-owned fcntl lock would be lost here
        with pytest.raises(lf_ckpt.LockedError):
            lf_ckpt.open(tmp_path)
    assert (tmp_path / "LOCK").read_bytes() == b""


def test_flock_serves_where_ofd_locks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "_lock_ofd", lambda fd: None)
    with lf_ckpt.open(tmp_path) as store:
        assert store.info()["lock"] == "flock"
        with pytest.raises(lf_ckpt.LockedError, match=f"pid {os.getpid()}"):
            lf_ckpt.open(tmp_path)
    lf_ckpt.open(tmp_path).close()


def test_a_child_forked_behind_pythons_back_keeps_the_lock_and_is_named_as_the_reason(tmp_path: Path) -> None:
    """fork() in C runs no hook: the child holds the open file, and with it the lock, after its parent has died."""
    told, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        lf_ckpt.open(tmp_path)
        grandchild = ctypes.CDLL(None).fork()
        if grandchild == 0:
            signal.pause()
        os.write(tell, b"%d" % grandchild)
        os._exit(0)
    os.waitpid(owner, 0)
    grandchild = int(os.read(told, 20))
    try:
        with pytest.raises(lf_ckpt.LockedError, match="a process that it forked still holds the lock"):
            lf_ckpt.open(tmp_path)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(told)
        os.close(tell)


def test_a_lock_file_that_was_replaced_is_not_mistaken_for_the_lock(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path):
        (tmp_path / "LOCK").unlink()  # somebody did what nobody should do
        with lf_ckpt.open(tmp_path), pytest.raises(lf_ckpt.LockedError):
            lf_ckpt.open(tmp_path)


class NoLocks(lf_ckpt.FileLayer):
    """Lustre mounted without -o flock."""

    def lock(self, path: str) -> tuple[int, str] | None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


class TestOwnerRecordAlone:
    """Where nothing locks, the record decides."""

    def test_it_excludes_a_second_writer_and_goes_at_close(self, tmp_path: Path) -> None:
        with lf_ckpt.open(tmp_path, files=NoLocks()) as store:
            assert store.info()["lock"] == "owner record (advisory): No locks available"
            with pytest.raises(lf_ckpt.LockedError, match="this process has it open"):
                lf_ckpt.open(tmp_path, files=NoLocks())
            store.save(1, state()).wait()
        assert not (tmp_path / "LOCK").exists()
        lf_ckpt.open(tmp_path, files=NoLocks()).close()

    def test_a_living_owner_is_refused_and_a_killed_one_taken_over(self, tmp_path: Path) -> None:
        owner = living(lambda: lf_ckpt.open(tmp_path, files=NoLocks()))
        with owner as pid, pytest.raises(lf_ckpt.LockedError, match=rf"pid {pid} .*alive"):
            lf_ckpt.open(tmp_path, files=NoLocks())
        lf_ckpt.open(tmp_path, files=NoLocks()).close()

    def test_a_forked_child_does_not_take_the_record_with_it(self, tmp_path: Path) -> None:
        with lf_ckpt.open(tmp_path, files=NoLocks()) as store, living(store.close):
            assert (tmp_path / "LOCK").exists()

    @pytest.mark.parametrize("words", STRANGERS)
    def test_an_unknown_owner_is_never_pushed_aside(self, tmp_path: Path, words: str) -> None:
        leave_record(tmp_path, STRANGERS[words](this_process()))
        with pytest.raises(lf_ckpt.LockedError, match=words):
            lf_ckpt.open(tmp_path, files=NoLocks())
        assert lf_ckpt.break_lock(tmp_path, files=NoLocks()) is not None
        lf_ckpt.open(tmp_path, files=NoLocks()).close()

    def test_a_host_that_was_started_again_may_be_another_of_that_name(self, tmp_path: Path) -> None:
        leave_record(tmp_path, replace(this_process(), boot_id="before"))
        with pytest.raises(lf_ckpt.LockedError, match="another host of the same name"):
            lf_ckpt.open(tmp_path, files=NoLocks())

    def test_a_broken_record_is_not_removed_by_its_former_owner(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = lf_ckpt.open(tmp_path, files=NoLocks())
        lf_ckpt.break_lock(tmp_path, files=NoLocks())
        with lf_ckpt.open(tmp_path, files=NoLocks()):
            store.close()
            assert "somebody has broken the lock" in caplog.text
            assert (tmp_path / "LOCK").exists()

    def test_mode_local_asks_for_a_real_lock(self, tmp_path: Path) -> None:
        with pytest.raises(lf_ckpt.CkptError, match="locks are refused here"):
            lf_ckpt.open(tmp_path, files=NoLocks(), mode="local")


ME = Owner("here", "boot", 100, 7, 5000, "a")


@pytest.mark.parametrize(
    ("previous", "start", "kernel", "shared", "reason"),
    [
        (ME, 5000, True, False, None),
        (replace(ME, pid=9), None, False, True, None),
        (replace(ME, pid=9), 4999, False, True, None),
        (replace(ME, pid=9), 5000, True, False, "it is alive"),
        (replace(ME, pid=9), UNKNOWN, True, False, "whether it still runs cannot be told"),
        (replace(ME, pid=9, start_time=UNKNOWN), 77, True, False, "whether it still runs cannot be told"),
        (replace(ME, host="renamed", pid=9), None, True, False, None),
        (replace(ME, boot_id="old"), None, True, False, None),
        (replace(ME, boot_id="old"), None, False, False, "another host of the same name may run it"),
        (replace(ME, boot_id="old"), None, True, True, "another host of the same name may run it"),
        (replace(ME, boot_id="old", host="there"), None, True, False, "it runs on another host"),
        (replace(ME, pid_namespace=8), None, True, False, None),
        (replace(ME, pid_namespace=8), None, True, True, "it may run in another pid namespace (container)"),
        (replace(ME, pid_namespace=8), None, False, False, "it may run in another pid namespace (container)"),
    ],
)
def test_only_an_owner_that_has_ended_for_certain_may_be_replaced(
    previous: Owner, start: int | None, kernel: bool, shared: bool, reason: str | None
) -> None:
    assert objection(previous, ME, lambda pid: start, kernel=kernel, shared=shared) == reason


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

    def child() -> None:
        assert_same(store.load().tensors, state())
        with pytest.raises(lf_ckpt.CkptError, match="forked"):
            store.save(2, state())
        store.close()

    with living(child):
        store.save(3, state()).wait()
        store.close()
        lf_ckpt.open(tmp_path).close()  # the child is still alive


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
