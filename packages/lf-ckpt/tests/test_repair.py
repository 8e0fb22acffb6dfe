"""Mending a store: what moves, what stays, and that nothing that verifies is lost, wherever it stops."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_faults import Killed, Recorder, StopAtCall
from ckpt_states import assert_same, files_under, state
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt import FileLayer, cli
from lf_ckpt.identity import dump_format
from lf_ckpt.repairing import Action, Finding, plan_repair

COMMON = {"frozen": torch.arange(100_000.0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Steps 1 (full), 2 and 3 (deltas on 1), 4 (full), 5 (delta on 4)."""
    path = tmp_path / "store"
    with lf_ckpt.open(path, full_every=2) as store:
        reports = [store.save(step, COMMON | state(step)).wait() for step in range(1, 6)]
    assert [report.base for report in reports] == [None, "1", "1", None, "4"]
    return path


def flip(file: Path, at: int = 5000) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def repair(
    capsys: pytest.CaptureFixture[str], path: Path, *options: str
) -> tuple[int, list[tuple[str, str]]]:
    code = cli.main(["repair", str(path), "--json", *options])
    actions = json.loads(capsys.readouterr().out)["actions"]
    return code, [(action["kind"], action["subject"]) for action in actions]


def check_all_load(path: Path, steps: list[int]) -> None:
    with lf_ckpt.open(path, read_only=True) as store:
        assert list(store.steps()) == steps
        for step in steps:
            assert_same(store.load(step).tensors, COMMON | state(step))


def test_a_good_store_needs_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_under(path)

    assert repair(capsys, path) == (0, [])
    assert repair(capsys, path, "--yes") == (0, [])
    assert files_under(path) == before


def test_a_damaged_delta_moves_aside_when_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path / "steps/5/rank-0.lfckpt")
    before = files_under(path)
    wanted = [("quarantine", "5"), ("write-head", "4")]

    assert repair(capsys, path) == (1, wanted)
    assert files_under(path) == before  # a dry run by default

    assert repair(capsys, path, "--yes") == (0, wanted)
    assert files_under(path / "damaged/5") == {"MANIFEST", "rank-0.lfckpt"}
    assert json.loads((path / "HEAD").read_text()) == {"folder": "4"}
    check_all_load(path, [1, 2, 3, 4])
    assert cli.main(["verify", str(path), "--deep"]) == 0


