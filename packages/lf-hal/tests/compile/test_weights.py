"""The weights file and its sources: what goes in comes out, and no changed byte gets through."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lf_hal.errors import ArtifactError, HalError, WeightsError
from lf_hal.lir import TensorType, Value
from lf_hal.sources import as_array, read_weights
from lf_hal.weights import NUMPY_DTYPES, open_weights, write_weights

Weights = dict[str, tuple[str, np.ndarray[Any, Any]]]


def _example() -> Weights:
    rng = np.random.default_rng(1)
    return {
        "a.weight": ("f32", rng.standard_normal((17, 9)).astype(np.float32)),
        "ids": ("i64", np.arange(5)),
        "flag": ("bool", np.array([True, False, True])),
        "half": ("bf16", rng.integers(0, 1 << 16, (33,)).astype(np.uint16)),
        "scalar": ("f32", np.float32(3.5).reshape(())),
        "empty": ("f32", np.zeros((0, 4), np.float32)),
    }


@settings(max_examples=30, deadline=None)
@given(dtypes=st.lists(st.sampled_from(sorted(NUMPY_DTYPES)), max_size=5), data=st.data())
def test_what_is_written_is_read(
    dtypes: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weights: Weights = {}
    for i, dtype in enumerate(dtypes):
        shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
        raw = data.draw(hnp.arrays(np.uint8, (*shape, np.dtype(NUMPY_DTYPES[dtype]).itemsize)))
        typed = raw.view(NUMPY_DTYPES[dtype]) if raw.size else np.zeros((*shape, 1), NUMPY_DTYPES[dtype])
        weights[f"w{i}"] = (dtype, typed.reshape(shape))
    path = tmp_path_factory.mktemp("w") / "weights.lfw"
    write_weights(path, weights)
    found = open_weights(path)
    assert [(b.name, b.dtype, b.shape) for b in found.blobs] == [
        (n, d, a.shape) for n, (d, a) in weights.items()
    ]
    for blob in found.blobs:
        assert blob.offset % 64 == 0
        raw = found.data[blob.offset : blob.offset + blob.nbytes].tobytes()
        assert raw == weights[blob.name][1].tobytes()


def test_every_flipped_byte_is_an_error_with_path_and_place(tmp_path: Path) -> None:
    path = tmp_path / "weights.lfw"
    write_weights(path, _example())
    good = path.read_bytes()
    payload = open_weights(path).payload_offset
    places = [*range(200), *range(200, payload, 61), *range(payload, len(good), 5)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(ArtifactError) as caught:
            open_weights(path)
        assert caught.value.path == path
        if place >= payload:
            assert caught.value.offset is not None
            assert payload <= caught.value.offset <= place
        with pytest.raises(ArtifactError):
            open_weights(path, verify=False)


def test_the_changed_weight_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.lfw"
    write_weights(path, _example())
    found = open_weights(path)
    ids = next(b for b in found.blobs if b.name == "ids")
    bad = bytearray(path.read_bytes())
    bad[found.payload_offset + ids.offset + 3] ^= 1
    path.write_bytes(bad)
    with pytest.raises(ArtifactError, match="weight 'ids' was changed") as caught:
        open_weights(path)
    assert caught.value.offset == found.payload_offset + ids.offset


@pytest.mark.parametrize("keep", [0, 20, 64, 4096, -1])
def test_a_cut_file_is_an_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "weights.lfw"
    write_weights(path, _example())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError):
        open_weights(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not there"):
        open_weights(tmp_path / "none.lfw")


def test_buffers_of_all_kinds_are_taken_and_none_is_converted() -> None:
    import torch

    value = Value("w", TensorType("f32", (2, 3)))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given_ in (array, torch.from_numpy(array), array.tobytes(), memoryview(array.tobytes())):
        assert np.array_equal(as_array(value, given_), array)
    assert np.array_equal(as_array(value, torch.from_numpy(array.T.copy()).T), array)
    for wrong in (array.astype(np.float64), array.T, torch.from_numpy(array).double(), b"123"):
        with pytest.raises(WeightsError, match="'w'"):
            as_array(value, wrong)
    bits = as_array(Value("w", TensorType("bf16", (2, 3))), torch.from_numpy(array).bfloat16())
    assert bits.tolist() == [[0, 0x3F80, 0x4000], [0x4040, 0x4080, 0x40A0]]


def _safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """As the format's document says, so that the package is no dependency of the test."""
    header, offset = {}, 0
    for name, a in tensors.items():
        span = [offset, offset + a.nbytes]
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": span}
        offset += a.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))


def test_safetensors_are_a_source(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"model.a": np.eye(3, dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
    _safetensors(path, tensors)
    found = read_weights(path)
    assert set(found) == set(tensors)
    assert all(np.array_equal(found[n], a) for n, a in tensors.items())
    assert set(read_weights(path, prefix="model.")) == {"a"}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="'b' is cut"):
        read_weights(path)


def test_lfckpt_is_a_source(tmp_path: Path) -> None:
    lf_ckpt = pytest.importorskip("lf_ckpt")
    import torch

    weights = {"model.w": torch.arange(6.0).reshape(2, 3), "model.h": torch.ones(3, dtype=torch.bfloat16)}
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(0, weights, {}).wait()
        lf_ckpt.export_file(store, 0, tmp_path / "step.lfckpt")
    found = read_weights(tmp_path / "step.lfckpt", prefix="model.")
    assert np.array_equal(
        as_array(Value("w", TensorType("f32", (2, 3))), found["w"]), weights["model.w"].numpy()
    )
    assert as_array(Value("h", TensorType("bf16", (3,))), found["h"]).tolist() == [0x3F80] * 3


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"")
    with pytest.raises(HalError, match=r"\.safetensors or \.lfckpt"):
        read_weights(tmp_path / "w.pt")
