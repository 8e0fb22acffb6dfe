"""What all ranks of a group do or none does: opening a store, loading a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import CkptError, CorruptError, PeerLostError, RankFailedError
from .jsonio import Json
from .loading import is_damage
from .peers import Peers, join

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """How an attempt of all ranks went. reasons: of those that failed; damage: all because of bad or lost files."""

    reasons: dict[int, str]
    damage: bool


@contextmanager
def telling(group: ProcessGroup | None, timeout: float, wish: str) -> Iterator[None]:
    """An error in here, before this rank has joined the others, reaches those that wait in `agree` for `wish`."""
    try:
        yield
    except BaseException as error:
        with suppress(CkptError, RuntimeError):  # the error of this rank is the one to show
            peers = join(group, timeout)
            if peers is not None:
                peers.round(_first(wish, error), lambda told: _all_wish(told, wish, lambda: None))
        raise


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


def agree(peers: Peers, wish: str, error: BaseException | None, answer: Callable[[], Json]) -> Any:
    """The first round of what all ranks do: rank 0's `answer()`, for all.

    wish: what this rank is about to do, which must be the same everywhere. error: why this rank cannot even begin.
    Raises `error` on the rank that has one and RankFailedError on the others: none of them waits for it in vain.
    """
    mine = _first(wish, error)

    def decide(told: list[Any]) -> list[Json]:
        return _all_wish(told, wish, answer)

    if error is not None:
        with suppress(CkptError):
            peers.round(mine, decide)
        raise error
    agreed = peers.round(mine, decide)
    if agreed["failed"]:
        raise RankFailedError(
            f"{wish} was not begun", {int(rank): text for rank, text in agreed["failed"].items()}
        )
    return agreed["answer"]


def _first(wish: str, error: BaseException | None) -> Json:
    return {"error": None if error is None else f"{type(error).__name__}: {error}", "wish": wish}


def _all_wish(told: list[Any], wish: str, answer: Callable[[], Json]) -> list[Json]:
    """Rank 0: `answer()` for all, or why not."""
    failed = {rank: value["error"] for rank, value in enumerate(told) if value["error"] is not None}
    if not failed and any(value["wish"] != wish for value in told):
        failed = {rank: f"wants {value['wish']}" for rank, value in enumerate(told)}
    return [{"failed": failed, "answer": None if failed else answer()}] * len(told)


def together(
    peers: Peers, what: str, attempt: Callable[[Callable[[], None]], T], done: str | None = None
) -> T:
    """Run `attempt` on every rank, or fail on every rank.

    `attempt` gets a function to call once, before it changes anything: nobody goes beyond it before all are there.
    what, done: the failure in words, and where it came too late for this rank, which has done its part.
    Raises this rank's own error when all that failed did so for damaged files, else RankFailedError.
    """

    def require(verdict: Verdict, what: str = what) -> None:
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
    require(vote(peers, None), done or what)
    return result
