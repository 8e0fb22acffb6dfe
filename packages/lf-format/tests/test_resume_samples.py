"""A killed run over robot data or image pairs goes on where its last part ends, to the bytes of a whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

image = pytest.importorskip("PIL.Image")
pytest.importorskip("av")
pytest.importorskip("pyarrow.parquet")

sys.path.insert(0, str(Path(__file__).parent))
import robot_sets as sets  # noqa: E402

import lf_format as lff  # noqa: E402
from lf_format import _journal, _robot, preprocess_cli  # noqa: E402
from lf_format._journal import FOLDER, PARTS, Journal  # noqa: E402
from lf_format._sample_spool import SampleSpool  # noqa: E402

# A part an episode or a line, and a pause that lets the test kill between two of them.
SLOW = """
    import sys, time
    from lf_format import _journal, preprocess_cli
    _journal.PART_BYTES = 1
    commit = _journal.Journal.commit
    def slow(self):
        commit(self)
        time.sleep(0.1)
    _journal.Journal.commit = slow
    if __name__ == "__main__":
        sys.exit(preprocess_cli.main(sys.argv[1:]))
"""
LINES, EMPTY = 12, 2  # the line of this index has no text


def robot_v2(folder: Path) -> list[str]:
    root = sets.write_v2(folder / "set")
    held = ["--eval-episodes", "1", "--tokenizer", "bytes"]
    return ["--input", str(root), "--image-size", "24", "40", "--resume", *held]


def robot_v3(folder: Path) -> list[str]:
    """Episodes share videos, so that a continued run begins inside a file."""
    more = ["--image-size", "0", "0", "--codec", "auto", "--resume"]
    return ["--input", str(sets.write_v3(folder / "set")), *more]


def _pairs(folder: Path) -> str:
    random = np.random.default_rng(0)
    rows = []
    for k in range(LINES):
        shape = (16 + k, 20 + k) + ((3,) if k % 5 else ())
        image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(folder / f"{k}.jpg")
        rows.append(json.dumps({"text": "" if k == EMPTY else "ab" * (1 + k * 5 % 7), "image": f"{k}.jpg"}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return str(folder / "pairs.jsonl")


def pixels(folder: Path) -> list[str]:
    size = ["--image-size", "16", "20", "--max-len", "16", "--min-len", "4"]
    return ["--input", _pairs(folder), "--image-key", "image", *size, "--codec", "zstd"]


def jpegs(folder: Path) -> list[str]:
    return ["--input", _pairs(folder), "--image-key", "image", "--image-size", "0", "0", "--max-len", "16"]


MAKERS = [robot_v2, robot_v3, pixels, jpegs]
Report = dict[str, Any]


def run(command: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """The report of a command that succeeds."""
    capsys.readouterr()
    assert preprocess_cli.main([*command, "--output", str(out), "--json"]) == 0
    report: Report = json.loads(capsys.readouterr().out)
    return report


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parts_in(folder: Path) -> int:
    path = folder / FOLDER / PARTS
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def kill_after(parts: int, command: list[str], out: Path) -> None:
    """Starts the slow command and ends it with SIGKILL when it has so many parts."""
    script = out.parent / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    with subprocess.Popen([sys.executable, script, *command, "--output", str(out)]) as process:
        end = time.monotonic() + 60
        while parts_in(out) < parts and process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert parts_in(out) >= parts


@pytest.mark.parametrize("make", MAKERS)
def test_a_killed_run_continues_and_ends_with_the_same_bytes(
    make: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    command, out = make(tmp_path / "in"), tmp_path / "out"
    whole = run(command, tmp_path / "whole", capsys)
    kill_after(1, command, out)
    kill_after(2, command, out)
    done = parts_in(out)
    decoded: list[int] = []
    count = Journal.count
    monkeypatch.setattr(Journal, "count", lambda self: (decoded.append(1), count(self)))
    report = run(command, out, capsys)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    unit = "lines" if make in (pixels, jpegs) else "episodes"
    assert f"continued an interrupted run behind its first {done} {unit}" in report["notes"]
    skipped = len(report.get("empty", ()))
    total = report.get("episodes", LINES - skipped)
    assert len(decoded) == total - done + (skipped if done > EMPTY else 0)  # nothing is decoded twice
    for name in ("empty", "eval_episodes", "frames", "records", "tokens"):
        assert report.get(name) == whole.get(name)
    assert sorted(set(whole["notes"]) - set(report["notes"])) == []


def interrupt(command: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, after: int = 2) -> None:
    """The command, interrupted when it has so many parts."""
    commit = Journal.commit

    def stop(self: Journal[Any]) -> None:
        commit(self)
        if parts_in(out) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_journal, "PART_BYTES", 1)
        patch.setattr(Journal, "commit", stop)
        assert preprocess_cli.main([*command, "--output", str(out)]) == 130
    assert parts_in(out) == after


@pytest.fixture(params=[robot_v2, pixels])
def interrupted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a run that was interrupted after two parts."""
    (tmp_path / "in").mkdir()
    command: list[str] = request.param(tmp_path / "in")
    interrupt(command, tmp_path / "out", monkeypatch)
    return command


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "list"])
def test_a_damaged_part_is_made_again(
    interrupted: list[str], tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out" / FOLDER
    path = folder / ("parts" if damage == "list" else "000001.lfg")
    raw = bytearray(path.read_bytes())
    path.unlink()
    raw[len(raw) - 40 if damage == "list" else len(raw) // 2] ^= 4
    if damage != "missing":
        path.write_bytes(raw[: len(raw) // 2] if damage == "cut" else raw)
    report = run(interrupted, tmp_path / "out", capsys)
    assert any("behind its first 1 " in note for note in report["notes"])
    run(interrupted, tmp_path / "whole", capsys)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("touched", ["meta/tasks.jsonl", "videos", "pairs.jsonl", "0.jpg"])
def test_changed_inputs_start_anew_and_the_report_says_so(
    touched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    robot = touched in ("meta/tasks.jsonl", "videos")
    command = (robot_v2 if robot else pixels)(tmp_path / "in")
    interrupt(command, tmp_path / "out", monkeypatch)
    found = sorted(tmp_path.glob("in/set/videos/**/*.mp4")) if touched == "videos" else []
    path = found[0] if found else tmp_path / "in" / ("set" if robot else "") / touched
    os.utime(path, (1, 1))
    report = run(command, tmp_path / "out", capsys)
    what = "images" if touched == "0.jpg" else "inputs"
    assert f"an interrupted run was started anew: {what} changed" in report["notes"]
    run(command, tmp_path / "whole", capsys)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_changed_pixels_start_anew(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = [*interrupted, "--image-size", "8", "8"]
    assert (
        "an interrupted run was started anew: image size changed"
        in run(changed, tmp_path / "out", capsys)["notes"]
    )
    run(changed, tmp_path / "whole", capsys)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_options_that_do_not_change_the_samples_go_on(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*interrupted, "--codec", "auto", "--num-workers", "2"]
    more += ["--min-len", "2"] if "--image-key" in more else ["--eval-episodes", "2"]
    assert any("continued" in note for note in run(more, tmp_path / "out", capsys)["notes"])
    run(more, tmp_path / "whole", capsys)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_kill_while_the_files_are_written_leaves_all_parts(
    interrupted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(_: SampleSpool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SampleSpool, "samples", stop)
        assert preprocess_cli.main([*interrupted, "--output", str(tmp_path / "out")]) == 130
    (tmp_path / "out" / ".train.lfg.1-00.tmp").write_bytes(b"of a killed run")
    total = LINES if "--image-key" in interrupted else len(sets.LENGTHS)
    notes = run(interrupted, tmp_path / "out", capsys)["notes"]
    assert any(f"behind its first {total} " in note for note in notes)
    run(interrupted, tmp_path / "whole", capsys)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_two_runs_into_one_output_are_refused(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = parts_in(tmp_path / "out")
    with (tmp_path / "out" / FOLDER / PARTS).open("rb") as file:
        _journal.fcntl.flock(file, _journal.fcntl.LOCK_EX)
        assert preprocess_cli.main([*interrupted, "--output", str(tmp_path / "out")]) == 2
    assert "another run" in capsys.readouterr().err
    assert parts_in(tmp_path / "out") == kept


@pytest.mark.parametrize("make", [robot_v2, robot_v3])
def test_without_parts_the_bytes_are_the_same(
    make: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = make(tmp_path)
    with_parts = run(command, tmp_path / "parts", capsys)
    straight = run([*command, "--no-resume"], tmp_path / "straight", capsys)
    assert bytes_of(tmp_path / "straight") == bytes_of(tmp_path / "parts")
    assert (straight["frames"], straight["notes"]) == (with_parts["frames"], with_parts["notes"])
    lines = ["--input", _pairs(tmp_path), "--image-key", "image", "--no-resume"]
    assert preprocess_cli.main([*lines, "--output", str(tmp_path / "no")]) == 2


def test_parts_are_made_where_they_are_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PartsError(Exception):
        pass

    def journal(*_: object) -> None:
        raise PartsError

    root = sets.write_v2(tmp_path / "set")
    monkeypatch.setattr(_robot, "Journal", journal)
    lff.preprocess_robot(root, tmp_path / "small", image_size=(8, 8))
    with pytest.raises(PartsError):
        lff.preprocess_robot(root, tmp_path / "asked", image_size=(8, 8), resume=True)
    monkeypatch.setattr(_robot, "WORTH_PARTS", 8 * 8 * 3)
    with pytest.raises(PartsError):
        lff.preprocess_robot(root, tmp_path / "large", image_size=(8, 8))
    lff.preprocess_robot(root, tmp_path / "straight", image_size=(8, 8), resume=False)


def test_a_refused_line_leaves_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_journal, "PART_BYTES", 1)
    command = pixels(tmp_path)
    (tmp_path / "9.jpg").write_bytes(b"no image")
    assert preprocess_cli.main([*command, "--output", str(tmp_path / "out")]) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_frame_that_cannot_be_stored_names_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_journal, "PART_BYTES", 1)
    monkeypatch.setattr(sets, "vectors", lambda e: np.full((2, sets.LENGTHS[e], 3), -3e38) * [[[-1]], [[1]]])
    root = sets.write_v2(tmp_path / "set")
    with pytest.raises(lff.InputError, match="episode 0"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8), relative_actions=["all"])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_device_as_output_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.lfg")
    (tmp_path / "in").mkdir()
    for command in (robot_v2(tmp_path / "in"), pixels(tmp_path / "in")):
        assert preprocess_cli.main([*command, "--output", str(tmp_path)]) == 2
    assert not (tmp_path / FOLDER).exists()


def test_the_codec_of_robot_data_may_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = robot_v2(tmp_path)
    for codec in ("raw", "zstd"):
        report = run([*command, "--codec", codec], tmp_path / codec, capsys)
        assert report["frames"] == sum(sets.LENGTHS)
    for name in ("train.lfg", "eval.lfg"):
        with lff.Reader(tmp_path / "raw" / name) as raw, lff.Reader(tmp_path / "zstd" / name) as coded:
            assert (raw.codecs_raw, coded.codecs_raw) == (True, False)
            for i in range(len(raw)):
                assert raw.record(i)["ego"].tobytes() == coded.record(i)["ego"].tobytes()
    assert preprocess_cli.main([*command, "--codec", "packed", "--output", str(tmp_path / "no")]) == 2
    assert "codec of a .lfg" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
