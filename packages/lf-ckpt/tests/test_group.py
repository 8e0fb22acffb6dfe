"""Stores that several real Gloo ranks write together, and loads on any number of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ckpt_group_jobs as jobs
import pytest
import torch
from ckpt_ranks import DIED, Ranks
from ckpt_states import bits, files_under
from test_corruption import flip_in_extent
from test_format import read_by_the_spec

import lf_ckpt
from lf_ckpt import cli


@pytest.fixture(scope="module")
def trained(fsdp_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Bits]:
    """A tiny FSDP2 model with AdamW saved by three ranks."""
    path = tmp_path_factory.mktemp("group") / "store"
    saved, *others = fsdp_ranks.call(jobs.save_trained, 3, path=str(path), step=7)
    assert all(other == saved for other in others)
    return path, saved


def test_a_step_of_three_ranks_is_three_files_and_reads_as_whole_tensors(
    trained: tuple[Path, jobs.Bits],
) -> None:
    path, saved = trained
    names = {f"steps/7/rank-{rank}.lfckpt" for rank in range(3)}
    assert names < files_under(path)
    with lf_ckpt.open(path, read_only=True) as store:
        tensors = store.load().tensors
    assert {name: bits(tensor) for name, tensor in tensors.items()} == saved
    assert read_by_the_spec(path, "7") == saved
    assert cli.main(["verify", str(path), "--deep"]) == 0


def test_shards_are_uneven_and_some_ranks_have_none(trained: tuple[Path, jobs.Bits]) -> None:
    """What the fixture is there for: 7 rows on 3 ranks, 2 rows on 3 ranks, a 0-dim step."""
    body = json.loads((trained[0] / "steps/7/MANIFEST").read_bytes())["body"]
    shards = {t["name"]: [s["shape"] for s in t["shards"]] for t in body["tensors"]}
    assert shards["model.first.weight"] == [[3, 6], [3, 6], [1, 6]]
    assert shards["model.second.bias"] == [[1], [1]]
    assert shards["optim.second.bias.exp_avg"] == [[1], [1]]
    assert shards["optim.second.bias.step"] == [[]]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_step_of_three_ranks_loads_on_any_number(
    ranks: Ranks, trained: tuple[Path, jobs.Bits], world: int
) -> None:  # case A8
    path, saved = trained
    for found, _ in ranks.call(jobs.load_trained, world, path=str(path)):
        assert found == saved


def test_a_group_of_several_ranks_keeps_the_values_of_one_process(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    """The same model trained and saved by one rank and by two gives the bytes that it gathers to."""
    (alone,) = fsdp_ranks.call(jobs.save_trained, 1, path=str(tmp_path / "one"), step=1)
    two, _ = fsdp_ranks.call(jobs.save_trained, 2, path=str(tmp_path / "two"), step=1)
    for name, wanted in (("one", alone), ("two", two)):
        with lf_ckpt.open(tmp_path / name, read_only=True) as store:
            assert {n: bits(t) for n, t in store.load().tensors.items()} == wanted


@pytest.fixture(scope="module")
def stepped(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("steps") / "store"
    return path, ranks.call(jobs.save_steps, 3, path=str(path))


def test_deltas_of_a_group_refer_to_each_ranks_own_file(stepped: tuple[Path, list]) -> None:  # type: ignore[type-arg]
    path, answers = stepped
    assert all(answer["kinds"] == ["full", "delta", "delta"] for answer in answers)
    full, same, changed = zip(*(answer["written"] for answer in answers), strict=True)
    assert sum(same) < sum(full) // 20  # nothing has changed
    assert changed[1] > same[1]  # one row of rank 1 has
    assert changed[0] + changed[2] < (full[0] + full[2]) // 20
    with lf_ckpt.open(path, read_only=True) as store:
        assert bits(store.load(3).tensors["rows"]) == answers[0]["rows"]
    assert cli.main(["verify", str(path), "--deep"]) == 0


def test_replicated_tensors_are_stored_once_and_spread(stepped: tuple[Path, list]) -> None:  # type: ignore[type-arg]
    body = json.loads((stepped[0] / "steps/1/MANIFEST").read_bytes())["body"]
    places = {t["name"]: [s["extents"][0] for s in t["shards"]] for t in body["tensors"]}
    assert places["rows"] == [0, 1, 2]
    assert len(places["shared"]) == len(places["only"]) == 1
    assert places["shared"] != places["only"]
    assert places["of rank 1"] == [1]


def test_items_are_those_of_rank_0_but_for_the_names_kept_per_rank(
    ranks: Ranks,
    stepped: tuple[Path, list],  # type: ignore[type-arg]
) -> None:
    path, answers = stepped
    for rank, answer in enumerate(answers):
        items, rng, names = answer["own"]
        assert items == {"epoch": 0, "note": b"rank 0", "rng": bytes([rank]), "loader": {"rank": rank}}
        assert rng == [rank]
        assert names == ["of rank 1", "only", "rng.torch", "rows", "shared"]
    more = ranks.call(jobs.load_items, 5, path=str(path))
    assert more == [
        (b"\0", 0, True, b"\0"), (b"\1", 0, True, b"\0"), (b"\2", 0, True, b"\0"),
        (None, 0, False, b"\0"), (None, 0, False, b"\0"),
    ]  # fmt: skip
    with lf_ckpt.open(path, read_only=True) as store:
        assert store.load(1).items["rng"] == b"\0"
        assert store.load(1, rank=2).items["loader"] == {"rank": 2}


def test_two_dimensional_meshes_store_each_part_once(ranks: Ranks, tmp_path: Path) -> None:
    raw = [answer for (answer,) in ranks.call(jobs.save_hsdp, 4, path=str(tmp_path))]
    tensor = torch.arange(5 * 7.0).view(5, 7)
    assert sum(raw) == 3 * tensor.numel() * 4 + 4
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        found = store.load(1).tensors
    assert {n: bits(t) for n, t in found.items()} == {
        "hsdp": bits(tensor), "both": bits(tensor), "all": bits(tensor), "scalar": bits(torch.tensor(3.0)), "none": b"",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "words", "own"),
    [
        ("partial", "redistribute", {0: "UnsupportedError", 1: "UnsupportedError"}),
        ("unsupported", "rank 1: UnsupportedError: x", {0: "RankFailedError", 1: "UnsupportedError"}),
        ("shapes", "per_rank", {0: "CkptError", 1: "RankFailedError"}),
        ("steps", "saves step 3", {0: "RankFailedError", 1: "RankFailedError"}),
        ("no list", "per_rank='rng': a list", {0: "RankFailedError", 1: "ValueError"}),
        ("no step", "step tensor(2): a whole number", {0: "RankFailedError", 1: "ValueError"}),
    ],
)
def test_what_one_rank_cannot_save_fails_on_all_and_the_next_save_works(
    ranks: Ranks, tmp_path: Path, case: str, words: str, own: dict[int, str]
) -> None:
    answers = ranks.call(jobs.save_what_cannot_be, 2, path=str(tmp_path), case=case)
    for rank, answer in enumerate(answers):
        assert answer.startswith(own[rank]), answer
        assert words in answer or (own[rank] != "RankFailedError" and case == "unsupported"), answer
    names = ("MANIFEST", "rank-0.lfckpt", "rank-1.lfckpt")
    assert files_under(tmp_path / "steps") == {f"{step}/{name}" for step in (1, 9) for name in names}


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("case", "own", "words"),
    [
        ("device", "UnsupportedError", "device warp:3"),
        ("options", "ValueError", "needs strict=True"),
        ("step", "RankFailedError", "wants load of step 2"),
        ("rank", "ValueError", "rank=-1"),
    ],
)
def test_a_load_that_one_rank_cannot_begin_fails_on_all_at_once(
    ranks: Ranks, tmp_path: Path, case: str, own: str, words: str, broken: int
) -> None:
    """With a group_timeout that is longer than the test may take."""
    answers = ranks.call(jobs.load_what_cannot_be, 2, path=str(tmp_path), case=case, broken=broken)
    for rank, (message, step) in enumerate(answers):
        assert message.startswith(own if rank == broken else "RankFailedError: load of step 1"), message
        assert words in message
        assert step == 1


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_on_one_rank_fails_the_step_on_all_and_leaves_nothing(
    ranks: Ranks, tmp_path: Path, on_error: str
) -> None:
    answers = ranks.call(jobs.save_on_a_full_disk, 3, path=str(tmp_path), on_error=on_error)
    for rank, (text, steps) in enumerate(answers):
        assert steps == (1, 3)
        if on_error == "raise":
            assert text.startswith("DiskFullError" if rank == 1 else "RankFailedError"), text
        assert "no space" in text
        assert rank == 1 or "rank 1: DiskFullError" in text
    assert sorted(os.listdir(tmp_path / "steps")) == ["1", "3"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_a_save_is_named_and_the_step_before_loads(
    ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    answers = ranks.call(jobs.die_in_a_save, 3, may_die=True, path=str(tmp_path), victim=victim)

    assert answers.pop(victim) == DIED
    for first, second in answers:
        assert first.startswith(f"PeerLostError: rank {victim} "), first
        assert second.startswith(f"PeerLostError: rank {victim} "), second
    with lf_ckpt.open(tmp_path) as store:
        assert store.steps() == (1,)
        assert bits(store.load().tensors["x"]) == bits(torch.arange(300_000))
    assert os.listdir(tmp_path / "steps") == ["1"]


def test_all_ranks_fall_back_when_one_meets_damage(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(jobs.save_two, 3, path=str(tmp_path))
    flip_in_extent(tmp_path / "steps/2/rank-1.lfckpt", "x")

    for rank, (step, text, values) in enumerate(ranks.call(jobs.load_with_a_bad_file, 3, path=str(tmp_path))):
        assert step == 1
        assert "rank-1.lfckpt" in text
        assert ("RankFailedError" in text) == (rank != 1)
        assert values == [100_000 * rank + 1 + i for i in range(3)]


def test_a_store_that_is_held_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        first, second = ranks.call(jobs.open_locked, 2, path=str(tmp_path))
        assert store.save(1, {"x": torch.ones(1)}).wait().kind == "full"
    assert first.startswith("LockedError")
    assert second.startswith("RankFailedError")
    assert "rank 0: LockedError" in second


def test_a_shard_without_a_group_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.call(jobs.save_alone, 2, path=str(tmp_path))
    assert all("group=" in answer for answer in answers)


def test_stores_follow_one_another_and_lie_side_by_side_on_the_same_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Found by the tests of DCP: a Gloo group made again under the name of a destroyed one hangs."""
    for steps in ranks.call(jobs.reopen, 3, path=str(tmp_path / "store")):
        assert steps == [(1,), (1, 2), (1, 2, 3), (4,)]
