"""Where records lie, as engines with their own I/O need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff


@pytest.fixture(params=["raw", "zstd"])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """40 samples with a fixed, a bit, a ragged and a scalar field, several to a block."""
    fields = [
        lff.Field.tensor("state", "float32", (7,)),
        lff.Field.bits("valid", (11,)),
        lff.Field.tensor("points", "int16", (-1, 3)),
        lff.Field.tensor("task", "int64", ()),
    ]
    random = np.random.default_rng(1)
    path = tmp_path / "a.lfg"
    with lff.Writer(path, fields=fields, codec=request.param, block_bytes=700) as writer:
        for i in range(40):
            points = np.repeat(random.integers(-5, 5, (1, 3)), i % 7, axis=0)
            sample: dict[str, Any] = {"state": np.arange(7.0), "valid": np.arange(11) % 3 == 0}
            writer.append(sample | {"points": points, "task": i})
    return path


def test_locations_lead_to_the_bytes_of_every_field(samples: Path) -> None:
    with lff.Reader(samples) as reader:
        ids = [39, 0, 7, 7, 20]
        found = reader.locations(ids)
        assert len(reader.opened.index.block_count) > 3
        for row, i in enumerate(ids):
            payload = reader.block_payload(int(found.block[row]))
            for k, field in enumerate(reader.fields):
                start, size = int(found.start[k, row]), int(found.nbytes[k, row])
                raw = np.frombuffer(payload, np.uint8)[start : start + size]
                value = field.decode(raw, int(found.counts[k, row]))
                assert value is not None
                assert np.array_equal(value, reader.record(i)[field.name])
        assert (found.payload == reader.opened.index.block_offset[found.block] + 64).all()


def test_the_longest_value_of_a_field(samples: Path) -> None:
    with lff.Reader(samples) as reader:
        assert [reader.longest(f.name) for f in reader.fields] == [1, 1, 6, 1]
        with pytest.raises(lff.FormatError, match="nonsense"):
            reader.longest("nonsense")
    with lff.open_dataset([samples, samples]) as dataset:
        assert dataset.longest("points") == 6
