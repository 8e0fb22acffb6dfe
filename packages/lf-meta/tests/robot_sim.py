"""A simulated robot set in the LeRobot v3.0 layout: a hand in a square room goes to a lamp, or away from it.

Each episode has its own corner for the lamp, which only the images show, and its own task, which only the text
says; the hand's place is the state. The expert's action is a step straight to or from the lamp, so a policy
needs all three.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS, SIZE, LENGTH = 10, 32, 16
TASKS = ("go to the lamp", "flee")
CAMERAS = ("observation.images.room", "observation.images.mirror")
CORNERS = np.array([(-0.8, -0.8), (-0.8, 0.8), (0.8, -0.8), (0.8, 0.8)])


def episode(number: int) -> tuple[Any, Any, Any, int]:
    """(states [LENGTH, 2], actions [LENGTH, 2], lamp [2], task) of one episode."""
    random = np.random.default_rng(number)
    lamp, task = CORNERS[number % 4], number // 4 % 2
    hand = random.uniform(-0.6, 0.6, 2)
    states, actions = [], []
    for _ in range(LENGTH):
        action = (0.2 if task == 0 else -0.2) * (lamp - hand)
        states.append(hand)
        actions.append(action)
        hand = np.clip(hand + action, -1, 1)
    return np.array(states), np.array(actions), lamp, task


def draw(hand: Any, lamp: Any) -> Any:
    """uint8 [SIZE, SIZE, 3]: the lamp a bright square, the hand a blue one."""
    frame = np.full((SIZE, SIZE, 3), 30, np.uint8)
    for place, half, colour in ((lamp, 4, (250, 230, 120)), (hand, 2, (60, 90, 250))):
        row, column = (round((x + 1) / 2 * (SIZE - 1)) for x in place.tolist())
        frame[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = colour
    return frame


def _write_video(path: Path, frames: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=FPS)
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _stats(values: Any) -> dict[str, Any]:
    kinds = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    return {k: v.tolist() for k, v in kinds.items()} | {"count": [len(values)]}


def write(root: Path, episodes: int) -> Path:
    """Write the set: one parquet file, one mp4 per camera, all of meta/."""
    made = [episode(e) for e in range(episodes)]
    states, actions = (np.concatenate([m[i] for m in made]) for i in (0, 1))
    video = {"dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"]}
    flat = {"dtype": "float32", "shape": [2], "names": ["row", "column"]}
    info = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "robot_type": "simulated hand",
        "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": dict.fromkeys(CAMERAS, video) | {"observation.state": flat, "action": flat},
    }
    meta = root / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(info))
    (meta / "stats.json").write_text(
        json.dumps({"observation.state": _stats(states), "action": _stats(actions)})
    )
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)}), meta / "tasks.parquet")
    rows: list[dict[str, Any]] = []
    for e in range(episodes):
        row = {"episode_index": e, "length": LENGTH, "data/chunk_index": 0, "data/file_index": 0}
        for camera in CAMERAS:
            row |= {f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": 0}
            row |= {f"videos/{camera}/from_timestamp": e * LENGTH / FPS}
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), meta / "episodes" / "chunk-000" / "file-000.parquet")
    frames = [draw(hand, m[2]) for m in made for hand in m[0]]
    for camera, turned in zip(CAMERAS, (frames, [f[:, ::-1].copy() for f in frames]), strict=True):
        _write_video(root / "videos" / camera / "chunk-000" / "file-000.mp4", turned)
    data = root / "data" / "chunk-000" / "file-000.parquet"
    data.parent.mkdir(parents=True)
    columns = {
        "observation.state": states.tolist(),
        "action": actions.tolist(),
        "frame_index": list(range(LENGTH)) * episodes,
        "episode_index": np.repeat(np.arange(episodes), LENGTH).tolist(),
        "task_index": np.repeat([m[3] for m in made], LENGTH).tolist(),
    }
    pq.write_table(pa.table(columns), data)
    return root
