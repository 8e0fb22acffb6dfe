"""The description of a LeRobot data set (v2.0, v2.1, v3.0): which episode lies where. Needs the extra `video`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lf_format._errors import FormatError, InputError
from lf_format._video import need

VERSIONS = ("v2.0", "v2.1", "v3.0")
STATE, ACTION = "observation.state", "action"
Skipped = tuple[str, str]


@dataclass(frozen=True)
class Camera:
    """A video feature: its key in the data set, its field name, declared (height, width)."""

    key: str
    name: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Clip:
    """The frames of an episode in a video file.

    Attributes:
        path: the file.
        start: number of its first frame in that file.
        seconds: where the data set says that frame lies, to be compared with its time stamp; None in v2.
    """

    path: Path
    start: int
    seconds: float | None


@dataclass(frozen=True)
class Episode:
    """Number, frames, parquet file, and a clip per camera key."""

    index: int
    length: int
    table: Path
    clips: Mapping[str, Clip] = field(default_factory=dict)


@dataclass(frozen=True)
class RobotSet:
    """What meta/ says, and which cameras have files.

    Attributes:
        version: "v2.0", "v2.1" or "v3.0".
        cameras: those with files; `skipped` names the others with the reason.
        tasks: text by task_index.
        stats: of state and action where given, by feature.
        modality: content of modality.json, empty without.
    """

    version: str
    fps: float
    robot_type: str
    features: Mapping[str, Any]
    cameras: tuple[Camera, ...]
    skipped: tuple[Skipped, ...]
    episodes: tuple[Episode, ...]
    tasks: Mapping[int, str]
    stats: Mapping[str, Any]
    modality: Mapping[str, Any]


def is_robot_set(folder: Path) -> bool:
    """Whether `folder` looks like a LeRobot data set."""
    return (folder / "meta" / "info.json").is_file()


def read_robot_set(folder: Path) -> RobotSet:
    """Reads meta/ of a data set.

    Raises:
        FormatError: another version. InputError: meta/ is incomplete or contradicts itself.
    """
    try:
        return _read(folder)
    except FormatError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise InputError(f"meta/ is incomplete: {type(error).__name__}: {error}", document=folder) from None


def _read(folder: Path) -> RobotSet:
    info = _json(folder / "meta" / "info.json")
    version = str(info["codebase_version"])
    if version not in VERSIONS:
        raise FormatError("LeRobot version", path=folder, expected=" ".join(VERSIONS), found=version)
    modality = (
        _json(folder / "meta" / "modality.json") if (folder / "meta" / "modality.json").exists() else {}
    )
    declared = _cameras(info["features"], modality)
    layout = _episodes_v3 if version == "v3.0" else _episodes_v2
    episodes = sorted(layout(folder, info, declared), key=lambda e: e.index)
    _unique([e.index for e in episodes], "episode_index", folder)
    if not 0 < float(info["fps"]) < float("inf"):
        raise InputError("fps", document=folder, expected="> 0", found=info["fps"])
    cameras, skipped = (
        [],
        [
            (key, "image feature inside parquet: not read")
            for key, f in info["features"].items()
            if f["dtype"] == "image"
        ],
    )
    for camera in declared:
        if any(camera.key in e.clips and e.clips[camera.key].path.is_file() for e in episodes):
            cameras.append(camera)
        else:
            skipped.append((camera.key, "declared, but no episode has a file of it"))
    kept = {c.key for c in cameras}
    episodes = [replace(e, clips={k: c for k, c in e.clips.items() if k in kept}) for e in episodes]
    return RobotSet(
        version=version,
        fps=float(info["fps"]),
        robot_type=str(info.get("robot_type")),
        features=info["features"],
        cameras=tuple(cameras),
        skipped=tuple(skipped),
        episodes=tuple(episodes),
        tasks=_tasks(folder, version),
        stats=_stats(folder),
        modality=modality,
    )


def _unique(numbers: Sequence[int], what: str, folder: Path) -> None:
    if len(set(numbers)) < len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        raise InputError(f"{what} occurs twice in meta/", document=folder, found=twice)


def _json(path: Path) -> Any:
    """JSON without NaN and infinities, which become null."""
    return json.loads(path.read_text("utf-8"), parse_constant=lambda _: None)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=lambda _: None) for line in path.read_text("utf-8").splitlines()]


def _cameras(features: Mapping[str, Any], modality: Mapping[str, Any]) -> list[Camera]:
    names = {v.get("original_key", k): k for k, v in modality.get("video", {}).items()}
    out: list[Camera] = []
    for key, feature in features.items():
        if feature["dtype"] == "video":
            name = names.get(key, key.removeprefix("observation.images."))
            out.append(Camera(key, name, _height_width(feature)))
    return out


def _height_width(feature: Mapping[str, Any]) -> tuple[int, int]:
    shape, names = list(feature["shape"]), list(feature.get("names") or [])
    if "height" in names and "width" in names:
        return int(shape[names.index("height")]), int(shape[names.index("width")])
    if shape[0] == 3:
        shape = shape[1:]
    return int(shape[0]), int(shape[1])


def _whole(value: Any) -> int:
    """An integer of meta/, also where it was written as 3.0; ValueError for 3.5."""
    number = int(value)
    if number != float(value):
        raise ValueError(f"{value!r} where an integer belongs")
    return number


def _episodes_v2(folder: Path, info: Mapping[str, Any], cameras: list[Camera]) -> Iterator[Episode]:
    for row in _lines(folder / "meta" / "episodes.jsonl"):
        index = _whole(row["episode_index"])
        where = {"episode_chunk": index // _whole(info["chunks_size"]), "episode_index": index}
        clips = {}
        for camera in cameras:
            path = folder / info["video_path"].format(video_key=camera.key, **where)
            clips[camera.key] = Clip(path, 0, None)
        yield Episode(index, _whole(row["length"]), folder / info["data_path"].format(**where), clips)


def _episodes_v3(folder: Path, info: Mapping[str, Any], cameras: list[Camera]) -> Iterator[Episode]:
    pq = need("pyarrow.parquet")
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "meta" / "episodes").glob("*/*.parquet")):
        table = pq.read_table(path)
        wanted = [c for c in table.column_names if not c.startswith("stats/")]
        rows += table.select(wanted).to_pylist()
    rows.sort(key=lambda r: _whole(r["episode_index"]))
    starts = {camera.key: _starts(rows, camera.key) for camera in cameras}
    for k, row in enumerate(rows):
        chunk, number = _whole(row["data/chunk_index"]), _whole(row["data/file_index"])
        table_path = folder / info["data_path"].format(chunk_index=chunk, file_index=number)
        clips = {}
        for camera in cameras:
            prefix = f"videos/{camera.key}/"
            if row.get(f"{prefix}file_index") is None:
                continue
            at = {
                "chunk_index": _whole(row[f"{prefix}chunk_index"]),
                "file_index": _whole(row[f"{prefix}file_index"]),
            }
            path = folder / info["video_path"].format(video_key=camera.key, **at)
            clips[camera.key] = Clip(path, starts[camera.key][k], float(row[f"{prefix}from_timestamp"]))
        yield Episode(_whole(row["episode_index"]), _whole(row["length"]), table_path, clips)


def _starts(rows: list[dict[str, Any]], key: str) -> dict[int, int]:
    """Frame number at which each row's clip starts in its file: frames of the clips before it, never a time."""
    prefix = f"videos/{key}/"
    have = [k for k, row in enumerate(rows) if row.get(f"{prefix}file_index") is not None]
    have.sort(key=lambda k: float(rows[k][f"{prefix}from_timestamp"]))
    before: dict[tuple[int, int], int] = {}
    out = {}
    for k in have:
        file = int(rows[k][f"{prefix}chunk_index"]), int(rows[k][f"{prefix}file_index"])
        out[k] = before.get(file, 0)
        before[file] = out[k] + int(rows[k]["length"])
    return out


