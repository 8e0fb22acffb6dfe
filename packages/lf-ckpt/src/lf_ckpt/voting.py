"""What all ranks of a group do or none does: opening a store, loading a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import CorruptError, PeerLostError, RankFailedError
from .jsonio import Json
from .loading import is_damage
from .peers import Peers

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """How an attempt of all ranks went. reasons: of those that failed; damage: all because of bad or lost files."""

    reasons: dict[int, str]
    damage: bool


def vote(peers: Peers, error: BaseException | None) -> Verdict:
    """Every rank says whether it has succeeded; all get the same verdict."""
    mine = {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "damage": is_damage(error),
    }

    def decide(told: list[Any]) -> list[Json]:
        failed = {rank: value["error"] for rank, value in enumerate(told) if value["error"] is not None}
        return [{"reasons": failed, "damage": all(told[rank]["damage"] for rank in failed)}] * peers.world

    answer = peers.round(mine, decide)
    return Verdict({int(rank): text for rank, text in answer["reasons"].items()}, answer["damage"])


def together(peers: Peers, what: str, attempt: Callable[[Callable[[], None]], T]) -> T:
    """Run `attempt` on every rank, or fail on every rank.

    `attempt` gets a function to call once, before it changes anything: nobody goes beyond it before all are there.
    Raises this rank's own error when all that failed did so for damaged files, else RankFailedError.
    """

    def require(verdict: Verdict) -> None:
        if verdict.reasons:
            raise RankFailedError(what, verdict.reasons, verdict.damage)

    try:
        result = attempt(lambda: require(vote(peers, None)))
    except (RankFailedError, PeerLostError):
        raise
    except BaseException as error:
        verdict = vote(peers, error)
        if not verdict.damage and isinstance(error, CorruptError | OSError):
            require(verdict)
        raise
    require(vote(peers, None))
    return result
