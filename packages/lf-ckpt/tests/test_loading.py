"""Loads that take a part, other names, other shapes, other dtypes, and what their reports say; the ring to a device."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, bits
from test_shards import write_step

import lf_ckpt
from lf_ckpt import filling, ring
from lf_ckpt.boxes import Box
from lf_ckpt.files import FileLayer
from lf_ckpt.format import EXTENT_BYTES
from lf_ckpt.loading import Wanted, load_step
from lf_ckpt.reader import StepReader

BIG = torch.randn(700, 500)  # 1.4 MB: two extents


def saved() -> dict[str, torch.Tensor]:
    return {"model.a": BIG, "model.b": torch.arange(12.0).view(3, 4), "model.tied": BIG, "optim.a": BIG * 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loading") / "store"
    with lf_ckpt.open(path) as store:
        store.save(1, saved(), {"epoch": 3, "blob": b"bytes"}).wait()
    return path


@pytest.fixture
def store(path: Path) -> lf_ckpt.Store:
    return lf_ckpt.open(path, read_only=True)


class CountingReads(FileLayer):
    """Adds up what is read."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            self.bytes += len(view)
        return super().read(fd, view, offset)


def test_a_whole_load_reports_what_it_took(store: lf_ckpt.Store) -> None:
    report = store.load().report

    assert set(report.taken) == set(saved())
    assert (report.missing, report.unexpected, report.mismatched, report.renamed) == ((), (), (), ())
    assert (report.left_out, report.devices, report.fallbacks) == (0, (), ())
    assert json.loads(json.dumps(report.as_json()))["taken"] == list(report.taken)


def test_only_what_a_pattern_names_is_read(path: Path) -> None:
    files = CountingReads()
    with lf_ckpt.open(path, read_only=True, files=files) as store:
        before = files.bytes
        loaded = store.load(only="*.b")
        small = files.bytes - before

    assert_same(loaded.tensors, {"model.b": saved()["model.b"]})
    assert loaded.items == {"epoch": 3, "blob": b"bytes"}
    assert (loaded.report.taken, loaded.report.left_out) == (("model.b",), 3)
    assert small < 20_000


def test_a_tie_survives_a_partial_load_when_both_names_are_taken(store: lf_ckpt.Store) -> None:
    tensors = store.load(only=["model.*"]).tensors

    assert tensors["model.a"] is tensors["model.tied"]
    assert store.load(only="model.tied").tensors.keys() == {"model.tied"}


def test_a_pattern_that_matches_nothing_is_an_error(store: lf_ckpt.Store) -> None:
    with pytest.raises(lf_ckpt.MismatchError, match=r"modle\.\*"):
        store.load(only=["model.*", "modle.*"])


def test_a_partial_load_in_place_leaves_the_rest_alone(store: lf_ckpt.Store) -> None:
    into = {name: torch.full_like(tensor, 7) for name, tensor in saved().items() if name != "model.tied"}

    report = store.load(into=into, only=["model.a", "model.b"]).report

    assert report.taken == ("model.a", "model.b")
    assert (report.missing, report.unexpected) == ((), ())
    assert bits(into["model.a"]) == bits(BIG)
    assert bits(into["optim.a"]) == bits(torch.full_like(BIG, 7))


def test_names_are_mapped_before_they_are_compared(store: lf_ckpt.Store) -> None:
    into = {"a": torch.zeros(700, 500), "b": torch.zeros(3, 4)}

    loaded = store.load(into=into, only=["model.a", "model.b"], map_names=lambda n: n.removeprefix("model."))

    assert loaded.report.renamed == (("model.a", "a"), ("model.b", "b"))
    assert loaded.tensors.keys() == {"a", "b"}
    assert bits(into["a"]) == bits(BIG)
    assert store.load(map_names={"model.b": "new"}).tensors.keys() == {
        "model.a",
        "new",
        "model.tied",
        "optim.a",
    }


