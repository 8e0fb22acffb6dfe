"""Rounds between real Gloo ranks: everyone tells rank 0, rank 0 answers everyone, and nobody waits for the dead."""

from __future__ import annotations

import pytest
from ckpt_peer_jobs import add_up, fail_to_decide, fall_silent, lose
from ckpt_ranks import DIED, Ranks


def test_everyone_gets_its_own_answer(ranks: Ranks) -> None:
    assert ranks.call(add_up, 3) == [[[3, r], [6, r], [9, r], 3] for r in range(3)]


def test_a_failed_decision_is_raised_everywhere_and_the_next_round_works(ranks: Ranks) -> None:
    first, *others = ranks.call(fail_to_decide, 3)
    assert first == "OSError: [Errno 28] No space left on device; on"
    assert all("rank 0: OSError" in other and other.endswith("; on") for other in others)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_others_at_once(ranks: Ranks, victim: int) -> None:
    answers = ranks.call(lose, 3, may_die=True, victim=victim)

    assert answers.pop(victim) == DIED
    assert answers == [[str(victim)] * 2] * 2


def test_a_silent_rank_is_lost_after_the_patience_of_the_store_that_asks(ranks: Ranks) -> None:
    """Not after that of the first store on these ranks, with which it shares its Gloo group."""
    assert ranks.call(fall_silent, 2)[0] == "rank 1 is lost"
