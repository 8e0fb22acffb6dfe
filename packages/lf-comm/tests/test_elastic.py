"""A global batch is shared out whole on any number of ranks, and a job goes on without a rank that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import config_from_args, parse_args

from lf_comm import share_batch, throughput_kept, torchrun_arguments

BENCH = Path(__file__).parents[1] / "benchmarks/bench_elastic.py"


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 16))
def test_every_place_is_in_one_micro_batch_of_one_rank(samples: int, micro: int, ranks: int) -> None:
    count = -(-samples // micro)
    if count < ranks:
        with pytest.raises(ValueError, match=f"At most {samples // ranks} samples"):
            share_batch(samples, micro, ranks=ranks, rank=0)
        return
    shares = [share_batch(samples, micro, ranks=ranks, rank=rank) for rank in range(ranks)]
    cut = [places for share in shares for places in share.micro_batches]
    assert [place for places in cut for place in places] == list(range(samples))
    # As one rank alone cuts them: shapes do not change with the number of ranks.
    assert tuple(cut) == share_batch(samples, micro, ranks=1, rank=0).micro_batches
    lengths = [len(share.micro_batches) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    weights = [share.weight(places) for share in shares for places in share.micro_batches]
    assert sum(weights) / ranks == pytest.approx(1)


def test_the_weighted_sum_over_ranks_is_the_mean_over_the_batch() -> None:
    values = [float(i * i % 17) for i in range(50)]
    for ranks in (1, 3, 4, 7):
        total = 0.0
        for rank in range(ranks):
            share = share_batch(50, 4, ranks=ranks, rank=rank)
            for places in share.micro_batches:
                total += share.weight(places) * sum(values[place] for place in places) / len(places)
        assert total / ranks == pytest.approx(sum(values) / 50)  # DDP divides by the ranks


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"global_batch": 0, "micro_batch": 1, "ranks": 1, "rank": 0}, "global_batch=0"),
        ({"global_batch": 4, "micro_batch": 0, "ranks": 1, "rank": 0}, "micro_batch=0"),
        ({"global_batch": 4, "micro_batch": 1, "ranks": 0, "rank": 0}, "ranks=0"),
        ({"global_batch": 4, "micro_batch": 1, "ranks": 2, "rank": 2}, "rank=2"),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        share_batch(**options)


def test_throughput_follows_the_rank_with_most_micro_batches() -> None:
    assert throughput_kept(12, 4, 3) == 0.75
    assert throughput_kept(16, 4, 3) == pytest.approx(4 / 6)
    assert throughput_kept(12, 4, 4) == 1
    with pytest.raises(ValueError, match="at least one"):
        throughput_kept(2, 4, 3)


def test_torchrun_takes_the_arguments() -> None:
    made = torchrun_arguments((3, 4), "host:29400", "job", per_node=8, standing_store=True)
    config, *_ = config_from_args(parse_args([*made, "train.py"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (3, 4, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "host:29400", "job")
    wanted = {
        "last_call_timeout": "2",
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        "is_host": "0",
    }
    assert {key: str(value) for key, value in config.rdzv_configs.items() if key in wanted} == wanted
    for wrong in ({"nodes": (0, 1)}, {"nodes": (3, 2)}, {"per_node": 0}, {"restarts": -1}, {"patience_s": 1}):
        with pytest.raises(ValueError, match="wanted"):
            torchrun_arguments(**({"nodes": (1, 2), "endpoint": "h:1", "job": "j"} | wrong))  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_go_on_without_the_one_killed_with_the_same_samples(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(BENCH),
        "--json",
        str(out),
        "--sleep",
        "0.05",
        "--steps",
        "14",
        "--kill-at",
        "3",
    ]
    done = subprocess.run(
        [*command, "--ranks", "3", "--victim", "1"], capture_output=True, text=True, timeout=280
    )
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["steps_with_their_samples"] == 14
    assert found["weights_off"] < 1e-5
    assert found["exit_codes"] == [0, 0]
    assert found["attempts"] >= 2
    assert found["samples_per_s_after"] > 0
