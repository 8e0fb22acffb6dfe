"""Which steps stay: the pure rule by properties, and the store that applies it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_states import assert_same, state
from hypothesis import given
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt.retention import Every, Kept, Last, doomed

rules = st.lists(st.builds(Last, st.integers(1, 5)) | st.builds(Every, st.integers(1, 6)), max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[Kept]:
    """Steps in order, some with a second attempt, deltas on the base before them."""
    entries: list[Kept] = []
    base: str | None = None
    for step in sorted(draw(st.sets(st.integers(0, 40), max_size=20))):
        for attempt in range(draw(st.integers(1, 2))):
            folder = f"{step}.{attempt}" if attempt else str(step)
            parent = base if base is not None and draw(st.booleans()) else None
            entries.append(Kept(folder, step, attempt, parent))
            base = folder if parent is None else base
    return entries


@given(histories(), rules, st.data())
def test_what_retention_removes(entries: list[Kept], keep: list[Last | Every], data: st.DataObject) -> None:
    folders = [entry.folder for entry in entries]
    protect = data.draw(st.sets(st.sampled_from(folders), max_size=2)) if folders else set()

    gone = set(doomed(entries, keep, protect))

    alive = [entry for entry in entries if entry.folder not in gone]
    steps = sorted({entry.step for entry in entries})
    assert gone <= set(folders)
    assert not gone & protect
    assert bool(alive) == bool(entries)  # a store is never emptied
    assert all(entry.parent in {a.folder for a in alive} for entry in alive if entry.parent)  # bases live
    if not keep:
        assert not gone
    for rule in keep:
        assert set(rule.wanted(steps)) <= {entry.step for entry in alive}
    needed = {step for rule in keep for step in rule.wanted(steps)} | set(steps[-1:])
    bases = {entry.parent for entry in alive}
    for entry in alive if keep else []:
        assert entry.step in needed or entry.folder in bases | protect  # nothing is kept without a reason


@given(histories(), rules)
def test_retention_is_stable(entries: list[Kept], keep: list[Last | Every]) -> None:
    gone = set(doomed(entries, keep))

    assert doomed([entry for entry in entries if entry.folder not in gone], keep) == []


@pytest.mark.parametrize("make", [lambda: Last(0), lambda: Every(0), lambda: Every(steps=-5)])
def test_rules_that_keep_nothing_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"keep at least|positive"):
        make()  # type: ignore[operator]


def test_rules_join_with_or(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[Last(2), Every(steps=10)]) as store:
        removed = [store.save(step, state(step)).wait().removed for step in range(0, 31, 5)]

        assert store.steps() == (0, 10, 20, 25, 30)
        assert removed == [(), (), (), ("5",), (), ("15",), ()]
        assert_same(store.load(10).tensors, state(10))


def test_the_step_just_saved_stays_even_when_newer_ones_exist(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[Last(1)]) as store:
        store.save(100, state(1)).wait()
        store.save(50, state(2)).wait()  # training went back

        assert store.steps() == (50, 100)


def test_steps_of_another_store_are_not_removed(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "a") as store:
        store.save(1, state()).wait()
    with lf_ckpt.open(tmp_path / "b", keep=[Last(1)]) as store:
        (tmp_path / "a/steps/1").rename(tmp_path / "b/steps/1")
        store.save(2, state(2)).wait()
        store.save(3, state(3)).wait()

        assert store.steps() == (1, 3)
        assert_same(store.load(1).tensors, state())


def test_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, keep=[Last(1)]) as store:
        store.save(1, state()).wait()
        (tmp_path / "steps/1/notes.txt").write_text("mine")
        store.save(2, state(2)).wait()

        assert store.steps() == (1, 2)
        assert_same(store.load(1).tensors, state())
