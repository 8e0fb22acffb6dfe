"""LeRobot data in, one .lfg of frames out. Needs the extra `video`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._container import WriteReport
from lf_format._errors import FormatError, InputError
from lf_format._fields import Field
from lf_format._lerobot import ACTION, STATE, Camera, Clip, Episode, RobotSet, read_robot_set
from lf_format._records import DOCUMENT_END, DOCUMENT_START
from lf_format._video import RGB, FrameTable, Pixels, frame_table, frames, need
from lf_format._writer import Writer

Array = npt.NDArray[Any]
BLOCK_BYTES = 1 << 20  # blocks are raw, so a record is read alone; larger ones cost less a frame to write
BATCH_FRAMES = 256
INDICES = ("episode_index", "frame_index", "task_index")
Progress = Callable[[int, int], None]
Batch = tuple[dict[str, Any], Array]


@dataclass(frozen=True)
class RobotReport:
    """What `preprocess_robot` did.

    Attributes:
        version: of the data set.
        episodes, frames: written; one record a frame.
        cameras: field names of the cameras written.
        skipped_cameras: (feature, reason).
        dropped_episodes: (episode_index, reason).
        notes: anything else that is not in the output as it was in the input.
        output: the file.
    """

    version: str
    episodes: int
    frames: int
    cameras: tuple[str, ...]
    skipped_cameras: tuple[tuple[str, str], ...]
    dropped_episodes: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    output: WriteReport


def preprocess_robot(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = (224, 224),
    action_horizon: int = 16,
    relative_actions: Sequence[str] = (),
    num_workers: int = 1,
    progress: Progress | None = None,
) -> RobotReport:
    """Writes `output`/train.lfg with one record per frame of a LeRobot v2.0, v2.1 or v3.0 data set.

    Fields of a record: one uint8 image per camera and its `pts.CAMERA`, `state`, `action` (the next
    `action_horizon` actions, the last one repeated past the end), `action_mask` (which are real),
    `episode_index`, `frame_index`, `task_index`, `task`. Flags mark the first and last frame of an episode.
    Frames are found by counting and checked by their time stamps; every video is decoded once.

    Args:
        image_size: (height, width), bilinear and antialiased (`Scaler` in _video.py); None = as stored.
        relative_actions: names of modality.json whose actions become differences from the state of the
            record's frame; ("all",) for every one, also without modality.json.
        num_workers: threads for decoding and resizing; the bytes written do not depend on it.
        progress: called with (episodes, frames) written so far.

    Raises:
        FormatError: options or version. InputError: nothing to write, or damage found after an episode began.
    """
    if action_horizon < 1 or num_workers < 1:
        raise FormatError(
            "action_horizon and num_workers", expected=">= 1", found=(action_horizon, num_workers)
        )
    robot = read_robot_set(Path(source))
    if ACTION not in robot.features:
        raise InputError("the data set has no actions", document=source, expected=ACTION)
    job = _Job(robot, image_size, action_horizon, tuple(relative_actions), num_workers)
    Path(output).mkdir(parents=True, exist_ok=True)
    return job.run(Path(output) / "train.lfg", progress)


def frame_pairs(flags: Array, ids: Array) -> npt.NDArray[np.int64]:
    """Record ids of the frame before and of each frame, int64[n, 2]; the first of an episode pairs with itself.

    Args:
        flags: of the file or data set, uint8[records].
        ids: records, integers [n].
    """
    rows = np.asarray(ids, np.int64)
    return np.stack([rows - ((flags[rows] & DOCUMENT_START) == 0), rows], 1)


class _Job:
    """One conversion: checks every episode first, then writes those that passed, in order."""

    def __init__(
        self,
        robot: RobotSet,
        size: tuple[int, int] | None,
        horizon: int,
        relative: tuple[str, ...],
        workers: int,
    ) -> None:
        self.robot, self.size, self.horizon, self.workers = robot, size, horizon, workers
        self.relative = relative
        self.slices = _relative_slices(robot, relative)
        self.dropped: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.bases: dict[str, Fraction] = {}
        self._tables: dict[Path, FrameTable] = {}
        self._parquet: tuple[Path, Any] = (Path(), None)
        self._ends: dict[Path, int] = {}

    def run(self, path: Path, progress: Progress | None) -> RobotReport:
        good = [e for e in self.robot.episodes if self._passes(e)]
        if not good:
            raise InputError("no episode can be written", document=path, found=self.dropped[:3])
        for video, end in self._ends.items():
            surplus = len(self._tables[video]) - end
            if surplus > 0:
                self.notes.append(f"{video.name}: {surplus} frames after the last episode are not used")
        readers = {c.key: _ClipReader(self.size, self.workers) for c in self.robot.cameras}
        written = 0
        fields, meta = self._fields(good[0]), self._meta()
        with Writer(path, fields=fields, meta=meta, block_bytes=BLOCK_BYTES) as writer:
            for k, episode in enumerate(good):
                for batch, flags in self._batches(episode, readers):
                    writer.append_batch(batch, flags)
                written += episode.length
                if progress is not None:
                    progress(k + 1, written)
        cameras = tuple(c.name for c in self.robot.cameras)
        counts = (self.robot.version, len(good), written, cameras, self.robot.skipped)
        return RobotReport(*counts, tuple(self.dropped), tuple(self.notes), writer.close())

    def _passes(self, episode: Episode) -> bool:
        try:
            columns = self._columns(episode)
            for camera in self.robot.cameras:
                self._check_clip(camera, episode)
            if any(int(t) not in self.robot.tasks for t in np.unique(columns["task_index"])):
                raise InputError("a task_index without a text in meta/tasks")
        except InputError as error:
            self.dropped.append((episode.index, str(error)))
            return False
        return True

    def _check_clip(self, camera: Camera, episode: Episode) -> None:
        clip = episode.clips.get(camera.key)
        if clip is None or not clip.path.is_file():
            raise InputError(f"no file of camera {camera.key}")
        table = self._table(clip.path)
        end = clip.start + episode.length
        if end > len(table):
            raise InputError(
                "the video ends before the episode", document=clip.path.name,
                expected=f"{end} frames", found=len(table),
            )  # fmt: skip
        base = self.bases.setdefault(camera.name, table.time_base)
        if base != table.time_base:
            raise InputError("time base differs from the first file's", expected=base, found=table.time_base)
        if clip.seconds is not None:
            found = float((int(table.pts[clip.start]) - int(table.pts[0])) * table.time_base)
            if abs(found - clip.seconds) > 0.5 / self.robot.fps:
                raise InputError(
                    f"frame {clip.start} of {clip.path.name} is not where the episode begins",
                    expected=f"{clip.seconds:.3f} s", found=f"{found:.3f} s",
                )  # fmt: skip
        self._ends[clip.path] = max(end, self._ends.get(clip.path, 0))

    def _table(self, path: Path) -> FrameTable:
        if path not in self._tables:
            self._tables[path] = frame_table(path)
        return self._tables[path]

    def _columns(self, episode: Episode) -> dict[str, Array]:
        """state, action and task_index of an episode, checked, [length, ...]."""
        if not episode.table.is_file():
            raise InputError(f"no file {episode.table.name}")
        if self._parquet[0] != episode.table:
            try:
                self._parquet = episode.table, _read_columns(episode.table)
            except (OSError, ValueError) as error:
                raise InputError(f"{episode.table.name} cannot be read: {error}") from None
        table = self._parquet[1]
        mine = np.flatnonzero(_numbers(table, "episode_index", 1)[:, 0] == episode.index)
        if len(mine) != episode.length:
            raise InputError("rows of the episode", expected=episode.length, found=len(mine))
        out = {"task_index": _numbers(table, "task_index", 1)[mine, 0]}
        for key in (STATE, ACTION):
            if key in self.robot.features:
                width = int(np.prod(self.robot.features[key]["shape"]))
                out[key] = values = _numbers(table, key, width)[mine].astype(np.float64)
                with np.errstate(over="ignore"):
                    if not np.isfinite(values.astype(np.float32)).all():
                        raise InputError(f"{key} has values that are not finite in float32")
        if "frame_index" in table.column_names:
            order = _numbers(table, "frame_index", 1)[mine, 0]
            if (order != np.arange(episode.length)).any():
                raise InputError("frame_index does not count 0, 1, 2, ...")
        return out

    def _fields(self, first: Episode) -> list[Field]:
        columns = self._columns(first)
        fields = []
        for camera in self.robot.cameras:
            fields += [
                Field.image(camera.name, (*(self.size or camera.size), 3)),
                Field.tensor(f"pts.{camera.name}", "int64", (), "time"),
            ]
        if STATE in columns:
            fields.append(Field.tensor("state", "float32", (columns[STATE].shape[1],), "state"))
        shape = (self.horizon, columns[ACTION].shape[1])
        fields.append(Field.tensor("action", "float32", shape, "action"))
        fields.append(Field.bits("action_mask", (self.horizon,), "action_mask"))
        for name in INDICES:
            fields.append(Field.tensor(name, "int32", (), "index"))
        return [*fields, Field.bytes("task", "text")]

    def _meta(self) -> dict[str, Any]:
        robot = self.robot
        cameras = {
            c.name: {"key": c.key, "time_base": list(self.bases[c.name].as_integer_ratio())}
            for c in robot.cameras
        }
        return {
            "source": f"lerobot {robot.version}", "robot_type": robot.robot_type, "fps": robot.fps,
            "cameras": cameras, "skipped_cameras": dict(robot.skipped),
            "rgb": RGB,
            "resize": "none" if self.size is None else "bilinear", "modality": dict(robot.modality),
            "stats": dict(robot.stats), "action_horizon": self.horizon,
            "relative_actions": list(self.relative),
        }  # fmt: skip

    def _batches(self, episode: Episode, readers: Mapping[str, _ClipReader]) -> Iterator[Batch]:
        """The frames of an episode, many at a time; pixels are decoded when they are drawn."""
        columns = self._columns(episode)
        clips = {c.name: episode.clips[c.key] for c in self.robot.cameras}
        tables = {name: self._table(clip.path) for name, clip in clips.items()}
        pixels = {c.name: readers[c.key].clip(clips[c.name], tables[c.name]) for c in self.robot.cameras}
        last = episode.length - 1
        for start in range(0, episode.length, BATCH_FRAMES):
            t = np.arange(start, min(start + BATCH_FRAMES, episode.length))
            ahead = t[:, None] + np.arange(self.horizon)
            batch: dict[str, Any] = {
                "action": self._actions(columns, t, np.minimum(ahead, last)),
                "action_mask": ahead <= last,
                "episode_index": np.full(len(t), episode.index, np.int32),
                "frame_index": t.astype(np.int32),
                "task_index": columns["task_index"][t].astype(np.int32),
            }
            batch["task"] = [self.robot.tasks[k].encode() for k in batch["task_index"].tolist()]
            if STATE in columns:
                batch["state"] = columns[STATE][t].astype(np.float32)
            for name, clip in clips.items():
                batch[name] = islice(pixels[name], len(t))
                batch[f"pts.{name}"] = tables[name].pts[clip.start + t]
            yield batch, DOCUMENT_START * (t == 0) + DOCUMENT_END * (t == last)

    def _actions(self, columns: Mapping[str, Array], t: Array, ahead: Array) -> Array:
        """Actions at `ahead` [n, horizon] for the frames `t` [n]: [n, horizon, width]."""
        action = columns[ACTION][ahead]
        for of_action, of_state in self.slices:
            action[:, :, of_action] -= columns[STATE][t, None, of_state]
        # A difference may be too large for float32, which the writer refuses; the columns are checked already.
        return action if self.slices else action.astype(np.float32)


class _ClipReader:
    """Frames of one camera: a file stays open while successive clips lie in it, and is decoded once."""

    def __init__(self, size: tuple[int, int] | None, workers: int) -> None:
        self._size, self._workers = size, workers
        self._path: Path | None = None
        self._frames: Iterator[tuple[int, Pixels]] = iter(())
        self._at = 0

    def clip(self, clip: Clip, table: FrameTable) -> Iterator[Pixels]:
        """Frames from the clip's start on; InputError when the decoder and the frame table disagree."""
        if self._path != clip.path or clip.start < self._at:
            self._path, self._at = clip.path, 0
            self._frames = frames(clip.path, self._size, self._workers)
        for expected in table.pts[self._at :].tolist():
            pts, pixels = next(self._frames, (None, None))
            if pts != expected or pixels is None:
                raise InputError(
                    f"decoding frame {self._at} of {clip.path.name}", document=clip.path,
                    expected=f"time stamp {expected}", found=pts,
                )  # fmt: skip
            self._at += 1
            if self._at > clip.start:
                yield pixels


