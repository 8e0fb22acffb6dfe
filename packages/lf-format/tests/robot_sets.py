"""LeRobot data sets of moving squares, as v2.0, v2.1 and v3.0 lay them out, with one declared camera missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS, HEIGHT, WIDTH = 10, 48, 64
LENGTHS = (9, 5, 12)
TASKS = ("push the square", "stop")
CAMERAS = ("observation.images.front", "observation.images.wrist")
MISSING = "observation.images.lost"
MODALITY = {
    "state": {"arm": {"start": 0, "end": 2}, "hand": {"start": 2, "end": 3}},
    "action": {"arm": {"start": 0, "end": 2}, "hand": {"start": 2, "end": 3}},
    "video": {"ego": {"original_key": CAMERAS[0]}},
}


def write_video(path: Path, lengths: list[int], seed: int) -> None:
    """One mp4 of the given clips, with B-frames, so that packets are out of order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.max_b_frames = 2
        stream.codec_context.gop_size = 6
        for length in lengths:
            base = random.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3)).astype(np.uint8)
            for t in range(length):
                frame = np.kron(np.roll(base, t, 1), np.ones((8, 8, 1), np.uint8))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def vectors(episode: int) -> tuple[Any, Any]:
    """state and action of an episode, float64[length, 3]."""
    random = np.random.default_rng(100 + episode)
    return random.standard_normal((2, LENGTHS[episode], 3))


def _features() -> dict[str, Any]:
    video = {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    flat = {"dtype": "float32", "shape": [3], "names": ["a", "b", "c"]}
    return dict.fromkeys((*CAMERAS, MISSING), video) | {"observation.state": flat, "action": flat}


def _table(episodes: list[int]) -> pa.Table:
    columns: dict[str, Any] = {"observation.state": [], "action": [], "frame_index": [], "episode_index": []}
    columns |= {"task_index": []}
    for e in episodes:
        state, action = vectors(e)
        columns["observation.state"] += state.tolist()
        columns["action"] += action.tolist()
        columns["frame_index"] += range(LENGTHS[e])
        columns["episode_index"] += [e] * LENGTHS[e]
        columns["task_index"] += [e % 2] * LENGTHS[e]
    return pa.table(columns)


def _meta(root: Path, version: str, paths: dict[str, str]) -> Path:
    meta = root / "meta"
    meta.mkdir(parents=True)
    info = {"codebase_version": version, "fps": FPS, "robot_type": "square", "chunks_size": 2}
    (meta / "info.json").write_text(json.dumps(info | paths | {"features": _features()}))
    (meta / "modality.json").write_text(json.dumps(MODALITY))
    return meta


def _write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_v2(root: Path, version: str = "v2.0") -> Path:
    """One parquet file and one mp4 per camera and episode."""
    chunk = "chunk-{episode_chunk:03d}"
    paths = {"data_path": f"data/{chunk}/episode_{{episode_index:06d}}.parquet"}
    paths["video_path"] = f"videos/{chunk}/{{video_key}}/episode_{{episode_index:06d}}.mp4"
    meta = _meta(root, version, paths)
    _write_lines(meta / "tasks.jsonl", [{"task_index": k, "task": t} for k, t in enumerate(TASKS)])
    rows = [{"episode_index": e, "length": n, "tasks": [TASKS[e % 2]]} for e, n in enumerate(LENGTHS)]
    _write_lines(meta / "episodes.jsonl", rows)
    for e, length in enumerate(LENGTHS):
        where = {"episode_chunk": e // 2, "episode_index": e}
        data = root / paths["data_path"].format(**where)
        data.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table([e]), data)
        for c, camera in enumerate(CAMERAS):
            write_video(root / paths["video_path"].format(video_key=camera, **where), [length], 10 * c + e)
    _write_stats(meta, version)
    return root


def _write_stats(meta: Path, version: str) -> None:
    def stats(values: Any) -> dict[str, Any]:
        kinds = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
        return {k: v.tolist() for k, v in kinds.items()} | {"count": [len(values)]}

    if version == "v2.1":
        rows = [
            {"episode_index": e, "stats": {"observation.state": stats(s), "action": stats(a)}}
            for e, (s, a) in enumerate(map(vectors, range(3)))
        ]
        _write_lines(meta / "episodes_stats.jsonl", rows)
    else:
        joined = [np.concatenate(parts) for parts in zip(*map(vectors, range(3)), strict=True)]
        whole = {"observation.state": stats(joined[0]), "action": stats(joined[1])}
        (meta / "stats.json").write_text(json.dumps(whole))


def write_v3(root: Path) -> Path:
    """Episodes 0 and 1 share the files 0, episode 2 has files 1; the wrist camera has all in one mp4."""
    paths = {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    meta = _meta(root, "v3.0", paths)
    _write_stats(meta, "v3.0")
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)}), meta / "tasks.parquet")
    files = {CAMERAS[0]: [[0, 1], [2]], CAMERAS[1]: [[0, 1, 2]]}
    rows: list[dict[str, Any]] = [
        {"episode_index": e, "length": n, "data/chunk_index": 0, "data/file_index": e // 2}
        for e, n in enumerate(LENGTHS)
    ]
    for c, (camera, groups) in enumerate(files.items()):
        for number, group in enumerate(groups):
            path = root / paths["video_path"].format(video_key=camera, chunk_index=0, file_index=number)
            write_video(path, [LENGTHS[e] for e in group], 10 * c + number)
            at = 0
            for e in group:
                rows[e] |= {f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": number}
                rows[e] |= {f"videos/{camera}/from_timestamp": at / FPS}
                at += LENGTHS[e]
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), meta / "episodes" / "chunk-000" / "file-000.parquet")
    for number, group in enumerate(([0, 1], [2])):
        data = root / paths["data_path"].format(chunk_index=0, file_index=number)
        data.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(group), data)
    return root


