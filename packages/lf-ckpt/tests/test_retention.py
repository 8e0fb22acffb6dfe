"""Which steps stay: the pure rules by properties, and the store that applies them."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_faults import Killed, Recorder, StopAtCall
from ckpt_states import assert_same, state
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt import AllOf, AnyOf, Best, Candidate, Every, EverySeconds, FileLayer, Last, Phases, cli
from lf_ckpt.catalog import Catalog
from lf_ckpt.retention import Rule, doomed, reasons

few = settings(max_examples=40, deadline=None)  # the machine is shared; the spaces are small
METRICS = st.dictionaries(st.sampled_from(["loss", "score"]), st.floats(), max_size=2)
FLAT = st.one_of(
    st.builds(Last, st.integers(1, 5)),
    st.builds(Every, st.integers(1, 6)),
    st.builds(EverySeconds, st.integers(1, 30)),
    st.builds(Best, st.sampled_from(["loss", "score"]), st.integers(1, 3), st.sampled_from(["min", "max"])),
    st.builds(
        lambda first, pairs: Phases(((0, first), *sorted(dict(pairs).items()))),
        st.integers(1, 4),
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=2),
    ),
)
RULE = st.recursive(
    FLAT,
    lambda r: (
        st.builds(AnyOf, st.lists(r, min_size=1, max_size=3))
        | st.builds(AllOf, st.lists(r, min_size=1, max_size=3))
    ),
)
RULES = st.lists(RULE, max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Steps in order, some with a second attempt; full, a delta on the last full one, or a link of a chain.

    The clock may be set back.
    """
    entries: list[Candidate] = []
    base: str | None = None
    for step in sorted(draw(st.sets(st.integers(0, 40), max_size=20))):
        for attempt in range(draw(st.integers(1, 2))):
            folder = f"{step}.{attempt}" if attempt else str(step)
            kind = draw(st.sampled_from(["full", "star", "chain"]))
            parent = {"full": None, "star": base, "chain": entries[-1].folder if entries else None}[kind]
            entries.append(Candidate(folder, step, attempt, parent, draw(st.integers(0, 100)), draw(METRICS)))
            base = folder if parent is None else base
    return entries


def some(entries: list[Candidate], data: st.DataObject) -> set[str]:
    folders = [entry.folder for entry in entries]
    return data.draw(st.sets(st.sampled_from(folders), max_size=2)) if folders else set()


@few
@given(histories(), RULES, st.data())
def test_what_retention_removes(entries: list[Candidate], keep: list[Rule], data: st.DataObject) -> None:
    protect = some(entries, data)

    gone = set(doomed(entries, keep, protect))

    alive = {entry.folder: entry for entry in entries if entry.folder not in gone}
    newest = list({entry.step: entry for entry in entries}.values())
    assert gone <= {entry.folder for entry in entries}
    assert not gone & protect
    assert not entries or newest[-1].folder in alive  # a store is never emptied, the newest step always stays
    assert all(
        entry.parent in alive for entry in alive.values() if entry.parent
    )  # no link without the one before
    if not keep:
        assert not gone
    wanted = {step for rule in keep for step in rule.wanted(newest)}
    assert wanted <= {entry.step for entry in alive.values()}
    referred = {entry.parent for entry in alive.values()}
    for entry in alive.values() if keep else []:  # nothing is kept without a reason
        assert entry.step in wanted or entry is newest[-1] or entry.folder in referred | protect


@few
@given(histories(), RULES, st.data())
def test_dying_between_two_removals_leaves_no_delta_without_its_base(
    entries: list[Candidate], keep: list[Rule], data: st.DataObject
) -> None:
    order = doomed(entries, keep, some(entries, data))

    for count in range(len(order)):
        left = {entry.folder for entry in entries} - set(order[:count])
        assert all(entry.parent in left for entry in entries if entry.folder in left and entry.parent)


@few
@given(histories(), RULES, st.data())
def test_retention_is_stable(entries: list[Candidate], keep: list[Rule], data: st.DataObject) -> None:
    protect = some(entries, data)
    gone = set(doomed(entries, keep, protect))

    assert doomed([entry for entry in entries if entry.folder not in gone], keep, protect) == []


@few
@given(histories(), RULES)
def test_the_order_in_which_steps_are_listed_does_not_matter(
    entries: list[Candidate], keep: list[Rule]
) -> None:
    assert doomed(entries[::-1], keep) == doomed(entries, keep)


def test_a_delta_saved_for_an_older_step_is_removed_before_its_base() -> None:
    entries = [Candidate("50", 50, 0, parent="100"), Candidate("100", 100, 0), Candidate("200", 200, 0)]

    assert doomed(entries, [Last(1)]) == ["50", "100"]


def test_a_circle_of_parents_ends() -> None:
    entries = [Candidate("1", 1, 0, parent="2"), Candidate("2", 2, 0, parent="1")]

    assert doomed(entries, [Last(1)]) == []


