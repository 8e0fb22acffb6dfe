"""Case A10: a file is there complete or not at all, whatever stops the writer."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lf_format as lff

Write = Callable[..., Path]
BYTES = lff.ByteTokenizer().info


def new_writer(path: Path) -> lff.Writer:
    return lff.Writer(path, vocab_size=256, tokenizer=BYTES, buckets=(64,), block_bytes=256)


def test_the_final_name_appears_only_at_close(tmp_path: Path) -> None:
    path = tmp_path / "a.loongbin"
    writer = new_writer(path)
    for _ in range(100):
        writer.append([1] * 60)
    assert not path.exists()
    report = writer.close()
    assert list(tmp_path.iterdir()) == [path]
    assert (report.path, report.records, report.tokens, report.bytes) == (
        str(path),
        100,
        6000,
        path.stat().st_size,
    )
    assert report.fingerprint == lff.Reader(path).fingerprint


def test_close_twice_gives_the_same_report_and_append_after_it_is_refused(tmp_path: Path) -> None:
    with new_writer(tmp_path / "a.loongbin") as writer:
        writer.append([1])
    assert writer.close() is writer.close()
    with pytest.raises(lff.FormatError, match="closed"):
        writer.append([1])


def test_an_exception_in_the_with_block_leaves_nothing(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.loongbin")
    with pytest.raises(lff.InputError), writer:
        writer.append([-1])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(lff.FormatError, match="closed"):
        writer.close()


def test_a_forgotten_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.loongbin")
    writer.append([1])
    del writer
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_old_file(write: Write, tmp_path: Path) -> None:
    path = write([[1, 2, 3]])
    before = path.read_bytes()
    with pytest.raises(KeyError), new_writer(path):
        raise KeyError("stop")
    assert path.read_bytes() == before
    write([[9]])
    assert lff.Reader(path).record(0).tokens.tolist() == [9]


def test_the_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        new_writer(tmp_path / "a.loongbin").close()
    finally:
        os.umask(old)
    assert (tmp_path / "a.loongbin").stat().st_mode & 0o777 == 0o640


def test_a_directory_or_a_missing_directory_as_target_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(lff.FormatError, match="no regular file"):
        new_writer(tmp_path)
    with pytest.raises(FileNotFoundError):
        new_writer(tmp_path / "absent" / "a.loongbin")
    assert list(tmp_path.iterdir()) == []


# --- disk full ---


def _fill(path: Path) -> None:
    with new_writer(path) as writer:
        while True:
            writer.append([1] * 64)


def test_a_fifo_or_a_device_as_target_is_refused_and_stays(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("/dev/zero")
    for target in (fifo, link):
        with pytest.raises(lff.FormatError, match="no regular file"):
            new_writer(target)
    assert fifo.is_fifo()
    assert link.is_symlink()


def test_a_file_size_limit_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    script = """
        import os, resource, signal, sys
        import lf_format as lff
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        path = sys.argv[1]
        before = len(os.listdir("/proc/self/fd"))
        try:
            with lff.Writer(path, vocab_size=256, tokenizer=lff.ByteTokenizer().info, buckets=(64,)) as writer:
                while True:
                    writer.append([1] * 64)
        except OSError as error:
            print(type(error).__name__, error.errno, os.listdir(os.path.dirname(path)))
        assert len(os.listdir("/proc/self/fd")) == before, "descriptor leak"
        with lff.Writer(path, vocab_size=256, tokenizer=lff.ByteTokenizer().info, buckets=(64,)) as writer:
            writer.append([1])
        print(os.listdir(os.path.dirname(path)))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.loongbin")],
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    assert run.stdout.split("\n")[:2] == ["OSError 27 []", "['a.loongbin']"]


