"""The weights file and its sources: what goes in comes out, and no changed byte gets through."""

import contextlib
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _with_index(path: Path, index: Any) -> None:
    """A weights file whose index says something else, with sums that are right."""
    data = path.read_bytes()
    start = struct.unpack_from("<Q", data, 16)[0]
    text = json.dumps(index).encode()
    head = struct.pack("<8sQ", data[:8], len(text)) + data[16:32]
    padded = text + bytes(start - 64 - len(text))
    words = np.frombuffer(head + padded, "<u8")
    with np.errstate(over="ignore"):
        sums = (
            words.sum(dtype=np.uint64),
            (words * np.arange(1, len(words) + 1, dtype=np.uint64)).sum(dtype=np.uint64),
        )
    path.write_bytes(head + data[32:48] + struct.pack("<QQ", *map(int, sums)) + padded + data[start:])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], bytes]:
    path = tmp_path_factory.mktemp("index") / "weights.lfw"
    write_weights(path, _example())
    good = path.read_bytes()
    index = json.loads(good[64 : 64 + struct.unpack_from("<Q", good, 8)[0]])
    return path, index, good


def test_an_index_that_is_written_anew_is_read(written: tuple[Path, list[dict[str, Any]], bytes]) -> None:
    path, index, good = written
    path.write_bytes(good)
    _with_index(path, index)
    assert [b.name for b in open_weights(path).blobs] == list(_example())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_index_with_right_sums_is_read_or_a_typed_error(
    data: st.DataObject, written: tuple[Path, list[dict[str, Any]], bytes]
) -> None:
    path, index, good = written
    path.write_bytes(good)
    row, key = data.draw(st.sampled_from(range(len(index)))), data.draw(st.sampled_from(sorted(index[0])))
    changed = [dict(r) for r in index]
    changed[row][key] = data.draw(JSON | st.integers(-(2**70), 2**70) | st.sampled_from([-64, 64, 1 << 62]))
    _with_index(path, data.draw(st.sampled_from([changed, changed[row], [changed[row]] * 2])))
    for verify in (True, False):
        with contextlib.suppress(ArtifactError):
            opened = open_weights(path, verify=verify)
            assert all(0 <= b.offset <= b.offset + b.nbytes <= len(opened.data) for b in opened.blobs)


@settings(max_examples=150, deadline=None)
@given(
    header=JSON
    | st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F64", "BF16"]) | JSON,
                "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
                "data_offsets": st.lists(st.integers(-4, 80), min_size=1, max_size=3) | JSON,
            }
        ),
    )
)
def test_a_safetensors_header_is_read_or_a_typed_error(
    header: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with contextlib.suppress(ArtifactError):
        found = read_weights(path)
        assert all(a.nbytes <= 64 for a in found.values() if isinstance(a, np.ndarray))


def test_a_type_that_the_form_has_not_is_named(tmp_path: Path) -> None:
    path = tmp_path / "double.safetensors"
    text = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(WeightsError, match="elements of type F64"):
        as_array(Value("w", TensorType("f32", (1,))), read_weights(path)["w"])


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
