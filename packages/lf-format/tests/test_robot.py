"""Robot data sets become frames whose pixels, numbers and order are those of the source; the rest is reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av")
pq = pytest.importorskip("pyarrow.parquet")

sys.path.insert(0, str(Path(__file__).parent))
import robot_sets as sets  # noqa: E402

import lf_format as lff  # noqa: E402
from lf_format import preprocess_cli  # noqa: E402
from lf_format._video import Scaler, frame_table  # noqa: E402

WRITERS = {
    "v2.0": sets.write_v2,
    "v2.1": lambda root: sets.write_v2(root, "v2.1"),
    "v3.0": sets.write_v3,
}


def clips(root: Path, camera: str, size: tuple[int, int] | None) -> list[Any]:
    """Frames of a camera over all episodes: the files of either layout sort into episode order."""
    return [
        f for path in sorted(root.glob(f"videos/**/{camera}/**/*.mp4")) for f in sets.plain_frames(path, size)
    ]


@pytest.fixture(params=WRITERS)
def robot(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path / request.param)


@pytest.mark.parametrize("size", [(24, 40), None])
def test_every_pixel_equals_a_plain_decode(robot: Path, tmp_path: Path, size: tuple[int, int] | None) -> None:
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=size)
    assert (report.episodes, report.frames) == (3, sum(sets.LENGTHS))
    with lff.Reader(report.output.path) as reader:
        for camera, name in zip(sets.CAMERAS, ("ego", "wrist"), strict=True):
            found = reader.gather(range(len(reader)), name)
            assert isinstance(found, np.ndarray)
            assert (found == np.stack(clips(robot, camera, size))).all()
    assert lff.verify(report.output.path).problems == []


@pytest.mark.parametrize("size", [(24, 40), (48, 64), (80, 100)])
def test_pixels_are_the_rounded_values_of_the_definition(tmp_path: Path, size: tuple[int, int]) -> None:
    sets.write_video(tmp_path / "a.mp4", [5], 3)
    scaler = Scaler(size)
    for frame in av.open(str(tmp_path / "a.mp4")).decode(video=0):
        assert np.abs(scaler(frame) - sets.float_frame(frame, size)).max() < 0.75


def test_one_scaler_takes_frames_of_any_size_and_format() -> None:
    scaler = Scaler((8, 8))
    gray = np.full((20, 30, 3), 90, np.uint8)
    for pixels, form in ((gray, "rgb24"), (gray[:10, :16], "yuv444p"), (gray, "gray")):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24").reformat(format=form)
        assert np.abs(scaler(frame).astype(int) - 90).max() <= 1


def test_states_actions_tasks_and_flags_follow_the_episodes(robot: Path, tmp_path: Path) -> None:
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=(8, 8), action_horizon=4)
    with lff.Reader(report.output.path) as reader:
        row = 0
        for e, length in enumerate(sets.LENGTHS):
            state, action = (v.astype(np.float32) for v in sets.vectors(e))
            for t in range(length):
                record = reader.record(row)
                real = np.arange(t, t + 4) < length
                assert (record["state"] == state[t]).all()
                assert (record["action"] == action[np.minimum(np.arange(t, t + 4), length - 1)]).all()
                assert (record["action_mask"] == real).all()
                assert (record["episode_index"], record["frame_index"]) == (e, t)
                assert record["task"].tobytes().decode() == sets.TASKS[e % 2]
                assert record.flags == (t == 0) | (t == length - 1) << 1
                row += 1
        assert reader.meta["fps"] == sets.FPS
        assert reader.meta["modality"] == sets.MODALITY
        joined = np.concatenate([sets.vectors(e)[0] for e in range(3)])
        assert np.allclose(reader.meta["stats"]["observation.state"]["mean"], joined.mean(0))
        assert np.allclose(reader.meta["stats"]["observation.state"]["std"], joined.std(0))


def test_the_camera_without_files_is_reported_and_skipped(robot: Path, tmp_path: Path) -> None:
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=(8, 8))
    assert report.cameras == ("ego", "wrist")
    assert [name for name, _ in report.skipped_cameras] == [sets.MISSING]
    assert report.dropped_episodes == report.notes == ()


def test_two_consecutive_frames_come_from_one_index(robot: Path, tmp_path: Path) -> None:
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=(8, 8))
    with lff.Reader(report.output.path) as reader:
        pairs = lff.frame_pairs(reader.flags, np.array([0, 1, 9, 10]))
        assert pairs.tolist() == [[0, 0], [0, 1], [9, 9], [9, 10]]  # record 9 begins episode 1
        both = reader.gather(pairs.reshape(-1), "ego")
        assert isinstance(both, np.ndarray)
        assert both.reshape(4, 2, 8, 8, 3).shape == (4, 2, 8, 8, 3)


def test_time_stamps_are_the_integers_of_the_file(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8))
    path = next(root.glob(f"videos/chunk-000/{sets.CAMERAS[0]}/*0.mp4"))
    table = frame_table(path)
    with lff.Reader(report.output.path) as reader:
        assert (reader.gather(range(9), "pts.ego") == table.pts).all()
        assert reader.meta["cameras"]["ego"]["time_base"] == list(table.time_base.as_integer_ratio())
    assert table.keyframe.tolist() == [frame.key_frame for frame in av.open(str(path)).decode(video=0)]


@pytest.mark.parametrize("names", [("arm",), ("all",)])
def test_relative_actions_are_differences_from_the_state_of_the_frame(
    robot: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {"image_size": (8, 8), "action_horizon": 2, "relative_actions": names}
    report = lff.preprocess_robot(robot, tmp_path / "out", **options)
    state, action = sets.vectors(0)
    expected = action[[3, 4]].copy()
    width = 2 if names == ("arm",) else 3
    expected[:, :width] -= state[3, :width]
    with lff.Reader(report.output.path) as reader:
        assert (reader.record(3)["action"] == expected.astype(np.float32)).all()
        assert reader.meta["relative_actions"] == list(names)
    with pytest.raises(lff.FormatError, match="relative"):
        lff.preprocess_robot(robot, tmp_path / "no", relative_actions=("leg",))


def test_any_number_of_threads_gives_the_same_bytes(robot: Path, tmp_path: Path) -> None:
    outputs = [
        lff.preprocess_robot(robot, tmp_path / str(n), image_size=(24, 24), num_workers=n).output
        for n in (1, 3)
    ]
    assert Path(outputs[0].path).read_bytes() == Path(outputs[1].path).read_bytes()


def test_episodes_that_cannot_be_exact_are_dropped_by_name(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    short, gone = (
        next(root.glob(f"videos/**/{c}/*{e}.mp4")) for c, e in zip(sets.CAMERAS, (0, 1), strict=True)
    )
    sets.write_video(short, [8], 1)
    gone.unlink()
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8))
    assert [e for e, _ in report.dropped_episodes] == [0, 1]
    assert "ends before" in report.dropped_episodes[0][1]
    assert sets.CAMERAS[1] in report.dropped_episodes[1][1]
    assert (report.episodes, report.frames) == (1, 12)
    with lff.Reader(report.output.path) as reader:
        assert set(reader.gather(range(12), "episode_index").tolist()) == {2}


def test_a_dropped_episode_inside_a_shared_file_does_not_shift_the_next(tmp_path: Path) -> None:
    root = sets.write_v3(tmp_path / "set")
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[0]["data/file_index"] = 7
    pq.write_table(pq.read_table(path).schema.empty_table().from_pylist(rows), path)
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=None)
    assert [e for e, _ in report.dropped_episodes] == [0]
    with lff.Reader(report.output.path) as reader:
        expected = clips(root, sets.CAMERAS[1], None)[9:]
        assert (reader.gather(range(17), "wrist") == np.stack(expected)).all()


def test_surplus_frames_and_a_wrong_position_are_reported(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "v2")
    sets.write_video(next(root.glob(f"videos/**/{sets.CAMERAS[0]}/*0.mp4")), [11], 1)
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8))
    assert report.notes == ("episode_000000.mp4: 2 frames after the last episode are not used",)

    root = sets.write_v3(tmp_path / "v3")
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[1][f"videos/{sets.CAMERAS[0]}/from_timestamp"] += 0.1
    pq.write_table(table.from_pylist(rows), path)
    report = lff.preprocess_robot(root, tmp_path / "out3", image_size=(8, 8))
    assert "not where the episode begins" in report.dropped_episodes[0][1]


def test_numbers_that_are_not_finite_and_damaged_files_drop_their_episode(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    data = sorted(root.glob("data/**/*.parquet"))
    table = pq.read_table(data[0])
    rows = table.to_pylist()
    rows[3]["action"][1] = float("nan")
    pq.write_table(table.from_pylist(rows), data[0])
    data[1].write_bytes(data[1].read_bytes()[:200])
    report = lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8))
    reasons = dict(report.dropped_episodes)
    assert "not finite" in reasons[0]
    assert "cannot be read" in reasons[1]
    for video in root.glob("videos/**/*2.mp4"):
        video.write_bytes(b"no video")
    with pytest.raises(lff.InputError, match="no episode"):
        lff.preprocess_robot(root, tmp_path / "none", image_size=(8, 8))
    assert not (tmp_path / "none" / "train.lfg").exists()


def test_an_unknown_version_and_incomplete_metadata_are_refused(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    info = json.loads((root / "meta" / "info.json").read_text())
    for change, error in (
        ({"codebase_version": "v4.0"}, lff.FormatError),
        ({"features": None}, lff.InputError),
    ):
        (root / "meta" / "info.json").write_text(json.dumps(info | change))
        with pytest.raises(error):
            lff.preprocess_robot(root, tmp_path / "out")


def test_the_command_writes_the_same_file_and_names_what_it_skipped(
    robot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--image-size", "24", "40", "--action-horizon", "4", "--relative-actions", "arm"]
    assert preprocess_cli.main(["--input", str(robot), "--output", str(tmp_path / "cli"), *options]) == 0
    text = capsys.readouterr().out
    assert sets.MISSING in text
    assert "3 episodes, 26 frames" in text
    report = lff.preprocess_robot(
        robot, tmp_path / "api", image_size=(24, 40), action_horizon=4, relative_actions=("arm",)
    )
    assert (tmp_path / "cli" / "train.lfg").read_bytes() == Path(report.output.path).read_bytes()
    assert preprocess_cli.main(["--input", str(robot), "--output", str(tmp_path / "json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 26


def test_held_out_episodes_are_whole_and_named(robot: Path, tmp_path: Path) -> None:
    whole = lff.preprocess_robot(robot, tmp_path / "whole", image_size=(8, 8))
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=(8, 8), eval_episodes=(1,))
    assert report.eval is not None
    assert report.eval_episodes == (1,)
    assert (report.output.records, report.eval.records) == (21, 5)
    with lff.Reader(whole.output.path) as all_of_it:
        pixels = all_of_it.gather(range(26), "wrist")
        for output, rows in ((report.output, [*range(9), *range(14, 26)]), (report.eval, range(9, 14))):
            with lff.Reader(output.path) as reader:
                assert (reader.gather(range(len(reader)), "wrist") == pixels[list(rows)]).all()
                assert reader.flags.tolist() == all_of_it.flags[list(rows)].tolist()


def test_a_fraction_holds_out_episodes_by_seed_and_an_old_eval_file_goes(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    chosen = set()
    for seed in range(8):
        options: dict[str, Any] = {"image_size": (8, 8), "eval_fraction": 0.2, "seed": seed}
        report = lff.preprocess_robot(root, tmp_path / "out", **options)
        assert report.eval is not None
        assert 0.2 * 26 <= report.eval.records < 26
        chosen.add(report.eval_episodes)
    assert len(chosen) > 1
    again = lff.preprocess_robot(root, tmp_path / "again", **options)
    assert again.eval_episodes == report.eval_episodes
    lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.lfg"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"eval_episodes": (7,)}, "cannot be written"),
        ({"eval_episodes": (0, 1, 2)}, "not all held out"),
        ({"eval_episodes": (0,), "eval_fraction": 0.5}, "excludes"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"num_workers": 0}, "num_workers"),
        ({"tokenizer": "missing.json"}, "no such tokenizer"),
    ],
)
def test_a_division_or_tokenizer_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    root = sets.write_v2(tmp_path / "set")
    with pytest.raises(lff.FormatError, match=what):
        lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8), **options)
    assert list(tmp_path.glob("out/*")) == []


def test_a_tokenizer_gives_every_record_the_ids_of_its_task(robot: Path, tmp_path: Path) -> None:
    report = lff.preprocess_robot(robot, tmp_path / "out", image_size=(8, 8), tokenizer="bytes")
    assert report.tokenizer is not None
    assert report.tokenizer.name == "bytes"
    with lff.Reader(report.output.path) as reader:
        for row in range(26):
            record = reader.record(row)
            assert record["tokens"].astype(np.uint8).tobytes() == record["task"].tobytes()
            assert record["episode_index"] == (row >= 9) + (row >= 14)


def test_a_task_without_a_token_is_refused(tmp_path: Path) -> None:
    root = sets.write_v2(tmp_path / "set")
    lines = [json.dumps({"task_index": k, "task": text}) for k, text in enumerate(("", "stop"))]
    (root / "meta" / "tasks.jsonl").write_text("\n".join(lines))
    with pytest.raises(lff.InputError, match="task without a token"):
        lff.preprocess_robot(root, tmp_path / "out", image_size=(8, 8), tokenizer="bytes")


def test_the_command_holds_out_and_tokenizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sets.write_v2(tmp_path / "set")
    options = ["--input", str(root), "--output", str(tmp_path / "cli"), "--image-size", "8", "8"]
    assert preprocess_cli.main([*options, "--tokenizer", "bytes", "--eval-episodes", "2"]) == 0
    assert "episodes [2]" in capsys.readouterr().out
    given: dict[str, Any] = {"image_size": (8, 8), "tokenizer": "bytes", "eval_episodes": (2,)}
    lff.preprocess_robot(root, tmp_path / "api", **given)
    for name in ("train.lfg", "eval.lfg"):
        assert (tmp_path / "cli" / name).read_bytes() == (tmp_path / "api" / name).read_bytes()
    assert preprocess_cli.main([*options, "--max-len", "5"]) == 2


@pytest.mark.skipif("LF_ROBOT_DATA" not in os.environ, reason="LF_ROBOT_DATA names no data set")
def test_every_pixel_of_the_real_set_equals_a_plain_decode(tmp_path: Path) -> None:
    root = Path(os.environ["LF_ROBOT_DATA"])
    report = lff.preprocess_robot(root, tmp_path, image_size=(224, 224))
    assert report.dropped_episodes == ()
    with lff.Reader(report.output.path) as reader:
        for name in report.cameras:
            row = 0
            for path in sorted(root.glob(f"videos/**/{reader.meta['cameras'][name]['key']}/**/*.mp4")):
                expected = np.stack(sets.plain_frames(path, (224, 224)))
                assert (reader.gather(range(row, row + len(expected)), name) == expected).all(), path
                first = next(av.open(str(path)).decode(video=0))
                assert np.abs(expected[0] - sets.float_frame(first, (224, 224))).max() < 2
                row += len(expected)
            assert row == len(reader) == report.frames
