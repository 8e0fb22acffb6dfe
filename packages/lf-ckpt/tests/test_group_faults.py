"""Errors that only one rank of a group has: all ranks hear of them at once, and say the same."""

from __future__ import annotations

from pathlib import Path

import ckpt_group_fault_jobs as jobs
import pytest
from ckpt_ranks import Ranks
from ckpt_states import bits
from test_filling import tensors, write

import lf_ckpt


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("case", "own", "words"),
    [
        ("option", "ValueError", "io='fast'"),
        ("timeout", "ValueError", "group_timeout=inf"),
        ("place", "CkptError", 'mode="local" is for paths'),
        ("reader", "RankFailedError", "rank 1: wants opening for"),
    ],
)
def test_an_open_that_one_rank_cannot_begin_fails_on_all_at_once(
    ranks: Ranks, tmp_path: Path, case: str, own: str, words: str, broken: int
) -> None:
    """With a group_timeout that is longer than the test may take."""
    answers = ranks.call(jobs.open_what_cannot_be, 2, path=str(tmp_path), case=case, broken=broken)
    for rank, (message, step) in enumerate(answers):
        assert message.startswith(own if rank == broken else "RankFailedError: opening for"), message
        assert words in message
        assert step == 1


def test_ranks_that_would_open_different_stores_open_none(ranks: Ranks, tmp_path: Path) -> None:
    """Paths on a disk of each host, and a store of another run on one of them: no rank would miss its files."""
    lf_ckpt.open(tmp_path / "other").close()
    for message, step in ranks.call(jobs.open_what_cannot_be, 2, path=str(tmp_path), case="store", broken=1):
        assert message.startswith("RankFailedError: use of store"), message
        assert step == 1


def test_after_a_disk_that_failed_on_one_rank_all_load_the_older_step(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    older = {name: bits(tensor) for name, tensor in tensors(1).items()}
    for outcome, why, now in ranks.call(jobs.fail_after_the_check, 2, path=str(tmp_path), strict=True):
        assert outcome == "1", outcome
        assert "HalfLoadedError: step 2" in why
        assert now == older


def test_where_no_older_step_may_follow_every_rank_says_what_it_holds(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    first, second = ranks.call(jobs.fail_after_the_check, 2, path=str(tmp_path), strict=False)

    newer = {name: bits(tensor) for name, tensor in tensors(2).items()}
    assert first[0].startswith("RankFailedError: step 2 was not loaded on all ranks (here it was"), first[0]
    assert "rank 1: HalfLoadedError: step 2" in first[0]
    assert first[2] == newer
    assert second[0].startswith("HalfLoadedError: step 2"), second[0]
    assert second[2] != newer