def _read_columns(path: Path) -> Any:
    """The columns that a record needs; images inside parquet are not among them."""
    with need("pyarrow.parquet").ParquetFile(path) as file:
        return file.read(
            [name for name in file.schema_arrow.names if name in (STATE, ACTION, *INDICES)], use_threads=False
        )


def _numbers(table: Any, key: str, width: int) -> Array:
    """Column `key` of a parquet table as [rows, width]."""
    if key not in table.column_names:
        raise InputError(f"no column {key}")
    column = table.column(key)
    try:
        while hasattr(column.type, "value_type"):  # lists, also nested ones
            column = column.combine_chunks().flatten()
        values: Array = column.to_numpy()
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{values.dtype} values")
        return values.reshape(table.num_rows, width)
    except ValueError as error:
        raise InputError(f"column {key} is not numbers of width {width}: {error}") from None


def _relative_slices(robot: RobotSet, names: tuple[str, ...]) -> list[tuple[slice, slice]]:
    """(columns of the action, columns of the state that they are relative to)."""
    if not names:
        return []
    if STATE not in robot.features:
        raise FormatError("relative actions need a state", expected=STATE)
    parts = {m: robot.modality.get(m, {}) for m in ("state", "action")}
    if names == ("all",):
        names = tuple(parts["action"])
        if not names:
            shapes = [robot.features[key]["shape"] for key in (ACTION, STATE)]
            if shapes[0] != shapes[1]:
                raise FormatError("actions relative to states", expected=shapes[1], found=shapes[0])
            return [(slice(None), slice(None))]
    out = []
    for name in names:
        if name not in parts["action"] or name not in parts["state"]:
            both = sorted(set(parts["action"]) & set(parts["state"]))
            raise FormatError("relative action", expected=both, found=name)
        pair = [slice(int(parts[m][name]["start"]), int(parts[m][name]["end"])) for m in ("action", "state")]
        if pair[0].stop - pair[0].start != pair[1].stop - pair[1].start:
            raise FormatError(f"width of {name}", expected=str(pair[1]), found=str(pair[0]))
        for m in ("action", "state"):
            key = {"action": ACTION, "state": STATE}[m]
            if parts[m][name].get("original_key", key) != key:
                raise FormatError(f"{m} {name} is not part of {key}", found=parts[m][name]["original_key"])
        out.append((pair[0], pair[1]))
    return out