@contextlib.contextmanager
def _tmpfs(folder: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_nothing_and_a_retry_succeeds(tmp_path: Path) -> None:
    with _tmpfs(tmp_path) as disk:
        with pytest.raises(OSError, match="No space left"):
            _fill(disk / "a.loongbin")
        assert list(disk.iterdir()) == []
        with new_writer(disk / "a.loongbin") as writer:
            writer.append([1])
        assert lff.verify(disk / "a.loongbin").ok


def test_preprocess_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with _tmpfs(tmp_path) as disk:
        for fraction in (0.0, 0.1):
            with pytest.raises(OSError, match="No space left"):
                lff.preprocess_documents(
                    ((str(i), "x" * 50_000) for i in range(100)), disk, eval_fraction=fraction
                )
            assert list(disk.iterdir()) == []


# --- killed ---


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_inside_preprocess_leaves_nothing_under_a_final_name(tmp_path: Path, workers: int) -> None:
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i}.txt").write_text(f"{i} " * 20_000)
    command = [sys.executable, "-m", "lf_format.preprocess_cli", "--input", str(tmp_path / "in")]
    command += ["--max-len", "64", "--eval-fraction", "0.2", "--num-workers", str(workers)]
    dice, killed = random.Random(workers), 0
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for attempt in range(4):
        out = tmp_path / f"out{attempt}"
        process = subprocess.Popen([*command, "--output", str(out)], **quiet)
        while not (out.exists() and any(out.iterdir())) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.random() * 0.3 * bool(attempt))
        process.send_signal(signal.SIGKILL)
        finished = process.wait() == 0
        killed += not finished
        named = {p.name for p in out.iterdir() if not p.name.startswith(".")}
        both = {"train.loongbin", "eval.loongbin"}
        # Two names cannot appear in one instant: eval comes first, and what has a name is complete.
        assert named == both or (not finished and named in (set(), {"eval.loongbin"}))
        for name in named:
            assert lff.verify(out / name).ok
    assert killed


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = """
        import sys, time
        import lf_format as lff
        def endless():
            n = 0
            while True:
                n += 1
                yield str(n), "text " * 100
        if __name__ == "__main__":
            lff.preprocess_documents(endless(), sys.argv[1], num_workers=2)
    """
    main = tmp_path / "main.py"
    main.write_text(textwrap.dedent(script))
    process = subprocess.Popen([sys.executable, main, tmp_path / "out"], start_new_session=True)
    _until(lambda: len(_group(process.pid)) >= 3)
    process.kill()
    process.wait()
    _until(lambda: _group(process.pid) == [])


def test_a_killed_worker_is_one_clear_error(tmp_path: Path) -> None:
    script = """
        import multiprocessing, os, signal, sys
        import lf_format as lff
        def endless():
            n = 0
            while True:
                n += 1
                if n == 5000:
                    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
                yield str(n), "text " * 100
        if __name__ == "__main__":
            try:
                lff.preprocess_documents(endless(), sys.argv[1], num_workers=2)
            except lff.WorkerError as error:
                print(error, os.listdir(sys.argv[1]))
    """
    main = tmp_path / "main.py"
    main.write_text(textwrap.dedent(script))
    run = subprocess.run([sys.executable, main, tmp_path / "out"], capture_output=True, text=True, timeout=60)
    assert "a tokenizing process died" in run.stdout
    assert run.stdout.strip().endswith("[]")
    assert run.stderr == ""


def _group(leader: int) -> list[int]:
    """Live processes of a process group, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, group = (entry / "stat").read_text().rsplit(") ", 1)[1].split()[:3]
                if int(group) == leader and state != "Z":
                    found.append(int(entry.name))
    return found


def _until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_a_forked_child_does_not_remove_its_parents_file(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.loongbin")
    writer.append([1])
    child = os.fork()
    if child == 0:
        writer.abort()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.append([2])
    assert writer.close().records == 2


def test_the_writer_needs_two_descriptors_at_most(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    try:
        with new_writer(tmp_path / "a.loongbin") as writer:
            writer.append([1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with lff.Reader(tmp_path / "a.loongbin") as reader:
        assert reader.record(0).tokens.tolist() == [1]
