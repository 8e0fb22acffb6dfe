"""A rank that exits or stops in the middle of a backward pass is named by the others, and no gradient is left."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import comm_abort_jobs
import comm_jobs as jobs
import comm_lost
import pytest
from comm_ranks import Ranks

import lf_comm


def others(tmp_path: Path, how: str, hook: str, store: str, world: int = 3) -> list[dict[str, Any]]:
    """What the ranks but the one that leaves have found."""
    outs = [tmp_path / f"{rank}.json" for rank in range(world)]
    command = [sys.executable, comm_lost.__file__]
    ranks = [
        subprocess.Popen([*command, str(r), str(world), store, how, hook, str(out)], stderr=subprocess.PIPE)
        for r, out in enumerate(outs)
    ]
    try:
        for rank in (0, 2):
            _, said = ranks[rank].communicate(timeout=100)
            assert ranks[rank].returncode == 3, said.decode()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    return [json.loads(outs[rank].read_text()) for rank in (0, 2)]


@pytest.mark.parametrize(
    ("how", "hook", "store"),
    [("exit", "none", "file"), ("stop", "sparse", "tcp")],
)
def test_a_rank_that_is_gone_is_named_and_no_torn_gradient_is_left(
    tmp_path: Path, how: str, hook: str, store: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{port}"
    for found in others(tmp_path, how, hook, where):
        assert (found["steps"], found["rank"], found["step"], found["op"]) == (2, 1, 2, "backward")
        assert found["gradients"] == 0
        assert (
            found["seconds"] < 4 * comm_lost.TIMEOUT
        )  # 5.0 s when quiet; what a loaded machine adds is its own
        assert "rank 1 is gone" in found["text"]
        assert (found["bucket"] is None) == (hook == "none")


@pytest.mark.parametrize("raises", [True, False])
def test_a_group_that_only_an_abort_ends_is_aborted_and_the_silent_rank_named(
    ranks: Ranks, raises: bool
) -> None:
    found, _ = ranks.call(comm_abort_jobs.aborted, 2, raises=raises)

    assert (found["rank"], found["step"], found["aborts"], found["gradients"]) == (1, 4, 1, 0)
    assert "aborted" in found["cause"]


def test_nothing_is_aborted_outside_of_a_step(ranks: Ranks) -> None:
    assert ranks.call(comm_abort_jobs.outside, 2) == [0, 0]


def test_errors_of_one_rank_alone_stay_what_they_are(ranks: Ranks) -> None:
    for kind, gradients, ages in ranks.call(jobs.own_error, 2):
        assert kind == "RuntimeError: mat"
        assert gradients == 0
        assert set(ages) == {0, 1}


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(lf_comm.PeerLost(3, "backward", 1, 7, 2.5)))
    assert (error.rank, error.op, error.bucket, error.step, error.waited_s) == (3, "backward", 1, 7, 2.5)
    assert "rank 3" in str(error)
    assert "the rank that holds the store" in str(lf_comm.PeerLost(None, "backward", None, 7, 2.5))
