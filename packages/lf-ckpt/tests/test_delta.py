"""Deltas: a star on the last base, by content, and never at the cost of the right bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_states import assert_same, copy_of, state

import lf_ckpt


def test_unchanged_extents_cost_nothing(tmp_path: Path) -> None:
    tensors = state()
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        full = store.save(1, tensors).wait()
        tensors["layer1.weight"][7] += 1
        delta = store.save(2, tensors).wait()

        assert (full.kind, full.base) == ("full", None)
        assert (delta.kind, delta.base) == ("delta", "1")
        assert delta.bytes_shared == 2 * 80_000 + 8  # and the counter, once the step is tied to its base
        assert delta.bytes_written < full.bytes_written / 2
        assert_same(store.load().tensors, tensors)


def test_only_changed_extents_of_a_large_tensor_are_written(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5_000_000)}
    with lf_ckpt.open(tmp_path, compress="raw") as store:
        store.save(1, tensors).wait()
        tensors["w"][2_500_000] += 1
        report = store.save(2, tensors).wait()

        assert report.codecs["raw"] == 1 << 20
        assert_same(store.load().tensors, tensors)


def test_every_delta_names_the_base_and_never_another_delta(tmp_path: Path) -> None:
    tensors = state()
    saved = {}
    with lf_ckpt.open(tmp_path, full_every=3) as store:
        kinds = []
        for step in range(8):
            tensors["step"] = torch.tensor(step)
            tensors["layer0.weight"] = torch.randn(20_000)
            saved[step] = copy_of(tensors)
            report = store.save(step, tensors).wait()
            kinds.append((report.kind, report.base))
        for step, wanted in saved.items():
            assert_same(store.load(step).tensors, wanted)

    assert kinds == [("full", None), *[("delta", "0")] * 3, ("full", None), *[("delta", "4")] * 3]


def test_a_save_that_shares_nothing_is_full_and_the_new_base(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        assert store.save(2, state(2)).wait().kind == "full"
        assert store.save(3, state(2)).wait().base == "2"


def test_full_every_zero_saves_full_steps_only(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, full_every=0) as store:
        assert [store.save(step, state()).wait().kind for step in range(3)] == ["full"] * 3


def test_small_constants_do_not_tie_a_step_to_its_base(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        constant = {"constant": torch.zeros(8)}
        store.save(1, {**state(1, size=200_000), **constant}, {"blob": b"x" * 100}).wait()
        assert (
            store.save(2, {**state(2, size=200_000), **constant}, {"blob": b"x" * 100}).wait().kind == "full"
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"new": torch.randn(30_000)},
        lambda t: {name: x for name, x in t.items() if name != "layer0.weight"},
        lambda t: {name.replace("layer0", "renamed"): x for name, x in t.items()},
        lambda t: t | {"layer0.weight": t["layer0.weight"].reshape(200, 100)},
        lambda t: t | {"layer0.weight": t["layer0.weight"].bfloat16()},
        lambda t: t | {"layer0.weight": t["layer0.weight"].view(torch.int32)},
        lambda t: t | {"layer0.weight": t["layer0.weight"][:100]},
        lambda t: t | {"tied": t["layer1.weight"]},
        lambda t: {},
    ],
    ids=["added", "removed", "renamed", "reshaped", "dtype", "reinterpreted", "shrunk", "tied", "emptied"],
)
def test_any_change_of_the_set_of_tensors_between_saves(tmp_path: Path, change: object) -> None:
    first = state()
    second = change(first)  # type: ignore[operator]
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
        report = store.save(2, second).wait()

        assert_same(store.load(2).tensors, second)
        assert_same(store.load(1).tensors, first)
    # What has not changed is still taken from the base.
    same = {id(tensor): tensor for tensor in second.values() if any(tensor is old for old in first.values())}
    assert report.bytes_shared >= sum(tensor.nbytes for tensor in same.values())
    assert report.kind == ("delta" if same else "full")


def test_a_renamed_tensor_is_found_by_its_content(tmp_path: Path) -> None:
    tensors = state()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, tensors).wait()
        renamed = {"new." + name: tensor for name, tensor in tensors.items()}
        assert store.save(2, renamed).wait().bytes_shared >= 3 * 80_000


def test_the_first_save_of_a_process_is_full_unless_it_has_verified_a_step(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state()).wait()
    with lf_ckpt.open(tmp_path) as store:
        assert store.save(2, state()).wait().kind == "full"
    with lf_ckpt.open(tmp_path, full_every=2) as store:
        store.load()
        assert store.save(3, state()).wait().base == "2"
    with lf_ckpt.open(tmp_path, full_every=2) as store:
        store.load()  # step 3, a delta: what it refers to has been read from step 2
        assert store.save(4, state()).wait().base == "2"
        assert store.save(5, state()).wait().kind == "full"  # two deltas on step 2 exist
        assert_same(store.load(4).tensors, state())


def test_a_base_that_was_removed_by_hand_is_not_used_again(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state()).wait()
        (tmp_path / "steps/1/MANIFEST").unlink()
        assert store.save(2, state()).wait().kind == "full"


def test_a_step_saved_again_supersedes_the_old_one_which_stays_as_base(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(2)]) as store:
        store.save(10, state(0)).wait()
        delta = state(0) | {"step": torch.tensor(99)}
        store.save(20, delta).wait()
    with lf_ckpt.open(tmp_path, keep=[lf_ckpt.Last(2)]) as store:
        assert store.save(10, state(1)).wait().folder == "10.1"

        assert store.steps() == (10, 20)
        assert_same(store.load(10).tensors, state(1))
        assert_same(store.load(20).tensors, delta)
    assert (tmp_path / "steps/10/MANIFEST").exists()
