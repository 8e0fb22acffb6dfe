"""Robot sets that contradict themselves: refused, dropped or noted, never taken in silence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")

sys.path.insert(0, str(Path(__file__).parent))
import robot_sets as sets  # noqa: E402

import lf_format as lff  # noqa: E402

SIZE = (8, 8)


@pytest.fixture(scope="module", params=[sets.write_v2, sets.write_v3])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = request.param(tmp_path_factory.mktemp("sets") / "set")
    return written


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """A copy whose meta/ and data/ may be changed."""
    copy = tmp_path / "set"
    for path in whole.rglob("*"):
        target = copy / path.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".mp4":
            target.symlink_to(path)
        elif path.is_file():
            target.write_bytes(path.read_bytes())
    return copy


def _change(root: Path, name: str, **values: Any) -> None:
    path = root / "meta" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _rows(root: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = sorted(root.glob("data/**/*.parquet"))[0]
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(table.from_pylist(rows), path)


def _uneven(rows: list[dict[str, Any]]) -> None:
    """As many numbers as before, in rows of another length."""
    rows[1]["action"].append(rows[0]["action"].pop())


def _half_a_task(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["task_index"] += 0.5


@pytest.mark.parametrize(
    ("change", "reason"), [(_uneven, "rows of different lengths"), (_half_a_task, "not an integer")]
)
def test_rows_that_would_be_read_shifted_or_rounded_drop_their_episode(
    root: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], reason: str
) -> None:
    _rows(root, change)
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE)
    assert reason in dict(report.dropped_episodes)[0]
    with lff.Reader(report.output.path) as reader:
        assert 0 not in [int(reader.record(i)["episode_index"]) for i in range(len(reader))]


@pytest.mark.parametrize("fps", [0, -1, "x", None, 1e999])
def test_a_frame_rate_that_is_none_is_refused(root: Path, tmp_path: Path, fps: object) -> None:
    _change(root, "info.json", fps=fps)
    with pytest.raises(lff.InputError, match=r"fps|meta/ is incomplete"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE)


def test_another_frame_rate_than_that_of_the_file_is_noted_once_a_camera(root: Path, tmp_path: Path) -> None:
    assert lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE).notes == ()
    _change(root, "info.json", fps=sets.FPS * 1.5)
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE)
    assert len(report.notes) == 2
    assert all("15 frames a second" in note for note in report.notes)


@pytest.mark.parametrize(
    "part", [{"start": 0, "end": 9}, {"start": -2, "end": 1}, {"start": 1, "end": 1}, {"start": "0"}]
)
def test_parts_outside_their_feature_are_refused(root: Path, tmp_path: Path, part: dict[str, Any]) -> None:
    _change(root, "modality.json", state={"arm": part}, action={"arm": part})
    with pytest.raises(lff.FormatError, match="columns of action arm"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE, relative_actions=["arm"])


def test_a_state_is_not_taken_off_twice(root: Path, tmp_path: Path) -> None:
    with pytest.raises(lff.FormatError, match="overlap"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE, relative_actions=["arm", "arm"])


@pytest.mark.parametrize("name", ["episodes.jsonl", "tasks.jsonl"])
def test_what_meta_says_twice_is_refused(tmp_path: Path, name: str) -> None:
    path = sets.write_v2(tmp_path / "set") / "meta" / name
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(lff.InputError, match="occurs twice"):
        lff.preprocess_robot(tmp_path / "set", tmp_path / "out", image_size=SIZE)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modality.json", "[" * 100_000),
        ("info.json", '{"codebase_version": "v2.0"}'),
        ("tasks.jsonl", '{"task_index": 0, "task": "\\ud800"}'),
    ],
)
def test_damaged_meta_is_one_input_error(tmp_path: Path, name: str, text: str) -> None:
    (sets.write_v2(tmp_path / "set") / "meta" / name).write_text(text)
    with pytest.raises(lff.InputError, match="meta/ is incomplete"):
        lff.preprocess_robot(tmp_path / "set", tmp_path / "out", image_size=SIZE)


@pytest.mark.parametrize("name", ["episode_index", "length"])
def test_numbers_of_episodes_are_not_rounded(tmp_path: Path, name: str) -> None:
    root = sets.write_v2(tmp_path / "set")
    path = root / "meta" / "episodes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0][name] += 0.5
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(lff.InputError, match="where an integer belongs"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=SIZE)
