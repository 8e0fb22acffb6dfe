"""Deltas of changed extents: where the base's bytes come from, when a delta is worth it, and what a bad base does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt_states import assert_same, copy_of

import lf_ckpt
from lf_ckpt.choose import StreamChooser
from lf_ckpt.format import CHANGED, DIRTY, PLANES, RAW, SAME, SUB
from lf_ckpt.options import Options
from lf_ckpt.parents import ParentBytes, parent_budget

DELTAS = {"xor+planes+zstd", "difference+planes+zstd", "changed-elements", "dirty-units"}
DATA = "rank-0.lfckpt"


def weights(seed: int = 0, size: int = 40_000) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=chance) for name in ("a", "b", "frozen")}


def moved(tensors: Mapping[str, torch.Tensor], seed: int, by: float = 1e-4) -> dict[str, torch.Tensor]:
    """Every tensor but the frozen one a little further, as an optimizer does."""
    chance = torch.Generator().manual_seed(100 + seed)
    return {
        name: x.clone() if name == "frozen" else x + by * torch.randn(x.shape, generator=chance)
        for name, x in tensors.items()
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("parent", ["auto", "ram", "disk"])
def test_small_moves_are_stored_as_differences_and_load_exactly(
    tmp_path: Path, parent: str, threads: int
) -> None:
    first = weights(size=700_000)
    second = moved(first, 1)
    with lf_ckpt.open(tmp_path, parent=parent, threads=threads) as store:  # type: ignore[arg-type]
        full = store.save(1, first).wait()
        delta = store.save(2, second).wait()
        assert_same(store.load(2).tensors, second)
        assert_same(store.load(1).tensors, first)

    assert (full.kind, delta.kind, delta.base) == ("full", "delta", "1")
    assert delta.codecs["difference+planes+zstd"] == 2 * 2_800_000
    assert delta.codecs["same-as-parent"] == 2_800_000
    assert delta.codecs_stored["difference+planes+zstd"] < 0.75 * 2 * 2_800_000
    kept, read = (0, 5_600_000) if parent == "disk" else (8_400_000, 0)
    assert f"base: {kept} bytes in memory" in delta.deltas
    assert int(delta.deltas.split(" in memory, ")[1].split()[0]) >= read


def test_what_exceeds_the_budget_is_read_back(tmp_path: Path) -> None:
    first = weights(size=262_144)
    with lf_ckpt.open(tmp_path, parent_bytes=1 << 20) as store:
        assert store.save(1, first).wait().deltas == f"base: {1 << 20} bytes kept in memory"
        second = moved(first, 1)
        report = store.save(2, second).wait()
        assert report.codecs["difference+planes+zstd"] == 2 << 20
        assert "1048576 bytes in memory, 2097152 read back" in report.deltas  # sampled, then encoded
        assert_same(store.load(2).tensors, second)


@pytest.mark.parametrize("options", [{"parent": "off"}, {"compress": "raw"}, {"compress": "zstd"}])
def test_deltas_can_be_switched_off(tmp_path: Path, options: dict[str, str]) -> None:
    first = weights()
    with lf_ckpt.open(tmp_path, **options) as store:  # type: ignore[arg-type]
        store.save(1, first).wait()
        report = store.save(2, moved(first, 1)).wait()
    assert report.codecs.keys() <= {"raw", "planes+zstd", "same-as-parent"}
    assert report.deltas == ""


def test_a_state_too_large_for_memory_as_asked_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    with (
        lf_ckpt.open(tmp_path, parent="ram", parent_bytes=1000) as store,
        pytest.raises(lf_ckpt.CkptError, match="parent_bytes"),
    ):
        store.save(1, weights())


@pytest.mark.parametrize(
    "bad", [{"parent": "cloud"}, {"parent_bytes": -1}, {"parent": "ram", "compress": "raw"}]
)
def test_options_that_contradict_themselves_are_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="parent"):
        lf_ckpt.open(tmp_path, **bad)  # type: ignore[arg-type]


def test_the_budget_is_a_quarter_of_free_memory_unless_given() -> None:
    assert parent_budget(Options(), 100, 4000) == 1000
    assert parent_budget(Options(), 100, None) == 1 << 30
    assert parent_budget(Options(parent_bytes=7), 100, 4000) == 7
    assert parent_budget(Options(parent="disk"), 100, 4000) == 0
    assert parent_budget(Options(parent="ram"), 100, 4000) == 4000


def test_a_delta_that_is_hardly_smaller_is_the_last_on_its_base(tmp_path: Path) -> None:
    first = weights(size=100_000) | {"frozen": torch.ones(2500)}
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
        delta = store.save(2, weights(seed=1, size=100_000) | {"frozen": first["frozen"]}).wait()
        follow = store.save(3, moved(first, 3)).wait()

    assert (delta.kind, delta.codecs["same-as-parent"]) == ("delta", 10_000)
    assert "the next save is full" in delta.deltas
    assert follow.kind == "full"


def test_a_stream_that_never_pays_is_read_back_once_per_base(tmp_path: Path) -> None:
    first = weights() | {"noise": torch.randn(700_000)}
    with lf_ckpt.open(tmp_path, parent="disk") as store:
        store.save(1, first).wait()
        reads = []
        for step in (2, 3, 4):
            now = moved(first, step) | {"noise": torch.randn(700_000)}
            report = store.save(step, now).wait()
            assert report.codecs["planes+zstd"] >= 2_800_000
            reads.append(int(report.deltas.split(" in memory, ")[1].split()[0]))

    paying = 2 * 2 * 160_000  # sampled and encoded
    assert reads[1] - reads[0] == reads[2] - reads[1] == paying
    assert reads[0] == paying + (1 << 20)


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_base_that_fails_on_read_back_makes_this_save_full_and_the_next(
    tmp_path: Path, damage: str
) -> None:
    first = {name: x for name, x in weights().items() if name != "frozen"}
    second, third = moved(first, 1), moved(first, 2)
    with lf_ckpt.open(tmp_path, parent="disk") as store:
        store.save(1, first).wait()
        path = tmp_path / "steps/1" / DATA
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.unlink() if damage == "gone" else path.write_bytes(data)
        report = store.save(2, second).wait()
        assert report.kind == "full"
        assert report.codecs.keys() <= {"raw", "planes+zstd"}
        assert "not used further" in report.deltas
        assert store.save(3, third).wait().base in (None, "2")
        assert_same(store.load(2).tensors, second)
        assert_same(store.load(3).tensors, third)


def test_a_base_that_fails_half_way_is_not_referred_to_from_there_on(tmp_path: Path) -> None:
    first = weights()
    second = moved(first, 1)
    with lf_ckpt.open(tmp_path, parent="disk") as store:
        store.save(1, first).wait()
        path = tmp_path / "steps/1" / DATA
        data = bytearray(path.read_bytes())
        data[4096 + 140_000] ^= 1  # in tensor b
        path.write_bytes(data)
        report = store.save(2, second).wait()
        assert report.codecs["difference+planes+zstd"] == 160_000  # a only
        assert "same-as-parent" not in report.codecs  # frozen comes after b
        assert "next save is full" in report.deltas
        assert store.save(3, moved(first, 2)).wait().kind == "full"
        assert_same(store.load(2).tensors, second)


def test_a_delta_whose_parent_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    first = weights()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
        store.save(2, moved(first, 1)).wait()
    path = tmp_path / "steps/1" / DATA
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)

    into = {name: torch.zeros_like(x) for name, x in first.items()}
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        with pytest.raises(lf_ckpt.CorruptError, match=r"steps/1/.*tensor a"):
            store.load(2)
        with pytest.raises(lf_ckpt.CorruptError):
            store.load(2, into=into)
    assert not any(x.any() for x in into.values())  # nothing was touched


def test_a_step_that_was_loaded_serves_as_base_of_deltas(tmp_path: Path) -> None:
    first = weights()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
    with lf_ckpt.open(tmp_path) as store:
        store.load()
        second = moved(first, 1)
        report = store.save(2, second).wait()
        assert (report.base, report.codecs["difference+planes+zstd"]) == ("1", 320_000)
        assert "320000" in report.deltas or "640000" in report.deltas
        assert_same(store.load(2).tensors, second)


def test_a_reshaped_or_retyped_tensor_has_no_parent(tmp_path: Path) -> None:
    first = weights()
    second = moved(first, 1)
    second["a"] = second["a"].reshape(200, 200)
    second["b"] = second["b"].view(torch.int32)
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
        report = store.save(2, second).wait()
        assert report.codecs.keys() <= {"raw", "planes+zstd", "same-as-parent"}
        assert_same(store.load(2).tensors, second)


def test_dirty_units_are_found_by_their_hashes_without_the_base(tmp_path: Path) -> None:
    first = {"table": torch.randn(4096, 256)}
    second = copy_of(first)
    second["table"][::400] += 1
    with lf_ckpt.open(tmp_path, parent_bytes=0) as store:
        store.save(1, first).wait()
        report = store.save(2, second).wait()
        assert report.codecs == {"dirty-units": 4 << 20}
        assert ", 0 read back" in report.deltas
        assert report.bytes_written < 0.1 * report.bytes_raw
        assert_same(store.load(2).tensors, second)


def test_memory_of_the_last_base_is_used_again() -> None:
    raw = np.arange(4096, dtype=np.uint8)
    parents = ParentBytes(10_000)
    parents.keep(("w",), 0, raw)
    before = parents.extent(("w",), 0, 4096)
    after = parents.successor(10_000)
    assert after.extent(("w",), 0, 4096) is None
    after.keep(("w",), 0, raw[::-1].copy())

    assert after.extent(("w",), 0, 4096) is before
    assert after.extent(("w",), 0, 4095) is None
    assert parents.extent(("w",), 0, 4096) is None


def test_choices_follow_what_changed() -> None:
    chance = np.random.default_rng(0)
    old = chance.standard_normal(1 << 18).astype(np.float32)
    few, near, rows = old.copy(), old + np.float32(1e-4), old.copy()
    few[::100] += 1e-4
    rows[:4096] = chance.standard_normal(4096)
    noise = chance.integers(0, 256, 1 << 20, np.uint8)

    def chosen(new: np.ndarray, width: int = 4, parent: bool = True) -> int:
        before = old.view(np.uint8) if parent else None
        return StreamChooser(width, "auto", lambda start, size: before).choose(0, new.view(np.uint8)).codec

    assert chosen(few) == CHANGED
    assert chosen(near) == SUB
    assert chosen(rows) in (CHANGED, DIRTY)
    assert chosen(near, parent=False) == PLANES
    assert chosen(noise, 1) == RAW
    assert SAME not in {chosen(few), chosen(near)}


def test_every_sixteenth_extent_is_sampled() -> None:
    asked: list[int] = []

    def parent(start: int, size: int) -> None:
        asked.append(start)

    chooser = StreamChooser(4, "auto", parent)
    raw = np.zeros(4096, np.uint8)
    for number in range(33):
        chooser.choose(number * 4096, raw)
    assert asked == [0, 16 * 4096, 32 * 4096]
