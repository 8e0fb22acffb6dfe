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


def test_rows_of_shards_are_averaged_exactly_and_16_bits_nearly(ranks: Ranks) -> None:
    dense, rows, near = (ranks.call(jobs.by_way, 4, way=way) for way in ("dense", "rows", "accurate"))
    wanted = dense[0]["weights"]
    for answer in rows:
        assert {n: jobs.bits(w) for n, w in answer["weights"].items()} == {
            n: jobs.bits(w) for n, w in wanted.items()
        }
        assert answer["paths"]["table.weight"] in ("gather", "union", "split")
        assert 0 < answer["sent"] < 3 * 2048 * 64 * 4 / 10
    for answer in near:
        assert all(jobs.bits(w) == jobs.bits(near[0]["weights"][n]) for n, w in answer["weights"].items())
        apart = max(float((answer["weights"][n] - w).abs().max()) for n, w in wanted.items())
        assert 0 < apart < 1e-3


def test_what_is_no_replica_is_refused(ranks: Ranks) -> None:
    for said in ranks.call(jobs.refused, 4):
        for words, text in zip(
            ("fully_shard", "mesh of 2 dimensions", "group= is to be", "group= is to be", "made of"),
            said,
            strict=True,
        ):
            assert text.startswith("ShardError")
            assert words in text
