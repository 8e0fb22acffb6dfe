"""The ranks that write one store: rounds in which each tells rank 0 something and gets an answer. No pickle.

The messages go over a Gloo group of their own, made when the store is opened: they leave the writer thread in any order
with the collectives of training, and on the group of training (NCCL or not) the two would meet the wrong partner.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from .errors import PeerLostError, RankFailedError
from .jsonio import Json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("lf_ckpt")
_ANSWER: Final = ord("+")
_FAILED: Final = ord("!")
_LOST: Final = ord("-")

Decide = Callable[[list[Json]], Sequence[Json]]


class Peers:
    """This rank's end. One thread at a time; every rank calls the same rounds in the same order."""

    def __init__(self, group: ProcessGroup, timeout: float) -> None:
        """timeout: seconds after which a rank that is silent counts as lost; one that died is noticed at once."""
        self._ranks = dist.get_process_group_ranks(group)
        self.rank, self.world = dist.get_rank(group), len(self._ranks)
        self._lost: PeerLostError | None = None
        self._patience = timedelta(seconds=timeout)
        self._group, self._tag = _messages_of(group, self._patience)

    def round(self, mine: Json, decide: Decide) -> Json:
        """Send `mine` to rank 0, which answers every rank with its part of `decide(all)`; the answer for this rank.

        mine and answers: plain JSON. decide: runs on rank 0 only, (world,) values by rank to as many answers. When it
        raises, rank 0 raises the same and the others RankFailedError. Raises PeerLostError.
        """
        if self._lost is not None:
            raise self._lost
        return self._lead(mine, decide) if self.rank == 0 else self._follow(mine)

    def _follow(self, mine: Json) -> Json:
        try:
            self._send(0, json.dumps(mine).encode())
            answer = self._receive(0)
        except RuntimeError as error:  # all that torch says when a connection ends or times out
            raise self._mark_lost(0, error) from error
        value = json.loads(answer[1:])
        if answer[0] == _FAILED:
            raise RankFailedError("not done", {0: value})
        if answer[0] == _LOST:
            raise self._mark_lost(value["rank"], RuntimeError(value["cause"]))
        return value

    def _lead(self, mine: Json, decide: Decide) -> Json:
        told: list[Json] = [mine]
        lost: PeerLostError | None = None
        for rank in range(1, self.world):
            try:
                told.append(json.loads(self._receive(rank)))
            except RuntimeError as error:
                lost = lost or self._mark_lost(rank, error)
        if lost is not None:
            self._answer([{"rank": lost.rank, "cause": lost.cause}] * self.world, _LOST)
            raise lost
        try:
            answers = decide(told)
        except BaseException as error:
            self._answer([f"{type(error).__name__}: {error}"] * self.world, _FAILED)
            raise
        self._answer(answers, _ANSWER)
        return answers[0]

    def _answer(self, answers: Sequence[Json], tag: int) -> None:
        """Answer every other rank. What was decided stands: one that is gone by now is an error of the next round."""
        for rank in range(1, self.world):
            try:
                self._send(rank, bytes([tag]) + json.dumps(answers[rank]).encode())
            except RuntimeError as error:
                _log.error("checkpoint group: %s", self._mark_lost(rank, error))

    def _mark_lost(self, rank: int, error: RuntimeError) -> PeerLostError:
        lost = PeerLostError(rank, str(error).strip().split("\n")[0])
        self._lost = self._lost or lost
        return lost

    def _send(self, rank: int, data: bytes) -> None:
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for tensor in (size, body):
            self._finish(dist.isend(tensor, self._ranks[rank], group=self._group, tag=self._tag))

    def _receive(self, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._finish(dist.irecv(size, self._ranks[rank], group=self._group, tag=self._tag))
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._finish(dist.irecv(data, self._ranks[rank], group=self._group, tag=self._tag))
        return data.numpy().tobytes()

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None  # None is for ranks outside the group
        work.wait(self._patience)


@dataclass
class _Messages:
    """The Gloo group beside a group of training, and the tag of the next store on it."""

    group: ProcessGroup
    tag: int = 0


_messages: weakref.WeakKeyDictionary[ProcessGroup, _Messages] = weakref.WeakKeyDictionary()


def _messages_of(group: ProcessGroup, patience: timedelta) -> tuple[ProcessGroup, int]:
    """A Gloo group of the same ranks, and a tag of its own on it. patience: until all ranks have come to make it.

    The Gloo group lives as long as the training's: torch names such groups by their ranks, so a second one made after
    the first was destroyed finds the addresses of the first in the rendezvous store and hangs. There is one, whatever
    the timeouts of its stores: ranks that make another one, for theirs differ, would wait for those that do not.
    """
    if group not in _messages:
        # Only the members call this: ranks outside `group` need not know that there is a store.
        ranks = dist.get_process_group_ranks(group)
        _messages[group] = _Messages(
            dist.new_group(ranks, patience, backend="gloo", use_local_synchronization=True)
        )
    made = _messages[group]
    made.tag += 1
    return made.group, made.tag


def join(group: ProcessGroup | None, timeout: float) -> Peers | None:
    """The peers of a store; None when it is one process's alone."""
    return None if group is None or dist.get_world_size(group) == 1 else Peers(group, timeout)
