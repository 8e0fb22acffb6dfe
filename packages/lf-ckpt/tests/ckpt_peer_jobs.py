"""What ranks do in tests of their messages; a module of its own, for the processes import it by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lf_ckpt
from lf_ckpt.peers import Peers


def new_peers() -> Peers:
    assert dist.group.WORLD is not None
    return Peers(dist.group.WORLD, timeout=20)


def add_up(rank: int) -> list[Any]:
    new_peers()
    peers = new_peers()  # a second store on the same ranks, after or beside the first
    answers = [peers.round(rank + n, lambda told: [[sum(told), r] for r in range(3)]) for n in range(3)]
    peers.round("ä" * 100_000, lambda told: [None] * 3)
    # The group of training is free at any time.
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return [*answers, int(total)]


def fail_to_decide(rank: int) -> str:
    peers = new_peers()

    def decide(told: list[Any]) -> list[Any]:
        raise OSError(28, "No space left on device")

    try:
        peers.round(None, decide)
    except (OSError, lf_ckpt.RankFailedError) as error:
        after = peers.round("on", lambda told: told)
        return f"{type(error).__name__}: {error}; {after}"
    return "no error"


def lose(rank: int, victim: int) -> list[str]:
    peers = new_peers()
    peers.round(None, lambda told: told)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):
        with pytest.raises(lf_ckpt.PeerLostError) as caught:
            peers.round(None, lambda told: told)
        errors.append(f"{caught.value.rank}")
    return errors


def fall_silent(rank: int) -> str:
    """A second store on the same ranks, of another patience: rank 0 waits for a message that comes too late."""
    new_peers()
    assert dist.group.WORLD is not None
    peers = Peers(dist.group.WORLD, timeout=0.2 if rank == 0 else 20)
    try:
        if rank == 0:
            peers.round(None, lambda told: told)
    except lf_ckpt.PeerLostError as error:
        said = f"rank {error.rank} is lost"
    else:
        said = "no error"
    dist.barrier()
    return said
