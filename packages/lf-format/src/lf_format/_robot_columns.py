"""Numbers of robot data: states, actions and tasks of an episode, checked. Needs the extra `video`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError, InputError
from lf_format._lerobot import ACTION, STATE, Episode, RobotSet
from lf_format._tokenizers import Tokenizer
from lf_format._video import need

_KEYS = {"action": ACTION, "state": STATE}
INDICES = ("episode_index", "frame_index", "task_index")
Array = npt.NDArray[Any]


class Columns:
    """Reads the parquet files of a data set; the last one is kept, as successive episodes may share it."""

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features = features
        self._parquet: tuple[Path, Any] = (Path(), None)

    def read(self, episode: Episode) -> dict[str, Array]:
        """state, action and task_index of an episode, checked, [length, ...]."""
        if not episode.table.is_file():
            raise InputError(f"no file {episode.table.name}")
        if self._parquet[0] != episode.table:
            try:
                self._parquet = episode.table, _read_table(episode.table)
            except (OSError, ValueError) as error:
                raise InputError(f"{episode.table.name} cannot be read: {error}") from None
        table = self._parquet[1]
        mine = np.flatnonzero(numbers(table, "episode_index", 1)[:, 0] == episode.index)
        if len(mine) != episode.length:
            raise InputError("rows of the episode", expected=episode.length, found=len(mine))
        out = {"task_index": numbers(table, "task_index", 1)[mine, 0]}
        if (out["task_index"] != np.floor(out["task_index"])).any():
            raise InputError("task_index is not an integer")
        for key in (STATE, ACTION):
            if key in self._features:
                width = int(np.prod(self._features[key]["shape"]))
                out[key] = values = numbers(table, key, width)[mine].astype(np.float64)
                with np.errstate(over="ignore"):
                    if not np.isfinite(values.astype(np.float32)).all():
                        raise InputError(f"{key} has values that are not finite in float32")
        if "frame_index" in table.column_names:
            order = numbers(table, "frame_index", 1)[mine, 0]
            if (order != np.arange(episode.length)).any():
                raise InputError("frame_index does not count 0, 1, 2, ...")
        return out


def _read_table(path: Path) -> Any:
    """The columns that a record needs; images inside parquet are not among them."""
    with need("pyarrow.parquet").ParquetFile(path) as file:
        return file.read(
            [name for name in file.schema_arrow.names if name in (STATE, ACTION, *INDICES)], use_threads=False
        )


def numbers(table: Any, key: str, width: int) -> Array:
    """Column `key` of a parquet table as [rows, width]."""
    if key not in table.column_names:
        raise InputError(f"no column {key}")
    column = table.column(key)
    lengths = need("pyarrow.compute").list_value_length
    try:
        while hasattr(column.type, "value_type"):  # lists, also nested ones
            column = column.combine_chunks()
            if len(lengths(column).unique()) > 1:  # flat, they could still add up to rows of `width`
                raise ValueError("rows of different lengths")
            column = column.flatten()
        values: Array = column.to_numpy()
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{values.dtype} values")
        return values.reshape(table.num_rows, width)
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise InputError(f"column {key} is not numbers of width {width}: {error}") from None


def relative_slices(robot: RobotSet, names: tuple[str, ...]) -> list[tuple[slice, slice]]:
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
    out, times = [], np.zeros(_width(robot, "action"), int)
    for name in names:
        if name not in parts["action"] or name not in parts["state"]:
            both = sorted(set(parts["action"]) & set(parts["state"]))
            raise FormatError("relative action", expected=both, found=name)
        pair = [_part(robot, m, name) for m in ("action", "state")]
        if pair[0].stop - pair[0].start != pair[1].stop - pair[1].start:
            raise FormatError(f"width of {name}", expected=str(pair[1]), found=str(pair[0]))
        times[pair[0]] += 1
        if times.max() > 1:  # the state would be taken off twice
            raise FormatError("relative actions overlap", expected="every action once", found=name)
        out.append((pair[0], pair[1]))
    return out


def _width(robot: RobotSet, kind: str) -> int:
    return int(np.prod(robot.features[_KEYS[kind]]["shape"]))


def _part(robot: RobotSet, kind: str, name: str) -> slice:
    """Columns of a part of modality.json; FormatError when the feature has no such columns."""
    key, part = _KEYS[kind], robot.modality[kind][name]
    if part.get("original_key", key) != key:
        raise FormatError(f"{kind} {name} is not part of {key}", found=part["original_key"])
    start, end = part.get("start"), part.get("end")
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= _width(robot, kind):
        expected = f"0 <= start < end <= {_width(robot, kind)}"
        raise FormatError(f"columns of {kind} {name}", expected=expected, found=(start, end))
    return slice(start, end)


def task_ids(tasks: Mapping[int, str], coder: Tokenizer) -> dict[int, Array]:
    """Token ids of every task; InputError for a text without one."""
    out = {index: coder.encode(text) for index, text in tasks.items()}
    empty = [index for index, ids in out.items() if not len(ids)]
    if empty or not out:
        raise InputError("a task without a token", expected="a text in meta/tasks", found=empty)
    return out