def plain_frames(path: Path, size: tuple[int, int] | None) -> list[Any]:
    """Every frame of a file as RGB, (height, width) or as stored: libswscale straight to packed RGB."""
    exact = "flags=bilinear+accurate_rnd+full_chroma_int+bitexact:in_chroma_loc=left"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        height, width = size or (stream.height, stream.width)
        graph = av.filter.Graph()
        source, sink = graph.add_buffer(template=stream), graph.add("buffersink")
        scale = graph.add("scale", f"{width}:{height}:{exact}")
        graph.link_nodes(source, scale, graph.add("format", "rgb24"), sink).configure()
        out = []
        for frame in container.decode(stream):
            source.push(frame)
            out.append(sink.pull().to_ndarray())
    return out


def float_frame(frame: av.VideoFrame, size: tuple[int, int]) -> Any:
    """What the resize means, in float64: [height, width, 3] of a yuv420p frame, BT.601, 16..235.

    Every plane goes from its own grid to that of the result by a triangle filter, as wide as a source pixel when it
    grows and as a target pixel when it shrinks; chroma lies at the left; clipped at the end.
    """
    height, width = frame.height, frame.width
    planes = frame.to_ndarray(format="yuv420p").reshape(-1).astype(float)
    luma, chroma = planes[: height * width].reshape(height, width), planes[height * width :]
    y = _weights(height, size[0], 0.5) @ (luma - 16) / 219 @ _weights(width, size[1], 0.5).T
    down, across = _weights(height // 2, size[0], 0.5), _weights(width // 2, size[1], 0.25)
    u, v = ((down @ c @ across.T - 128) / 224 for c in chroma.reshape(2, height // 2, width // 2))
    rgb = np.stack([y + 1.402 * v, y - (0.202008 * u + 0.419198 * v) / 0.587, y + 1.772 * u], -1)
    return np.clip(255 * rgb, 0, 255)


def _weights(n: int, m: int, phase: float) -> Any:
    """Triangle filter from n samples to m, [m, n]; sample i lies at i + phase of n."""
    at = (np.arange(m) + 0.5) * n / m
    distance = np.abs(np.arange(n) + phase - at[:, None]) / max(n / m, 1)
    weights = np.clip(1 - distance, 0, None)
    edge = np.arange(n) == np.where(at < n / 2, 0, n - 1)[:, None]
    weights = np.where(weights.sum(1, keepdims=True) == 0, edge, weights)
    return weights / weights.sum(1, keepdims=True)