def test_every_kept_step_has_a_reason() -> None:
    entries = [
        Candidate("1", 1, 0),
        Candidate("2", 2, 0, "1"),
        Candidate("3", 3, 0),
        Candidate("4", 4, 0, "3"),
    ]

    assert reasons(entries, [Every(2)], ["2"]) == {
        "4": "the newest step",
        "2": "Every(steps=2)",
        "1": "2 refers to it",
        "3": "4 refers to it",
    }


def at(step: int, created: int = 0, **metrics: float) -> Candidate:
    return Candidate(str(step), step, 0, None, created, metrics)


def test_every_seconds_keeps_the_first_step_of_each_interval() -> None:
    steps = [at(1, 100), at(2, 159), at(3, 160), at(4, 170), at(5, 240), at(6, 241)]

    assert list(EverySeconds(60).wanted(steps)) == [1, 2, 5]


def test_best_keeps_the_lowest_or_highest_and_the_newer_of_equals() -> None:
    steps = [at(1, loss=3.0), at(2, loss=1.0), at(3), at(4, loss=1.0), at(5, loss=math.nan), at(6, loss=2.0)]

    assert list(Best("loss").wanted(steps)) == [4]
    assert list(Best("loss", 3).wanted(steps)) == [4, 2, 6]
    assert list(Best("loss", 1, "max").wanted(steps)) == [1]
    assert list(Best("accuracy").wanted(steps)) == []


def test_phases_say_when_to_save_and_what_to_keep() -> None:
    phases = Phases(((0, 5), (1000, 20), (10000, 100)))
    due = [step for step in range(12001) if phases.due(step)]

    assert due == [*range(0, 1000, 5), *range(1000, 10000, 20), *range(10000, 12001, 100)]
    assert phases.distance(999) == 5
    assert list(phases.wanted([at(994), at(995), at(1005), at(1020), at(10020), at(10100)])) == [
        995,
        1020,
        10100,
    ]


def test_rules_combine() -> None:
    steps = [at(step) for step in range(10)]

    assert set(AllOf([Every(2), Last(5)]).wanted(steps)) == {6, 8}
    assert set(AnyOf([Every(4), Last(1)]).wanted(steps)) == {0, 4, 8, 9}


def test_a_step_that_was_moved_away_and_linked_is_kept(tmp_path: Path) -> None:
    """Removing through the link would empty a folder outside of the store, and then fail at the link."""
    with lf_ckpt.open(tmp_path / "store", full_every=0) as store:
        for step in (1, 2):
            store.save(step, {"x": torch.ones(step)}).wait()
    (tmp_path / "store/steps/1").rename(tmp_path / "bulk")
    (tmp_path / "store/steps/1").symlink_to(tmp_path / "bulk")
    for step in (3, 4):
        with lf_ckpt.open(tmp_path / "store", full_every=0, keep=[lf_ckpt.Last(1)]) as store:
            store.save(step, {"x": torch.ones(step)}).wait()
            assert store.steps() == (1, step)
            assert torch.equal(store.load(1).tensors["x"], torch.ones(1))


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "file", "folder inside"])
def test_what_is_no_folder_of_files_is_left_alone_and_the_store_opens(tmp_path: Path, kind: str) -> None:
    outside, place = tmp_path / "outside", tmp_path / "store/steps/9"
    outside.mkdir()
    (outside / "rank-0.lfckpt").write_bytes(b"yours")
    lf_ckpt.open(tmp_path / "store").close()
    if kind == "file":
        place.write_bytes(b"yours")
    elif kind == "folder inside":
        (place / "rank-0.lfckpt").mkdir(parents=True)
    else:
        place.symlink_to({"link": outside, "dangling": tmp_path / "none", "loop": place}[kind])

    with lf_ckpt.open(tmp_path / "store", keep=[lf_ckpt.Last(1)]) as store:
        for step in (8, 9):
            store.save(step, {"x": torch.ones(step)}).wait()
        assert store.steps() == (9,)
        assert store.load().tensors["x"].numel() == 9
    assert (outside / "rank-0.lfckpt").read_bytes() == b"yours"
    assert os.path.lexists(place)
    assert cli.main(["verify", str(tmp_path / "store"), "--deep"]) == 0
    assert cli.main(["gc", str(tmp_path / "store"), "--keep", "last:1"]) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Last(0),
        lambda: Last(1.5),
        lambda: Last(True),
        lambda: Every(0),
        lambda: Every(steps=-5),
        lambda: EverySeconds(0),
        lambda: Best(""),
        lambda: Best("loss", 0),
        lambda: Best("loss", mode="lowest"),
        lambda: Phases(()),
        lambda: Phases(((1, 5),)),
        lambda: Phases(((0, 5), (0, 7))),
        lambda: Phases(((0, 0),)),
        lambda: Phases((0, 5)),
        lambda: Phases(((0, 5, 7),)),
        lambda: Phases(((0, "5"),)),
        lambda: AnyOf(()),
        lambda: AllOf([]),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(lf_ckpt.PolicyError, match=r"keep|positive|give|choose|name|phase"):
        make()


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


