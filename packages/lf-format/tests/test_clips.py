"""Whole videos: the bytes of the file, and any frame by number, equal to a plain decode of all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")

sys.path.insert(0, str(Path(__file__).parent))
import robot_sets as sets

import lf_format as lff


@pytest.fixture
def videos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{k}.mp4" for k in range(2)]
    for k, path in enumerate(paths):
        sets.write_video(path, [13 + 8 * k], k)
    return paths


@pytest.fixture
def stored(videos: list[Path], tmp_path: Path) -> Path:
    fields = [*lff.Field.video("clip"), lff.Field.tensor("state", "float32", (-1, 2))]
    with lff.Writer(tmp_path / "a.lfg", fields=fields) as writer:
        for path in videos:
            writer.append(lff.video_sample("clip", path) | {"state": np.zeros((3, 2))})
    return tmp_path / "a.lfg"


def _plain(path: Path) -> Any:
    return np.stack(sets.plain_frames(path, None))


def test_the_file_comes_back_byte_for_byte(stored: Path, videos: list[Path]) -> None:
    assert lff.verify(stored).ok
    with lff.Reader(stored) as reader:
        for i, path in enumerate(videos):
            assert reader.record(i)["clip"].tobytes() == path.read_bytes()


def test_every_frame_by_number_equals_a_plain_decode(stored: Path, videos: list[Path]) -> None:
    with lff.Reader(stored) as reader:
        for i, path in enumerate(videos):
            record, expected = reader.record(i), _plain(path)
            assert len(record["clip.frames"]) == len(expected)
            for k in range(len(expected)):
                assert (lff.video_frames(record, "clip", [k])[0] == expected[k]).all()
            order = [len(expected) - 1, 3, 4, 3]
            assert (lff.video_frames(record, "clip", order) == expected[order]).all()


def test_frames_that_are_not_there_are_refused(stored: Path) -> None:
    with lff.Reader(stored) as reader:
        record = dict(reader.record(0))
    for bad in ([13], [-1]):
        with pytest.raises(IndexError):
            lff.video_frames(record, "clip", bad)
    assert lff.video_frames(record, "clip", []).shape[0] == 0
    with pytest.raises(lff.FormatError, match="frames of its table"):
        lff.video_frames(record | {"clip.frames": record["clip.frames"] + [1, 0]}, "clip", [5])
    with pytest.raises(lff.FormatError, match="frame table"):
        lff.video_frames(record | {"clip.frames": record["clip.frames"][::-1]}, "clip", [5])
    with pytest.raises(lff.FormatError, match="does not decode"):
        lff.video_frames(record | {"clip": record["clip"][:40]}, "clip", [5])


def test_what_is_no_video_is_refused_when_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes(b"no video")
    with pytest.raises(lff.InputError, match="not a readable video"):
        lff.video_sample("clip", tmp_path / "x.mp4")