def _tasks(folder: Path, version: str) -> dict[int, str]:
    rows, text = [], "task"
    if version == "v3.0":
        table = need("pyarrow.parquet").read_table(folder / "meta" / "tasks.parquet")
        # pandas wrote the text as the index of the frame, unnamed or named "task".
        text = "task" if "task" in table.column_names else "__index_level_0__"
        rows = table.to_pylist()
    else:
        rows = _lines(folder / "meta" / "tasks.jsonl")
    _unique([int(r["task_index"]) for r in rows], "task_index", folder)
    tasks = {int(r["task_index"]): str(r[text]) for r in rows}
    "".join(tasks.values()).encode()  # they are stored as UTF-8
    return tasks


def _stats(folder: Path) -> dict[str, Any]:
    """Statistics of state and action: as stored, or joined from those of the episodes (v2.1)."""
    whole, parts = folder / "meta" / "stats.json", folder / "meta" / "episodes_stats.jsonl"
    if whole.exists():
        return {k: v for k, v in _json(whole).items() if k in (STATE, ACTION)}
    if not parts.exists():
        return {}
    episodes = [row["stats"] for row in _lines(parts)]
    return {k: _joined([e[k] for e in episodes]) for k in (STATE, ACTION) if episodes and k in episodes[0]}


def _joined(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    count = np.array([np.ravel(p["count"])[0] for p in parts], float)[:, None]
    mean, std, low, high = (np.array([p[k] for p in parts], float) for k in ("mean", "std", "min", "max"))
    total = float(count.sum())
    average = (count * mean).sum(0) / total
    variance = (count * (std**2 + (mean - average) ** 2)).sum(0) / total
    out = {"mean": average, "std": np.sqrt(variance), "min": low.min(0), "max": high.max(0)}
    return {k: v.tolist() for k, v in out.items()} | {"count": [int(total)]}