def test_best_by_a_metric_given_to_save(tmp_path: Path) -> None:
    losses = {1: 4.0, 2: 0.5, 3: 3.0, 4: math.nan, 5: 2.0}
    with lf_ckpt.open(tmp_path, keep=[Best("loss")]) as store:
        for step, loss in losses.items():
            store.save(step, state(step), metrics={"loss": loss}).wait()

        assert store.steps() == (2, 5)
        assert_same(store.load(2).tensors, state(2))


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": True}, {"loss": torch.tensor(1.0)}, {3: 1.0}, {"loss": 10**400}]
)
def test_metrics_are_numbers(tmp_path: Path, metrics: dict[str, float]) -> None:
    with lf_ckpt.open(tmp_path) as store:
        with pytest.raises(lf_ckpt.UnsupportedError, match="metric"):
            store.save(1, state(), metrics=metrics)
        assert store.steps() == ()


def test_a_pinned_step_and_its_base_stay_until_unpinned(tmp_path: Path) -> None:
    common = {"frozen": torch.randn(100_000)}
    with lf_ckpt.open(tmp_path, keep=[Last(1)], full_every=1) as store:
        store.save(1, common | state(1)).wait()
        assert store.save(2, common | state(2)).wait().base == "1"
        store.pin(2)
        for step in (3, 4, 5):
            store.save(step, state(step)).wait()
        assert store.steps() == (1, 2, 5)
        assert_same(store.load(2).tensors, common | state(2))

        assert store.unpin(2)
        assert not store.unpin(2)
        store.save(6, state(6)).wait()
        assert store.steps() == (6,)
        with pytest.raises(lf_ckpt.NoCheckpointError):
            store.pin(2)


def test_the_base_of_a_folder_with_foreign_files_stays(tmp_path: Path) -> None:
    common = {"frozen": torch.randn(100_000)}
    with lf_ckpt.open(tmp_path, keep=[Last(1)], full_every=1) as store:
        store.save(1, common).wait()
        assert store.save(2, common | state(2)).wait().base == "1"
        (tmp_path / "steps/2/notes.txt").write_text("mine")
        store.save(3, state(3)).wait()
        store.save(4, state(4)).wait()

        assert_same(store.load(2).tensors, common | state(2))


def test_a_delta_without_its_base_does_not_count(tmp_path: Path) -> None:
    common = {"frozen": torch.randn(100_000)}
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        store.save(2, common, {"n": 2}).wait()
        store.save(3, common, {"n": 3}).wait()
    (tmp_path / "steps/2/MANIFEST").write_bytes(b"bad")

    catalog = Catalog(FileLayer(), str(tmp_path))
    catalog.identify()

    assert [c.folder for c in catalog.candidates()] == ["1"]  # 3 refers to 2
    (tmp_path / "steps/1/rank-0.lfckpt").unlink()
    assert [c.folder for c in catalog.candidates()] == []
    assert catalog.retain([Last(1)], (), ()) == []


def test_nothing_is_removed_while_a_step_cannot_be_read(tmp_path: Path) -> None:
    class Unreadable(FileLayer):
        def open(self, path: str) -> int:
            if path.endswith("3/MANIFEST"):
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path)

    with lf_ckpt.open(tmp_path, files=Unreadable()) as store:
        for step in (1, 2, 3):
            store.save(step, state(step)).wait()
        catalog = Catalog(Unreadable(), str(tmp_path))
        catalog.identify()
        with pytest.raises(OSError, match="Input/output"):
            catalog.retain([Last(1)], (), ())
    assert len(list((tmp_path / "steps").iterdir())) == 3


def test_dying_at_any_call_of_retention_leaves_a_store_whose_every_step_loads(tmp_path: Path) -> None:
    common = {"frozen": torch.randn(100_000)}

    def history(path: Path) -> None:
        with lf_ckpt.open(path, full_every=2) as store:
            for step in (10, 5, 20, 30, 40):
                store.save(step, common | state(step)).wait()

    def retain(path: Path, files: FileLayer) -> None:
        catalog = Catalog(files, str(path))
        catalog.identify()
        catalog.retain([Last(1)], (), ())

    history(tmp_path / "count")
    recorder = Recorder()
    retain(tmp_path / "count", recorder)
    assert len(recorder.calls) > 10
    for call in range(len(recorder.calls)):
        path = tmp_path / str(call)
        history(path)
        files = StopAtCall()
        files.arm(call)
        with pytest.raises(Killed):
            retain(path, files)

        with lf_ckpt.open(path) as store:
            assert store.latest() == 40
            for step in store.steps():
                assert_same(store.load(step).tensors, common | state(step))
