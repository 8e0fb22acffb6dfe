"""How two steps differ: kinds, counts in bits, and the largest difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from ckpt_dtypes import KNOWN
from ckpt_states import bits
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt.catalog import Catalog
from lf_ckpt.compare import StepDiff, TensorDiff, compare
from lf_ckpt.reader import StepReader


def diff(path: Path, a: int = 1, b: int = 2) -> StepDiff:
    catalog = Catalog(lf_ckpt.FileLayer(), str(path))
    with (
        StepReader(catalog.files, catalog.steps, str(a)) as before,
        StepReader(catalog.files, catalog.steps, str(b)) as after,
    ):
        return compare(before, after)


def save(path: Path, *states: tuple[dict[str, torch.Tensor], dict[str, object]]) -> None:
    with lf_ckpt.open(path) as store:
        for step, (tensors, items) in enumerate(states, 1):
            store.save(step, tensors, items).wait()


def by_name(found: StepDiff) -> dict[str, TensorDiff]:
    return {tensor.name: tensor for tensor in found.tensors}


def test_kinds_counts_and_distances(tmp_path: Path) -> None:
    old = torch.zeros(1000)
    new = old.clone()
    new[3], new[5], new[7] = 0.5, -2.0, math.nan
    save(
        tmp_path,
        (
            {"same": torch.ones(9), "gone": torch.ones(2), "x": old, "shape": old},
            {"epoch": 1, "old": 0, "b": b"12"},
        ),
        (
            {"same": torch.ones(9), "new": torch.ones(3), "x": new, "shape": old[:9]},
            {"epoch": 2, "nan": 0, "b": b"13"},
        ),
    )

    found = diff(tmp_path)
    tensors = by_name(found)

    assert not found.equal
    assert tensors["same"] == TensorDiff("same", "same", "F32[9]", "F32[9]", 0, 0)
    assert tensors["gone"] == TensorDiff("gone", "removed", "F32[2]", None)
    assert tensors["new"] == TensorDiff("new", "added", None, "F32[3]")
    assert tensors["shape"] == TensorDiff("shape", "changed", "F32[1000]", "F32[9]")
    assert (tensors["x"].elements, tensors["x"].max_abs, tensors["x"].nonfinite) == (3, 2.0, 1)
    assert tensors["x"].bytes == sum(a != b for a, b in zip(bits(old), bits(new), strict=True))
    assert (tensors["item b"].kind, tensors["item b"].elements, tensors["item b"].max_abs) == (
        "changed",
        1,
        None,
    )
    assert found.items == (("epoch", "changed"), ("nan", "added"), ("old", "removed"))


def test_a_step_equals_itself_and_its_other_codec(tmp_path: Path) -> None:
    tensors, items = {"x": torch.randn(300_000), "n": torch.tensor(math.nan)}, {"loss": math.nan, "raw": b"x"}
    save(tmp_path / "a", (tensors, items))
    with lf_ckpt.open(tmp_path / "b", compress="raw") as store:
        store.save(1, tensors, items).wait()
    a, b = (Catalog(lf_ckpt.FileLayer(), str(tmp_path / name)) for name in "ab")

    assert diff(tmp_path / "a", 1, 1).equal
    with StepReader(a.files, a.steps, "1") as before, StepReader(b.files, b.steps, "1") as after:
        assert compare(before, after).equal


@pytest.mark.parametrize("name", KNOWN)
def test_every_dtype_can_be_compared(tmp_path: Path, name: str) -> None:
    from lf_ckpt.dtypes import dtype_of

    dtype = dtype_of(name)
    old = torch.zeros(64, dtype=torch.uint8).view(dtype)
    new = torch.zeros(64, dtype=torch.uint8)
    new[old.element_size()] = 1
    save(tmp_path, ({"x": old}, {}), ({"x": new.view(dtype)}, {}))

    [tensor] = diff(tmp_path).tensors

    assert (tensor.kind, tensor.elements, tensor.bytes) == ("changed", 1, 1)
    if dtype.is_floating_point or dtype.is_complex:
        assert (
            tensor.max_abs
            == abs(new.view(dtype)[1:2].to(torch.complex128) - old[1:2].to(torch.complex128)).item()
        )
    else:
        assert tensor.max_abs is None


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, (1 << 18) - 1), max_size=5, unique=True),
    st.sampled_from([torch.float32, torch.int16]),
)
def test_changed_elements_are_counted_wherever_they_are(
    tmp_path_factory: pytest.TempPathFactory, places: list[int], dtype: torch.dtype
) -> None:
    path = tmp_path_factory.mktemp("store")
    old = torch.ones(1 << 18, dtype=dtype)
    new = old.clone()
    new[places] = 3
    save(path, ({"x": old}, {}), ({"x": new}, {}))

    [tensor] = diff(path).tensors

    assert tensor.elements == len(places)
    assert tensor.kind == ("changed" if places else "same")
    assert tensor.max_abs == (2.0 if places and dtype.is_floating_point else None)


def test_a_damaged_step_is_an_error_not_a_difference(tmp_path: Path) -> None:
    save(tmp_path, ({"x": torch.randn(9000)}, {}), ({"x": torch.randn(9000)}, {}))
    file = tmp_path / "steps/1/rank-0.lfckpt"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)

    with pytest.raises(lf_ckpt.CorruptError):
        diff(tmp_path)
