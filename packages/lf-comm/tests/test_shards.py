"""FSDP2: the replicas of a shard are averaged by blocks, and what cannot be is refused by name."""

from __future__ import annotations

import comm_shard_jobs as jobs
from comm_ranks import Ranks


def test_replicas_that_send_all_get_the_weights_of_ddp(ranks: Ranks) -> None:
    answers = ranks.call(jobs.sharded, 4, threshold=1.0)
    for answer in answers:
        assert answer["weights"] == answers[0]["weights"]
        assert answer["apart"] < 1e-6
        assert answer["residuals"] == {}
        assert set(answer["paths"].values()) == {"dense"}
        assert "frozen" not in answer["paths"]


def test_replicas_that_send_blocks_stay_together_and_keep_the_rest_by_name(ranks: Ranks) -> None:
    answers = ranks.call(jobs.sharded, 4, threshold=0.0)
    for answer in answers:
        assert answer["weights"] == answers[0]["weights"]
        assert answer["apart"] > 1e-4
        assert {n for n, path in answer["paths"].items() if path == "blocks"} == set(answer["residuals"])
        # 97 rows over 2 ranks are 49 each, one of them padding
        assert answer["residuals"]["first.weight"][0] == (49 * 61,)
        assert answer["residuals"]["odd.weight"][0] == (49 * 97,)
        assert all(size > 0 for _, size in answer["residuals"].values())
        assert 0 < answer["sent"] < 0.6 * ranks_dense(answer)


def ranks_dense(answer: dict[str, object]) -> int:
    """Bytes of four dense sums of a rank's shards over two replicas."""
    return 4 * 4 * (49 * 61 + 49 * 97 + 17 * 97 + 49 * 2 + 17 + 3)


def test_what_is_no_replica_is_refused(ranks: Ranks) -> None:
    for said in ranks.call(jobs.refused, 4):
        for words, text in zip(
            ("fully_shard", "mesh of 2 dimensions", "group= is to be", "group= is to be", "made of"),
            said,
            strict=True,
        ):
            assert text.startswith("ShardError")
            assert words in text
