"""LeRobot data in, one .lfg of frames out. Needs the extra `video`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lf_format._atomic import check_output
from lf_format._container import WriteReport
from lf_format._documents import stamps_digest
from lf_format._errors import InputError
from lf_format._fields import Field
from lf_format._journal import Journal
from lf_format._lerobot import ACTION, STATE, Camera, Clip, Episode, RobotSet, read_robot_set
from lf_format._options import CodecName, CodecOptions
from lf_format._publish import SPLITS, publish
from lf_format._records import DOCUMENT_END, DOCUMENT_START
from lf_format._robot_columns import INDICES, Columns, relative_slices, task_ids
from lf_format._robot_frames import ClipReader
from lf_format._robot_options import RobotOptions, RobotReport
from lf_format._sample_spool import SampleSpool
from lf_format._split import choose_eval, document_key
from lf_format._tokenizers import load_tokenizer
from lf_format._video import RGB, FrameTable, frame_table, need
from lf_format._writer import Writer

Array = npt.NDArray[Any]
BLOCK_BYTES = 1 << 20  # blocks are raw, so a record is read alone; larger ones cost less a frame to write
BATCH_FRAMES = 256
Progress = Callable[[int, int], None]
Batch = tuple[dict[str, Any], Array]
# Writing everything twice costs about a fifth of the speed; below this a run takes some ten seconds.
WORTH_PARTS = 1 << 30


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
    codec: CodecName | CodecOptions = "raw",
    resume: bool | None = None,
    progress: Progress | None = None,
) -> RobotReport:
    """Writes `output`/train.lfg with one record per frame of a LeRobot v2.0, v2.1 or v3.0 data set.

    With `eval_episodes` or `eval_fraction` also `output`/eval.lfg; an earlier one goes otherwise.

    Fields of a record: one uint8 image per camera and its `pts.CAMERA`, `state`, `action` (the next
    `action_horizon` actions, the last one repeated past the end), `action_mask` (which are real),
    `episode_index`, `frame_index`, `task_index`, `task`. Flags mark the first and last frame of an episode.
    Frames are found by counting and checked by their time stamps; every video is decoded once. An interrupted run
    with parts goes on behind its last complete one when it is called again.

    Args:
        image_size: (height, width), bilinear and antialiased (`Scaler` in _video.py); None = as stored.
        relative_actions: names of modality.json whose actions become differences from the state of the
            record's frame; ("all",) for every one, also without modality.json.
        tokenizer: "bytes" or the path of a tokenizer.json: records get the field `tokens`, ids of the task's text.
        eval_episodes: episode_index of the episodes to hold out, whole.
        eval_fraction: or at least this share of the frames: episodes chosen by a hash of (seed, episode_index).
        num_workers: threads for decoding and resizing; the bytes written do not depend on it.
        codec: how blocks are stored: "raw", "zstd" or "auto".
        resume: True writes complete parts beside the output first, from which an interrupted run goes on; False writes
            straight into the files: the same bytes, faster, and nothing to go on from. None = True for samples of
            1 GiB or more, as they are decoded.
        progress: called with (episodes, frames) decoded so far.

    Raises:
        FormatError: options or version; another run writes into `output`. InputError: nothing to write, or damage
            found after an episode began.
    """
    coder = None if tokenizer is None else load_tokenizer(tokenizer)
    held = (frozenset(eval_episodes), eval_fraction, seed)
    options = RobotOptions(
        image_size,
        action_horizon,
        tuple(relative_actions),
        coder,
        *held,
        num_workers,
        CodecOptions.of(codec),
        resume,
    )
    robot = read_robot_set(Path(source))
    if ACTION not in robot.features:
        raise InputError("the data set has no actions", document=source, expected=ACTION)
    job = _Job(robot, options)
    Path(output).mkdir(parents=True, exist_ok=True)
    return job.run(Path(source), Path(output), progress)


class _Work(NamedTuple):
    """What one run writes: the episodes that passed, and those of them to hold out."""

    source: Path
    folder: Path
    good: Sequence[Episode]
    held: frozenset[int]
    progress: Progress | None


class _Job:
    """One conversion: checks every episode, decodes those that passed into a spool, in order, and writes from there."""

    def __init__(self, robot: RobotSet, options: RobotOptions) -> None:
        self.robot, self.options = robot, options
        self.slices = relative_slices(robot, options.relative)
        self.columns = Columns(robot.features)
        self.dropped: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.bases: dict[str, Fraction] = {}
        self.task_ids = {} if options.tokenizer is None else task_ids(robot.tasks, options.tokenizer)
        self._tables: dict[Path, FrameTable] = {}
        self._ends: dict[Path, int] = {}
        self._rated: set[str] = set()

    def run(self, source: Path, folder: Path, progress: Progress | None) -> RobotReport:
        good = [e for e in self.robot.episodes if self._passes(e)]
        if not good:
            raise InputError("no episode can be written", document=folder, found=self.dropped[:3])
        held = self._held_out(good)
        for split in SPLITS[: 1 + bool(held)]:
            check_output(folder / f"{split}.lfg")
        self._note_surplus()
        write = self._resumable if self._in_parts(good) else self._straight
        outputs = write(_Work(source, folder, good, held, progress))
        frames = sum(report.records for report in outputs.values())
        cameras = tuple(c.name for c in self.robot.cameras)
        counts = (self.robot.version, len(good), frames, cameras, self.robot.skipped)
        coder = self.options.tokenizer
        files = (outputs["train"], outputs.get("eval"), tuple(sorted(held)))
        info = None if coder is None else coder.info
        return RobotReport(*counts, tuple(self.dropped), tuple(self.notes), *files, info)

    def _in_parts(self, good: Sequence[Episode]) -> bool:
        if self.options.resume is not None:
            return self.options.resume
        sample = sum(field.nbytes_of(1) for field in self._fields(good[0]))
        return sample * sum(episode.length for episode in good) >= WORTH_PARTS

    def _note_surplus(self) -> None:
        for video, end in self._ends.items():
            surplus = len(self._tables[video]) - end
            if surplus > 0:
                self.notes.append(f"{video.name}: {surplus} frames after the last episode are not used")

    def _key(self, source: Path) -> dict[str, Any]:
        """What decides which records the input becomes. An interrupted run with the same goes on."""
        options, episodes = self.options, self.robot.episodes
        files = {e.table for e in episodes} | {c.path for e in episodes for c in e.clips.values()}
        coder = options.tokenizer
        return {
            "kind": "robot data",
            "inputs": stamps_digest([source / "meta", *sorted(files)]),
            "image size": None if options.size is None else list(options.size),
            "action horizon": options.horizon,
            "relative actions": list(options.relative),
            "cameras": [c.key for c in self.robot.cameras],
            "tokenizer": None if coder is None else [coder.info.name, coder.info.hash],
            "PyAV": need("av").__version__,
        }

    def _resumable(self, work: _Work) -> dict[str, WriteReport]:
        """Everything into a spool, behind what an interrupted run left there, and from there into the files."""
        fields = self._fields(work.good[0])
        with Journal(
            work.folder, self._key(work.source), partial(self._spool, fields), "episodes"
        ) as journal:
            self.notes += journal.notes
            for _ in self._decode(work, journal.consumed, lambda _: journal.spool.writer):
                journal.count()
            journal.commit()
            at = [field.name for field in fields].index("episode_index")
            with ExitStack() as stack:
                writers = self._writers(stack, work.folder, fields, work.held)
                for sample in journal.spool.samples():
                    split = "eval" if int.from_bytes(sample.parts[at], "little") in work.held else "train"
                    writers[split].append_stored(sample.parts, sample.length, sample.flags, sample.counts)
                return publish(writers, work.folder, ".lfg")

    def _straight(self, work: _Work) -> dict[str, WriteReport]:
        """Everything into the files."""
        with ExitStack() as stack:
            writers = self._writers(stack, work.folder, self._fields(work.good[0]), work.held)
            for _ in self._decode(work, 0, lambda e: writers["eval" if e.index in work.held else "train"]):
                pass
            return publish(writers, work.folder, ".lfg")

    def _decode(self, work: _Work, done: int, to: Callable[[Episode], Writer]) -> Iterator[Episode]:
        """Writes the episodes behind the first `done`, and yields each when it is complete."""
        readers = {c.key: ClipReader(self.options.size, self.options.workers) for c in self.robot.cameras}
        frames = sum(e.length for e in work.good[:done])
        for k, episode in enumerate(work.good[done:], done + 1):
            self._append(to(episode), episode, readers)
            frames += episode.length
            if work.progress is not None:
                work.progress(k, frames)
            yield episode

    def _append(self, writer: Writer, episode: Episode, readers: Mapping[str, ClipReader]) -> None:
        try:
            for batch, flags in self._batches(episode, readers):
                writer.append_batch(batch, flags)
        except InputError as error:
            if not isinstance(error.document, int):
                raise
            name = f"episode {episode.index}"  # the writer counts from the beginning of its file
            raise InputError(
                error.what, document=name, position=error.position, expected=error.expected,
                found=error.found,
            ) from None  # fmt: skip

    def _writers(
        self, stack: ExitStack, folder: Path, fields: Sequence[Field], held: frozenset[int]
    ) -> dict[str, Writer]:
        splits = SPLITS[: 1 + bool(held)]
        return {split: self._writer(stack, folder / f"{split}.lfg", fields) for split in splits}

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

    def _token_options(self) -> dict[str, Any]:
        """Of a Writer: one bucket, so that frames of an episode stay neighbours, whatever their tasks."""
        coder = self.options.tokenizer
        if coder is None:
            return {}
        longest = max(map(len, self.task_ids.values()))
        return {"vocab_size": coder.vocab_size, "tokenizer": coder.info, "buckets": (longest,)}

    def _spool(self, fields: Sequence[Field], folder: Path) -> SampleSpool:
        return SampleSpool(folder, fields, **self._token_options())

    def _writer(self, stack: ExitStack, path: Path, fields: Sequence[Field]) -> Writer:
        """A writer whose temporary file goes when the stack is left, unless it was published."""
        options: dict[str, Any] = {
            "meta": self._meta(),
            "block_bytes": BLOCK_BYTES,
            "codec": self.options.codec,
        }
        writer = Writer(path, fields=fields, **options, **self._token_options())
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

    def _batches(self, episode: Episode, readers: Mapping[str, ClipReader]) -> Iterator[Batch]:
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