def test_two_names_that_become_one_are_refused(store: lf_ckpt.Store) -> None:
    with pytest.raises(lf_ckpt.CkptError, match="'a' to both"):
        store.load(map_names=lambda name: name.rpartition(".")[2])
    with pytest.raises(lf_ckpt.MismatchError, match="gone"):
        store.load(map_names={"gone": "x"})


@pytest.mark.parametrize("live", ["contiguous", "transposed"])
def test_another_shape_is_filled_in_row_major_order_when_asked(store: lf_ckpt.Store, live: str) -> None:
    target = torch.zeros(500, 700) if live == "contiguous" else torch.zeros(700, 500).t()
    into = {"model.a": target}
    with pytest.raises(lf_ckpt.MismatchError, match=r"float32\[700, 500\] -> float32\[500, 700\]"):
        store.load(into=into, only="model.a")
    assert not target.any()

    report = store.load(into=into, only="model.a", reshape=True).report

    assert report.reshaped == ("model.a: float32[700, 500] -> float32[500, 700]",)
    assert bits(target) == bits(BIG.reshape(500, 700))


def test_as_many_elements_are_needed_to_reshape(store: lf_ckpt.Store) -> None:
    with pytest.raises(lf_ckpt.MismatchError):
        store.load(into={"model.b": torch.zeros(13)}, only="model.b", reshape=True)


def test_dtypes_are_converted_only_when_asked(store: lf_ckpt.Store) -> None:
    into = {"model.a": torch.zeros(700, 500, dtype=torch.bfloat16), "model.b": torch.zeros(12).double()}
    with pytest.raises(lf_ckpt.MismatchError, match="float32.*-> bfloat16"):  # noqa: RUF043
        store.load(into=into, only=["model.a", "model.b"], reshape=True)

    report = store.load(into=into, only=["model.a", "model.b"], reshape=True, cast=True).report

    assert report.cast[0] == "model.a: float32[700, 500] -> bfloat16[700, 500]"
    assert bits(into["model.a"]) == bits(BIG.bfloat16())
    assert bits(into["model.b"]) == bits(torch.arange(12.0).double())


def test_a_cast_that_would_drop_fractions_is_no_cast(store: lf_ckpt.Store) -> None:
    into = {"model.b": torch.zeros(3, 4, dtype=torch.int32)}

    report = store.load(into=into, only="model.b", cast=True, strict=False).report

    assert report.mismatched == ("model.b: float32[3, 4] -> int32[3, 4]",)
    assert not into["model.b"].any()


def test_a_step_of_shards_is_reshaped_and_converted_as_one_tensor(tmp_path: Path) -> None:
    rows = torch.arange(3000 * 4.0).view(3000, 4)
    cut = [(0, Box((0, 0), (2000, 4))), (1, Box((2000, 0), (1000, 4)))]
    write_step(tmp_path, 1, {"rows": rows}, {"rows": cut}, 2)
    into = {"rows": torch.zeros(4, 3000, dtype=torch.float64)}

    with StepReader(FileLayer(), str(tmp_path / "steps"), "1") as reader:
        load_step(reader, Wanted(into, reshape=True, cast=True), 2)

    assert bits(into["rows"]) == bits(rows.double().view(4, 3000))


def test_a_device_that_is_not_there_is_an_error_before_anything_is_read(store: lf_ckpt.Store) -> None:
    with pytest.raises(lf_ckpt.UnsupportedError, match="device warp:3"):
        store.load(device="warp:3")
    with pytest.raises(ValueError, match="stay where they are"):
        store.load(device="cpu", into={})
    assert store.load(device="cpu").tensors["model.a"].device == torch.device("cpu")


@pytest.mark.parametrize(
    ("live", "why"),
    [
        (torch.empty(3, 4, device="meta"), "meta device"),
        (torch.zeros(3, 1).expand(3, 4), "share memory"),
        (torch.zeros(3, 4).to_sparse(), "sparse"),
    ],
)
def test_what_keeps_no_values_is_refused_before_others_change(
    store: lf_ckpt.Store, live: torch.Tensor, why: str
) -> None:
    other = torch.zeros(700, 500)
    for into in ({"model.a": other, "model.b": live}, {"model.b": live, "model.a": other}):
        with pytest.raises(lf_ckpt.UnsupportedError, match=f"model.b: .*{why}"):
            store.load(into=into, only=["model.a", "model.b"], precheck=False)
    assert not other.any()


