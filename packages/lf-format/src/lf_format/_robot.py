"""LeRobot data in, one .lfg of frames out. Needs the extra `video`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._atomic import sync_directory
from lf_format._container import WriteReport
from lf_format._errors import FormatError, InputError
from lf_format._fields import Field
from lf_format._lerobot import ACTION, STATE, Camera, Clip, Episode, RobotSet, read_robot_set
from lf_format._records import DOCUMENT_END, DOCUMENT_START
from lf_format._robot_columns import INDICES, Columns, relative_slices
from lf_format._schema import TokenizerInfo
from lf_format._split import choose_eval, document_key
from lf_format._tokenizers import Tokenizer, load_tokenizer
from lf_format._video import RGB, FrameTable, Pixels, frame_table, frames
from lf_format._writer import Writer

Array = npt.NDArray[Any]
BLOCK_BYTES = 1 << 20  # blocks are raw, so a record is read alone; larger ones cost less a frame to write
BATCH_FRAMES = 256
SPLITS = ("train", "eval")
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
        output: train.lfg.
        eval: eval.lfg, None when nothing was held out.
        eval_episodes: episode_index of the episodes in it.
        tokenizer: of the field `tokens`, None without.
    """

    version: str
    episodes: int
    frames: int
    cameras: tuple[str, ...]
    skipped_cameras: tuple[tuple[str, str], ...]
    dropped_episodes: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]
    output: WriteReport
    eval: WriteReport | None
    eval_episodes: tuple[int, ...]
    tokenizer: TokenizerInfo | None


@dataclass(frozen=True)
class _Options:
    """Arguments of preprocess_robot; checked when made."""

    size: tuple[int, int] | None
    horizon: int
    relative: tuple[str, ...]
    tokenizer: Tokenizer | None
    eval_episodes: frozenset[int]
    eval_fraction: float
    seed: int
    workers: int

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.workers < 1:
            found = (self.horizon, self.workers)
            raise FormatError("action_horizon and num_workers", expected=">= 1", found=found)
        if not 0 <= self.eval_fraction < 1:
            raise FormatError("eval_fraction", expected="0 <= fraction < 1", found=self.eval_fraction)
        if self.eval_fraction and self.eval_episodes:
            raise FormatError("eval_fraction excludes eval_episodes", found=sorted(self.eval_episodes))


