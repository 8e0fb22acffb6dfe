"""What is loaded is what was saved: every dtype, stride and size, with and without a slab that holds it all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from ckpt_dtypes import KNOWN
from ckpt_states import assert_same, bits, copy_of, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import lf_ckpt
from lf_ckpt.dtypes import dtype_of

MIB = 1 << 20


def round_trip(path: Path, tensors: dict[str, torch.Tensor], **options: object) -> lf_ckpt.Loaded:
    with lf_ckpt.open(path, **options) as store:  # type: ignore[arg-type]
        store.save(1, tensors).wait()
        return store.load()


def odd_tensors() -> dict[str, torch.Tensor]:
    """Case A10 of the design notes."""
    x = torch.randn(64, 48)
    return {
        "transposed": x.t(),
        "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "tied.a": x,
        "tied.b": x,
        "slice of a big storage": torch.randn(1 << 18)[7:15],
        "every third": torch.arange(300)[::3],
        "zero dim": torch.tensor(3.5),
        "empty (0,5)": torch.empty(0, 5),
        "expanded": torch.ones(1, 4).expand(1000, 4),
        "bf16": x.bfloat16(),
        "f8_e4m3": x.to(torch.float8_e4m3fn),
        "f8_e5m2": x.to(torch.float8_e5m2),
        "bool": x > 0,
        "complex64": torch.complex(x, x),
        "conjugate": torch.complex(x, x).conj(),
        "imaginary of conjugate": torch.complex(x, x).conj().imag,
        "complex128": torch.complex(x.double(), x.double()),
        "int64 beyond 2**53": torch.tensor([2**53 + 1, -(2**62)]),
        "uint16": torch.arange(9).to(torch.uint16),
        "NaN payloads": torch.tensor([0x7FC12345, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
        "requires grad": torch.nn.Parameter(torch.randn(3)),
        "naïve name / ../../x \n": torch.ones(2),
    }


@pytest.mark.parametrize("compress", ["raw", "auto", "zstd"])
def test_odd_tensors_come_back_bit_for_bit_and_ties_stay_tied(tmp_path: Path, compress: str) -> None:
    tensors = odd_tensors()

    loaded = round_trip(tmp_path / "store", tensors, compress=compress)

    assert_same(loaded.tensors, tensors)
    assert loaded.tensors["tied.a"] is loaded.tensors["tied.b"]
    assert {p.name for p in tmp_path.iterdir()} == {"store"}


@pytest.mark.parametrize("name", KNOWN)
def test_every_dtype_keeps_every_bit_pattern(tmp_path: Path, name: str) -> None:
    size = torch.empty(0, dtype=dtype_of(name)).element_size()
    pattern = torch.arange(0, 256 * 16 * 7, 7).to(torch.uint8)
    tensor = (pattern % 2 if name == "BOOL" else pattern).view(dtype_of(name))

    loaded = round_trip(tmp_path, {"x": tensor, "strided": tensor[::3]})

    assert size == tensor.element_size()
    assert_same(loaded.tensors, {"x": tensor, "strided": tensor[::3]})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_view_of_any_shape_round_trips(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), max_size=4))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    tensor = torch.randint(0, 2, shape).to(dtype)
    order = data.draw(st.permutations(range(len(shape))))
    view = tensor.permute(*order) if shape else tensor
    if shape and data.draw(st.booleans()):
        view = view[:: data.draw(st.integers(1, 3))]

    loaded = round_trip(tmp_path / str(random.random()), {"x": view})

    assert_same(loaded.tensors, {"x": view})


@pytest.mark.parametrize("slab", [4 * MIB, 5 * MIB + 4096, 9 * MIB])
def test_a_state_larger_than_the_slab_streams_through_it(tmp_path: Path, slab: int) -> None:
    tensors = {f"w{i}": torch.randn(n) for i, n in enumerate([3_000_000, 5, 700_001, 1, 2_000_000, 262_144])}
    tensors["strided"] = torch.randn(1100, 1000).t()

    loaded = round_trip(tmp_path, tensors, slab_bytes=slab)

    assert_same(loaded.tensors, tensors)


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("compress", ["raw", "auto"])
def test_direct_and_buffered_writes_give_the_same_file(tmp_path: Path, io: str, compress: str) -> None:
    tensors = {
        "a": torch.randn(3 * MIB + 5),
        "zeros": torch.zeros(MIB),
        "b": torch.arange(700_000),
        "s": torch.ones(3),
    }
    for kind in (io, "buffered"):
        with lf_ckpt.open(tmp_path / kind, io=kind, compress=compress) as store:  # type: ignore[arg-type]
            report = store.save(1, tensors).wait()
            assert report.io.startswith(("direct", "buffered"))
            tensors["b"][0] = 9
            store.save(2, tensors).wait()
            assert_same(store.load().tensors, tensors)
            tensors["b"][0] = 0
    for step in ("1", "2"):
        one, two = (
            (tmp_path / kind / "steps" / step / "rank-0.lfckpt").read_bytes() for kind in (io, "buffered")
        )
        if step == "1":  # the trailer of a delta holds the root of its base, which holds the time
            assert one[4096:] == two[4096:]
        assert len(one) == len(two)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 16 * MIB, 16 * MIB + 3])
def test_sizes_around_every_edge_of_the_format(tmp_path: Path, size: int) -> None:
    tensors = {"x": (torch.arange(size) % 251).to(torch.uint8)}

    assert_same(round_trip(tmp_path, tensors).tensors, tensors)


def test_a_large_expanded_view_is_saved_without_a_copy_of_it(tmp_path: Path) -> None:
    view = torch.arange(64, dtype=torch.float32).expand(1 << 20, 64)  # 256 MiB seen, 256 bytes held
    with lf_ckpt.open(tmp_path, slab_bytes=8 * MIB) as store:
        report = store.save(1, {"x": view}).wait()
        into = {"x": torch.zeros(1 << 20, 64)}
        store.load(into=into)

    assert report.bytes_raw == 256 * MIB
    assert report.bytes_written < 8 * MIB
    assert torch.equal(into["x"], view)


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path, {})

    assert (loaded.step, loaded.tensors, loaded.items) == (1, {}, {})


def test_tensors_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:  # case A5
    parameter = torch.nn.Parameter(torch.randn(300_000))
    before = parameter.detach().clone()
    with lf_ckpt.open(tmp_path) as store:
        handle = store.save(1, {"p": parameter})
        with torch.no_grad():
            parameter.add_(1)
        handle.wait()

        assert bits(store.load().tensors["p"]) == bits(before)


def test_overlapped_staging_takes_the_values_of_the_save(tmp_path: Path) -> None:
    tensors = state(1, layers=8, size=500_000)
    before = copy_of(tensors)
    with lf_ckpt.open(tmp_path, slab_bytes=6 * MIB) as store:
        handle = store.save(1, tensors, overlap=True)
        handle.wait_staged()
        assert handle.staged
        for tensor in tensors.values():
            tensor.add_(1)
        report = handle.wait()

        assert handle.durable
        assert handle.written
        assert 0 < report.seconds_staged <= report.seconds_written <= report.seconds_durable
        assert_same(store.load().tensors, before)


def test_items_keep_json_bytes_and_special_floats(tmp_path: Path) -> None:
    items = {
        "counter": 2**70,
        "nested": {"a": [1, 2.5, None, True, {"$x": "$y", "$bytes": 1}], "blob": b"\0\xff", "": float("inf")},
        "blob": bytes(range(256)) * 5000,
        "empty": b"",
        "text": "naïve 😀 \ud83d \x00",
        "loss": float("-inf"),
    }
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, {}, items).wait()
        loaded = store.load()

    assert loaded.items == items


def test_items_are_copied_when_save_returns(tmp_path: Path) -> None:
    items = {"list": [1]}
    with lf_ckpt.open(tmp_path) as store:
        handle = store.save(1, {}, items)
        items["list"].append(2)
        handle.wait()

        assert store.load().items == {"list": [1]}


@pytest.mark.parametrize(
    "item",
    [torch.ones(2), {1: 2}, {"a": object()}, {"a": {3}}, [[lambda: 0]], 1j, 10**5000, "\ud83d\ude00"],
    ids=["tensor", "int key", "object", "set", "function", "complex", "huge int", "split pair"],
)
def test_items_that_are_not_json_are_refused_before_anything_is_written(tmp_path: Path, item: object) -> None:
    with lf_ckpt.open(tmp_path) as store:
        with pytest.raises(lf_ckpt.UnsupportedError, match="thing"):
            store.save(1, state(), {"thing": item})

        assert list((tmp_path / "steps").iterdir()) == []


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves the parameters that it has resharded."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
        [1.0],
        TwoTensor(torch.ones(2), torch.ones(2)),
        FakeTensorMode().from_tensor(torch.ones(2)),
        freed(torch.ones(2)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "meta", "list", "wrapper", "fake", "freed", "nested"],
)
def test_tensors_without_plain_bytes_are_refused_by_name(tmp_path: Path, tensor: object) -> None:
    with lf_ckpt.open(tmp_path) as store, pytest.raises(lf_ckpt.UnsupportedError, match="culprit"):
        store.save(1, {"culprit": tensor})  # type: ignore[dict-item]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 10**18])
def test_a_step_must_be_a_whole_number(tmp_path: Path, step: object) -> None:
    with lf_ckpt.open(tmp_path) as store, pytest.raises(ValueError, match="whole number"):
        store.save(step, {})  # type: ignore[arg-type]


def test_encoding_threads_do_not_change_the_bytes(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5 * MIB)}
    for threads in (1, 3):
        with lf_ckpt.open(tmp_path / str(threads), threads=threads) as store:
            store.save(1, tensors).wait()
            assert_same(store.load().tensors, tensors)
    one, three = ((tmp_path / t / "steps/1/rank-0.lfckpt").read_bytes() for t in ("1", "3"))

    assert one[4096:] == three[4096:]  # the header holds the id of the store


class TestInto:
    """load(into=...): in place, all or nothing."""

    def test_fills_tensors_of_any_stride_and_keeps_their_identity(self, tmp_path: Path) -> None:
        saved = {
            "a": torch.randn(40, 30),
            "b": torch.randn(5),
            "c": torch.tensor(2.0),
            "d": torch.empty(0, 3),
        }
        into = {"a": torch.zeros(30, 40).t(), "b": torch.nn.Parameter(torch.zeros(10))[::2].detach(),
                "c": torch.zeros(()), "d": torch.empty(0, 3)}  # fmt: skip
        with lf_ckpt.open(tmp_path) as store:
            store.save(1, saved).wait()
            loaded = store.load(into=into)

        assert_same(into, saved)
        assert all(loaded.tensors[name] is into[name] for name in into)

    @pytest.mark.parametrize(
        ("change", "attribute"),
        [({"new": torch.zeros(1)}, "missing"), ({"step": None}, "unexpected"), ({"step": torch.zeros(2)}, "mismatched"),
         ({"step": torch.tensor(0.0)}, "mismatched")],
    )  # fmt: skip
    def test_strict_refuses_what_does_not_fit_and_touches_nothing(
        self, tmp_path: Path, change: dict[str, torch.Tensor | None], attribute: str
    ) -> None:
        into = {name: torch.zeros_like(t) for name, t in state().items()} | change
        into = {name: tensor for name, tensor in into.items() if tensor is not None}
        with lf_ckpt.open(tmp_path) as store:
            store.save(1, state()).wait()
            with pytest.raises(lf_ckpt.MismatchError) as caught:
                store.load(into=into)
            assert len(getattr(caught.value, attribute)) == 1
            assert not any(tensor.any() for tensor in into.values())

            report = store.load(into=into, strict=False).report
            assert len(getattr(report, attribute)) == 1
            assert torch.equal(into["layer0.weight"], state()["layer0.weight"])