def test_nothing_is_loaded_to_the_meta_device(store: lf_ckpt.Store) -> None:
    with pytest.raises(lf_ckpt.UnsupportedError, match="meta"):
        store.load(device="meta")
    saved = lf_ckpt.collect(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(lf_ckpt.UnsupportedError, match=r"model\.weight: is on the meta device"):
        lf_ckpt.restore(model, None, saved)


def test_no_device_is_in_the_data(path: Path) -> None:
    body = json.loads((path / "steps/1/MANIFEST").read_text())["body"]
    del body["versions"]  # "torch": "2.13.0+cpu"

    assert {key for tensor in body["tensors"] for key in tensor} == {"name", "dtype", "shape", "shards"}
    assert not any(word in json.dumps(body) for word in ("cpu", "cuda", "device"))


class LateLane:
    """A device that copies as late as it may: at `wait` and `finish`. What the ring hands out too early is lost."""

    def __init__(self) -> None:
        self.queued: deque[tuple[int, Callable[[], None]]] = deque()
        self.count = self.most = 0
        self.followed = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def follow(self) -> None:
        self.followed += 1

    def queue(self, work: Callable[[], None]) -> int:
        with self._lock:
            self.count += 1
            self.queued.append((self.count, work))
            self.most = max(self.most, len(self.queued))
            return self.count

    def wait(self, fence: int) -> None:
        with self._lock:
            while self.queued and self.queued[0][0] <= fence:
                self.queued.popleft()[1]()

    def finish(self) -> None:
        self.wait(self.count)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    """Host tensors are reached as if they were on a device."""
    lane = LateLane()

    def ring_for(self: filling.Filler, device: torch.device) -> ring.Ring:
        made = self._rings.setdefault(device, ring.Ring(lane, 2))
        made.lane.follow()
        return made

    monkeypatch.setattr(filling.Filler, "_ring_for", ring_for)
    return lane


def test_tensors_reach_a_slow_device_through_a_few_slots(tmp_path: Path, lane: LateLane) -> None:
    tensors = {
        "big": torch.randn(3_000_000),
        "wide": torch.randn(1000, 900).bfloat16(),
        "small": torch.ones(3),
    }
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors).wait()
        loaded = store.load()
        into = {name: torch.zeros_like(t) for name, t in tensors.items()}
        into["wide"] = torch.zeros(900, 1000, dtype=torch.bfloat16).t()
        store.load(into=into)

    assert_same(loaded.tensors, tensors)
    assert_same(into, tensors)
    assert lane.most == 2  # slots, however many extents
    assert lane.count > 20
    assert lane.followed == 6
    assert not lane.queued
    assert "2 slots" in loaded.report.devices[0]


def test_copies_have_ended_when_a_load_fails(tmp_path: Path, lane: LateLane) -> None:
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, {"a": torch.randn(600_000), "b": torch.randn(600_000)}).wait()
        file = tmp_path / "steps/1/rank-0.lfckpt"
        data = bytearray(file.read_bytes())
        data[len(data) * 3 // 4] ^= 1
        file.write_bytes(data)
        with pytest.raises(lf_ckpt.CorruptError, match="tensor b"):
            store.load(1)

    assert lane.count > 0
    assert not lane.queued


def test_a_slot_holds_an_extent() -> None:
    made = ring.Ring(ring.BlockingLane(), 3)
    with made.slot() as slot:
        assert slot.memory.numel() == EXTENT_BYTES
        made.send(slot, lambda: None)
    with made.slot() as one, made.slot() as two, made.slot() as three:
        assert len({s.memory.data_ptr() for s in (one, two, three)}) == 3