def preprocess_robot(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = (224, 224),
    action_horizon: int = 16,
    relative_actions: Sequence[str] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    eval_episodes: Sequence[int] = (),
    eval_fraction: float = 0.0,
    seed: int = 0,
    num_workers: int = 1,
    progress: Progress | None = None,
) -> RobotReport:
    """Writes `output`/train.lfg with one record per frame of a LeRobot v2.0, v2.1 or v3.0 data set.

    With `eval_episodes` or `eval_fraction` also `output`/eval.lfg; an earlier one goes otherwise.

    Fields of a record: one uint8 image per camera and its `pts.CAMERA`, `state`, `action` (the next
    `action_horizon` actions, the last one repeated past the end), `action_mask` (which are real),
    `episode_index`, `frame_index`, `task_index`, `task`. Flags mark the first and last frame of an episode.
    Frames are found by counting and checked by their time stamps; every video is decoded once.

    Args:
        image_size: (height, width), bilinear and antialiased (`Scaler` in _video.py); None = as stored.
        relative_actions: names of modality.json whose actions become differences from the state of the
            record's frame; ("all",) for every one, also without modality.json.
        tokenizer: "bytes" or the path of a tokenizer.json: records get the field `tokens`, ids of the task's text.
        eval_episodes: episode_index of the episodes to hold out, whole.
        eval_fraction: or at least this share of the frames: episodes chosen by a hash of (seed, episode_index).
        num_workers: threads for decoding and resizing; the bytes written do not depend on it.
        progress: called with (episodes, frames) written so far.

    Raises:
        FormatError: options or version. InputError: nothing to write, or damage found after an episode began.
    """
    coder = None if tokenizer is None else load_tokenizer(tokenizer)
    held = (frozenset(eval_episodes), eval_fraction, seed)
    options = _Options(image_size, action_horizon, tuple(relative_actions), coder, *held, num_workers)
    robot = read_robot_set(Path(source))
    if ACTION not in robot.features:
        raise InputError("the data set has no actions", document=source, expected=ACTION)
    job = _Job(robot, options)
    Path(output).mkdir(parents=True, exist_ok=True)
    return job.run(Path(output), progress)


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

    def __init__(self, robot: RobotSet, options: _Options) -> None:
        self.robot, self.options = robot, options
        self.slices = relative_slices(robot, options.relative)
        self.columns = Columns(robot.features)
        self.dropped: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.bases: dict[str, Fraction] = {}
        self.task_ids = {} if options.tokenizer is None else _task_ids(robot.tasks, options.tokenizer)
        self._tables: dict[Path, FrameTable] = {}
        self._ends: dict[Path, int] = {}
        self._rated: set[str] = set()

    def run(self, folder: Path, progress: Progress | None) -> RobotReport:
        good = [e for e in self.robot.episodes if self._passes(e)]
        if not good:
            raise InputError("no episode can be written", document=folder, found=self.dropped[:3])
        held = self._held_out(good)
        for video, end in self._ends.items():
            surplus = len(self._tables[video]) - end
            if surplus > 0:
                self.notes.append(f"{video.name}: {surplus} frames after the last episode are not used")
        readers = {c.key: _ClipReader(self.options.size, self.options.workers) for c in self.robot.cameras}
        written = 0
        with ExitStack() as stack:
            writers = {
                split: self._writer(stack, folder / f"{split}.lfg", good[0])
                for split in SPLITS[: 1 + bool(held)]
            }
            for k, episode in enumerate(good):
                writer = writers["eval" if episode.index in held else "train"]
                for batch, flags in self._batches(episode, readers):
                    writer.append_batch(batch, flags)
                written += episode.length
                if progress is not None:
                    progress(k + 1, written)
            outputs = _publish(writers, folder)
        cameras = tuple(c.name for c in self.robot.cameras)
        counts = (self.robot.version, len(good), written, cameras, self.robot.skipped)
        coder = self.options.tokenizer
        files = (outputs["train"], outputs.get("eval"), tuple(sorted(held)))
        info = None if coder is None else coder.info
        return RobotReport(*counts, tuple(self.dropped), tuple(self.notes), *files, info)

    def _held_out(self, good: Sequence[Episode]) -> frozenset[int]:
        """episode_index of the held-out episodes; never all."""
        options = self.options
        held = options.eval_episodes
        indices = {e.index for e in good}
        if options.eval_fraction:
            keys = [document_key(options.seed, str(e.index).encode()) for e in good]
            chosen = choose_eval(keys, np.array([e.length for e in good]), options.eval_fraction)
            held = frozenset(e.index for e, out in zip(good, chosen, strict=True) if out)
        if held - indices:
            raise InputError("eval_episodes that cannot be written", found=sorted(held - indices))
        if held == indices or (options.eval_fraction and not held):
            raise InputError("episodes to divide", expected=">= 2, not all held out", found=len(good))
        return held

    def _writer(self, stack: ExitStack, path: Path, first: Episode) -> Writer:
        """A writer whose temporary file goes when the stack is left, unless it was published."""
        options: dict[str, Any] = {"meta": self._meta(), "block_bytes": BLOCK_BYTES}
        if self.options.tokenizer is not None:
            options |= {
                "vocab_size": self.options.tokenizer.vocab_size,
                "tokenizer": self.options.tokenizer.info,
            }
            # One bucket: frames of an episode stay neighbours, whatever their tasks.
            options["buckets"] = (max(map(len, self.task_ids.values())),)
        writer = Writer(path, fields=self._fields(first), **options)
        stack.callback(writer.abort)
        return writer

    def _passes(self, episode: Episode) -> bool:
        try:
            columns = self.columns.read(episode)
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
        self._note_rate(camera, clip, table.pts[clip.start : end] * float(base))

    def _note_rate(self, camera: Camera, clip: Clip, seconds: Array) -> None:
        """Frames are found by counting, so another rate than meta/ says loses none; once a camera, it is reported."""
        expected = np.arange(len(seconds)) / self.robot.fps
        late = np.abs(seconds - seconds[0] - expected) > 0.5 / self.robot.fps
        if late.any() and camera.key not in self._rated:
            self._rated.add(camera.key)
            text = f"frame {clip.start + int(late.argmax())} of {clip.path.name}, camera {camera.name}"
            self.notes.append(
                f"{text}, is not where {self.robot.fps:g} frames a second (meta/info.json) put it"
            )

    def _table(self, path: Path) -> FrameTable:
        if path not in self._tables:
            self._tables[path] = frame_table(path)
        return self._tables[path]

    def _fields(self, first: Episode) -> list[Field]:
        columns = self.columns.read(first)
        fields = []
        for camera in self.robot.cameras:
            fields += [
                Field.image(camera.name, (*(self.options.size or camera.size), 3)),
                Field.tensor(f"pts.{camera.name}", "int64", (), "time"),
            ]
        if STATE in columns:
            fields.append(Field.tensor("state", "float32", (columns[STATE].shape[1],), "state"))
        shape = (self.options.horizon, columns[ACTION].shape[1])
        fields.append(Field.tensor("action", "float32", shape, "action"))
        fields.append(Field.bits("action_mask", (self.options.horizon,), "action_mask"))
        for name in INDICES:
            fields.append(Field.tensor(name, "int32", (), "index"))
        fields.append(Field.bytes("task", "text"))
        return fields if self.options.tokenizer is None else [*fields, Field.tokens("tokens")]

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
            "resize": "none" if self.options.size is None else "bilinear", "modality": dict(robot.modality),
            "stats": dict(robot.stats), "action_horizon": self.options.horizon,
            "relative_actions": list(self.options.relative),
        }  # fmt: skip

    def _batches(self, episode: Episode, readers: Mapping[str, _ClipReader]) -> Iterator[Batch]:
        """The frames of an episode, many at a time; pixels are decoded when they are drawn."""
        columns = self.columns.read(episode)
        clips = {c.name: episode.clips[c.key] for c in self.robot.cameras}
        tables = {name: self._table(clip.path) for name, clip in clips.items()}
        pixels = {c.name: readers[c.key].clip(clips[c.name], tables[c.name]) for c in self.robot.cameras}
        last = episode.length - 1
        for start in range(0, episode.length, BATCH_FRAMES):
            t = np.arange(start, min(start + BATCH_FRAMES, episode.length))
            ahead = t[:, None] + np.arange(self.options.horizon)
            batch: dict[str, Any] = {
                "action": self._actions(columns, t, np.minimum(ahead, last)),
                "action_mask": ahead <= last,
                "episode_index": np.full(len(t), episode.index, np.int32),
                "frame_index": t.astype(np.int32),
                "task_index": columns["task_index"][t].astype(np.int32),
            }
            batch["task"] = [self.robot.tasks[k].encode() for k in batch["task_index"].tolist()]
            if self.task_ids:
                batch["tokens"] = [self.task_ids[k] for k in batch["task_index"].tolist()]
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


def _task_ids(tasks: Mapping[int, str], coder: Tokenizer) -> dict[int, Array]:
    """Token ids of every task; InputError for a text without one."""
    out = {index: coder.encode(text) for index, text in tasks.items()}
    empty = [index for index, ids in out.items() if not len(ids)]
    if empty or not out:
        raise InputError("a task without a token", expected="a text in meta/tasks", found=empty)
    return out


def _publish(writers: dict[str, Writer], folder: Path) -> dict[str, WriteReport]:
    """All files complete and durable first; then old ones go, so that old and new never stand side by side."""
    for writer in writers.values():
        writer.seal()
    for split in SPLITS:
        (folder / f"{split}.lfg").unlink(missing_ok=True)
    sync_directory(folder)
    return {split: writers[split].close() for split in reversed(writers)}


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