def test_a_damaged_base_moves_with_the_deltas_that_need_the_bad_part(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(path / "steps/1/rank-0.lfckpt")  # of `frozen`, which steps 2 and 3 take from it

    assert repair(capsys, path, "--yes") == (0, [("quarantine", n) for n in ("2", "3", "1")])
    check_all_load(path, [4, 5])


def test_a_damaged_base_stays_for_a_delta_that_reads_only_its_good_part(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(
        path / "steps/4/rank-0.lfckpt",
        (path / "steps/4/rank-0.lfckpt").stat().st_size // 4096 * 4096 - 8192 - 4000,
    )

    code, actions = repair(capsys, path, "--yes")

    assert (code, actions) == (1, [("leave", "4")])
    with lf_ckpt.open(path, read_only=True) as store:
        assert_same(store.load(5).tensors, COMMON | state(5))


def test_a_step_is_moved_again_under_another_name(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(path / "steps/5", path / "damaged/5")
    flip(path / "steps/5/rank-0.lfckpt")

    repair(capsys, path, "--yes")

    assert sorted(p.name for p in (path / "damaged").iterdir()) == ["5", "5-1"]


def test_unfinished_saves_and_a_wrong_head_are_mended(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "steps/9").mkdir()
    (path / "steps/9/rank-0.lfckpt").write_bytes(b"torn")
    (path / "HEAD").write_text("nonsense")

    code, actions = repair(capsys, path, "--yes")

    assert (code, actions) == (0, [("remove-unfinished", "9"), ("write-head", "5")])
    assert not (path / "steps/9").exists()
    check_all_load(path, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "content", [None, b"", b"\0" * 100, b'{"format":', dump_format("0" * 32)[:-40] + b"\n"]
)
def test_a_lost_format_file_is_written_anew_from_the_steps(
    path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (path / "FORMAT").read_bytes()
    (path / "FORMAT").unlink()
    if content is not None:
        (path / "FORMAT").write_bytes(content)

    assert repair(capsys, path) == (1, [("write-format", "FORMAT")])
    assert repair(capsys, path, "--yes") == (0, [("write-format", "FORMAT")])
    assert (path / "FORMAT").read_bytes() == before
    check_all_load(path, [1, 2, 3, 4, 5])


def test_a_store_of_another_version_is_not_overwritten(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dump_format("0" * 32, (2, 0))
    (path / "FORMAT").write_bytes(before)

    assert cli.main(["repair", str(path), "--yes"]) == 2
    assert "another version" in capsys.readouterr().err
    assert (path / "FORMAT").read_bytes() == before


def test_steps_of_another_store_are_reported_and_left(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lf_ckpt.open(tmp_path / "other") as store:
        store.save(7, state()).wait()
    (tmp_path / "other/steps/7").rename(path / "steps/7")

    assert repair(capsys, path, "--yes") == (1, [("leave", "7")])
    assert (path / "steps/7/MANIFEST").exists()


def test_what_cannot_be_read_just_now_is_not_damaged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class BadDisk(FileLayer):
        def open(self, path: str) -> int:
            if path.endswith("5/rank-0.lfckpt"):
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path)

    flip(path / "steps/2/rank-0.lfckpt", 4096 + 10)
    code = cli.main(["repair", str(path), "--yes", "--json"], BadDisk())
    actions = json.loads(capsys.readouterr().out)["actions"]

    assert code == 1
    assert [(a["kind"], a["subject"]) for a in actions] == [
        ("leave", "2"),
        ("leave", "5"),
        ("write-head", "4"),
    ]
    assert not (path / "damaged").exists()


def test_a_live_writer_is_not_disturbed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lf_ckpt.open(path):
        assert cli.main(["repair", str(path), "--yes"]) == 2
        assert "writer" in capsys.readouterr().err
        assert cli.main(["repair", str(path)]) == 0  # looking needs no lock


def test_a_directory_that_is_no_store_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")

    for options in ([], ["--yes"]):
        assert cli.main(["repair", str(tmp_path), *options]) == 2
    assert files_under(tmp_path) == {"mine.txt"}


def test_dying_at_any_call_loses_nothing_that_verifies(path: Path, tmp_path: Path) -> None:
    def damaged_copy(name: str) -> Path:
        copy = tmp_path / name
        shutil.copytree(path, copy)
        flip(copy / "steps/1/rank-0.lfckpt")
        (copy / "steps/9").mkdir()
        return copy

    def mend(copy: Path, files: FileLayer) -> int:
        return cli.main(["repair", str(copy), "--yes"], files)

    recorder = Recorder()
    mend(damaged_copy("count"), recorder)
    assert len(recorder.calls) > 10
    for call in range(len(recorder.calls)):
        copy = damaged_copy(str(call))
        files = StopAtCall()
        files.arm(call)
        with pytest.raises(Killed):
            mend(copy, files)

        with lf_ckpt.open(copy, read_only=True) as store:
            for step in (4, 5):
                assert_same(store.load(step).tensors, COMMON | state(step))
        assert mend(copy, FileLayer()) == 0
        check_all_load(copy, [4, 5])


@st.composite
def findings(draw: st.DrawFn) -> list[Finding]:
    found: list[Finding] = []
    for folder in map(str, range(draw(st.integers(0, 7)))):
        parent = draw(st.none() | st.sampled_from([f.folder for f in found] or ["gone"]))
        problem = draw(st.none() | st.just("bad"))
        unreadable = problem is not None and draw(st.booleans())
        found.append(
            Finding(folder, problem, unreadable, parent, draw(st.booleans()) and draw(st.booleans()))
        )
    return found


@settings(max_examples=60, deadline=None)
@given(findings(), st.none() | st.just("3"))
def test_the_plan_moves_nothing_that_a_good_step_needs(found: list[Finding], head: str | None) -> None:
    plan = plan_repair(found, [], head)

    moved = [a.subject for a in plan if a.kind == "quarantine"]
    by_name = {f.folder: f for f in found}
    for folder in moved:
        assert by_name[folder].problem
        assert not by_name[folder].unreadable
        assert not by_name[folder].foreign
    for f in found:
        if f.problem is None:
            assert f.folder not in moved
            assert f.parent not in moved
    order: Callable[[str], int] = moved.index
    assert all(order(f) < order(str(by_name[f].parent)) for f in moved if by_name[f].parent in moved)
    told = {a.subject for a in plan}
    assert all(f.folder in told for f in found if f.problem)  # nothing bad goes unmentioned


def test_the_head_names_the_newest_good_step() -> None:
    found = [Finding("1", None), Finding("2", None), Finding("3", "bad")]

    assert plan_repair(found, [], "3")[-1] == Action("write-head", "2", "HEAD names 3")
    assert plan_repair(found[:2], [], "2") == []
