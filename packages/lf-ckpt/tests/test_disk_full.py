"""A full disk costs the save that met it, nothing else (case A6)."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ckpt_faults import FailAtCall
from ckpt_states import assert_same, files_under

import lf_ckpt

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 64 MiB tmpfs."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Files end just after 20 MiB, at no block edge: the same failure without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MIB + 100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def noise(mib: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 255, (mib * MIB,), dtype=torch.uint8)}


def test_disk_full_is_named_the_earlier_step_loads_and_a_later_save_works(small_disk: Path) -> None:
    first = noise(30)
    ballast = small_disk / "ballast"
    with lf_ckpt.open(small_disk / "store", slab_bytes=8 * MIB) as store:
        store.save(1, first).wait()
        ballast.write_bytes(bytes(20 * MIB))
        before = files_under(small_disk)
        with pytest.raises(lf_ckpt.DiskFullError) as caught:
            store.save(2, noise(30)).wait()

        assert 0 <= caught.value.free < 30 * MIB
        assert caught.value.needed > caught.value.free
        assert files_under(small_disk) == before
        assert_same(store.load().tensors, first)

        ballast.unlink()
        third = noise(30)
        store.save(3, third).wait()
        assert_same(store.load().tensors, third)


@pytest.mark.usefixtures("file_size_limit")
class TestFileSizeLimit:
    """RLIMIT_FSIZE stands for quota and disk."""

    def test_the_error_comes_at_the_next_save_when_nobody_waits(self, tmp_path: Path) -> None:
        with lf_ckpt.open(tmp_path) as store:
            store.save(1, noise(2)).wait()
            store.save(2, noise(30))
            with pytest.raises(lf_ckpt.DiskFullError):
                store.save(3, noise(2))
            store.save(3, noise(2)).wait()
            assert store.steps() == (1, 3)

    def test_the_error_comes_at_wait_and_only_once(self, tmp_path: Path) -> None:
        with lf_ckpt.open(tmp_path) as store:
            store.save(2, noise(30))
            with pytest.raises(lf_ckpt.DiskFullError):
                store.wait()

    def test_the_error_comes_at_close_and_the_lock_is_free_after_it(self, tmp_path: Path) -> None:
        store = lf_ckpt.open(tmp_path)
        store.save(2, noise(30))
        with pytest.raises(lf_ckpt.DiskFullError):
            store.close()
        lf_ckpt.open(tmp_path).close()

    def test_an_exception_of_the_caller_is_not_replaced_by_it(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), lf_ckpt.open(tmp_path) as store:  # noqa: PT012
            store.save(2, noise(30))
            raise ZeroDivisionError

    def test_warn_logs_and_training_goes_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with lf_ckpt.open(tmp_path, on_error="warn") as store:
            report = store.save(2, noise(30)).wait()
            assert report.kind == "failed"
            assert report.error is not None
            store.save(3, noise(30))
            with caplog.at_level(logging.WARNING):
                store.save(4, noise(1)).wait()
            assert "training goes on" in caplog.text
            assert store.steps() == (4,)


def test_a_store_that_turns_read_only_fails_before_staging(tmp_path: Path) -> None:
    files = FailAtCall(0, errno.EROFS)
    with lf_ckpt.open(tmp_path, files=files) as store:
        store.save(1, noise(1)).wait()
        files.armed = True
        handle = store.save(2, noise(1))

        assert handle.done
        assert not handle.staged
        for wait in (handle.wait_staged, handle.wait):
            with pytest.raises(OSError, match="Read-only"):
                wait()
        assert store.load().step == 1


def test_a_read_only_file_system_can_be_read_and_not_opened_for_writing(small_disk: Path) -> None:
    with lf_ckpt.open(small_disk / "store") as store:
        store.save(1, noise(1)).wait()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    for path in (small_disk / "store", small_disk / "new"):
        with pytest.raises(lf_ckpt.CkptError, match="cannot be opened for writing"):
            lf_ckpt.open(path)
    with lf_ckpt.open(small_disk / "store", read_only=True) as reader:
        assert reader.load().step == 1


def test_a_directory_without_write_permission_is_refused_at_open(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(lf_ckpt.CkptError, match="cannot be opened for writing"):
        lf_ckpt.open(tmp_path / "store")
