"""A ragged point cloud of [N, 3 + channels], voxelised offline into another file: the example of the README at size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import lf_format as lff
from lf_format import Field

Array = npt.NDArray[Any]
EDGE = 0.05  # metres
CLOUD = (Field.tensor("cloud", "float32", (-1, 6), role="points"), Field.tensor("stamp", "int64", ()))
GRID = (
    Field.tensor("voxels", "int16", (-1, 3), role="voxels"),
    Field.tensor("means", "float32", (-1, 6), role="points"),
    Field.tensor("counts", "uint32", (-1,)),
    Field.tensor("stamp", "int64", ()),
)


def voxelise(cloud: Array) -> dict[str, Array]:
    """Cells of EDGE metres that hold a point, sorted: their indices, the mean of all channels, the points in each."""
    cells, owner, counts = np.unique(
        np.floor(cloud[:, :3] / EDGE).astype(np.int16), axis=0, return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(cells), cloud.shape[1]))
    np.add.at(sums, owner.reshape(-1), cloud.astype(np.float64))
    return {"voxels": cells, "means": sums / counts[:, None], "counts": counts}


def clouds() -> list[Array]:
    """x, y, z in metres on both sides of zero, then red, green, blue."""
    dice = np.random.default_rng(1)
    sizes = (0, 1, 5000, 20_000, 7)
    return [np.c_[dice.normal(0, 0.5, (n, 3)), dice.random((n, 3))].astype(np.float32) for n in sizes]


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
def test_a_cloud_is_voxelised_offline_into_another_file(tmp_path: Path, codec: Any) -> None:
    originals = clouds()
    with lff.Writer(tmp_path / "cloud.lfg", fields=CLOUD, codec=codec) as writer:
        for stamp, cloud in enumerate(originals):
            writer.append({"cloud": cloud, "stamp": stamp})
    with (
        lff.Reader(tmp_path / "cloud.lfg") as reader,
        lff.Writer(tmp_path / "grid.lfg", fields=GRID, meta={"edge_m": EDGE}, codec=codec) as writer,
    ):
        for i in range(len(reader)):
            record = reader.record(i)
            assert record["cloud"].tobytes() == originals[i].tobytes()
            writer.append(voxelise(record["cloud"]) | {"stamp": record["stamp"]})
    assert lff.verify(tmp_path / "grid.lfg").problems == []
    with lff.Reader(tmp_path / "grid.lfg") as grid:
        assert grid.meta == {"edge_m": EDGE}
        for i, cloud in enumerate(originals):
            _check(grid.record(i), cloud, i)
        values, starts = grid.gather([2, 0, 3], "counts")
        assert [int(values[a:b].sum()) for a, b in _pairs(starts)] == [5000, 0, 20_000]


def _check(record: lff.Record, cloud: Array, stamp: int) -> None:
    """Every point lies in a stored cell, every stored cell has its points, and means are of those points."""
    cells = {tuple(cell): k for k, cell in enumerate(record["voxels"].tolist())}
    owner = np.array([cells[tuple(c)] for c in np.floor(cloud[:, :3] / EDGE).astype(int).tolist()], int)
    assert np.bincount(owner, minlength=len(cells)).tolist() == record["counts"].tolist()
    for k in range(0, len(cells), 97):
        np.testing.assert_allclose(record["means"][k], cloud[owner == k].mean(0), rtol=1e-4, atol=1e-6)
    assert record["stamp"] == stamp
    assert int(record["counts"].sum()) == len(cloud)


def _pairs(starts: Array) -> Iterator[tuple[int, int]]:
    return zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
