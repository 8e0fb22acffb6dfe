"""Every kind of step as data: what is committed before, how the next one is saved, with which options."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_states import state

import lf_ckpt
from lf_ckpt import store as store_module
from lf_ckpt.errors import PeerLostError, RankFailedError

SIZE = 6_000
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """before: states of the steps 1, 2 ... that are committed. after: state of the next step, saved with `options`.

    kind and codec: what the report of that step must say, so that a kind is what it is called. ranks: threads that
    play the ranks of a group.
    """

    name: str
    before: tuple[State, ...]
    after: State
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "full"
    codec: str = "raw"
    ranks: int = 1

    @property
    def step(self) -> int:
        """The step that is saved while something fails."""
        return len(self.before) + 1

    def states(self) -> dict[int, State]:
        """State of each step."""
        return dict(enumerate((*self.before, self.after), 1))

    def prepare(self, path: Path) -> None:
        """Commit the steps before."""
        options = {**self.options, "keep": ()}
        work = lambda store: [store.save(step, t).wait() for step, t in enumerate(self.before, 1)]  # noqa: E731
        _on_store(path, None, options, self.ranks, work)

    def act(self, path: Path, files: lf_ckpt.FileLayer) -> list[lf_ckpt.SaveReport]:
        """Save the next step through `files`; a writer that has loaded (and verified) may refer to a base."""

        def save(store: lf_ckpt.Store) -> lf_ckpt.SaveReport:
            store.load()
            return store.save(self.step, self.after).wait()

        reports: list[lf_ckpt.SaveReport] = []
        _on_store(path, files, self.options, self.ranks, lambda store: reports.append(save(store)))
        return reports


def _float32(seed: int) -> State:
    return state(seed, size=SIZE)


def _noise(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"n{i}": torch.randint(0, 255, (5_000,), generator=generator, dtype=torch.uint8) for i in range(3)
    }


def _one_changed(old: State) -> State:
    return {**old, "layer0.weight": torch.zeros(SIZE), "step": torch.tensor(99)}


def _coded(codec: str) -> tuple[State, State]:
    """Two states of which the second is best coded as `codec` against the first."""
    g = torch.Generator().manual_seed(0)
    floats = torch.randn(SIZE, generator=g)
    if codec == "difference+planes+zstd":
        old, new = floats, floats + 1e-4 * torch.randn(SIZE, generator=g)
    elif codec == "xor+planes+zstd":
        old = torch.randint(0, 2**31, (SIZE,), generator=g, dtype=torch.int32)
        new = old ^ (torch.randint(0, 2, (SIZE,), generator=g, dtype=torch.int32) << 20)
    elif codec == "changed-elements":
        old = floats.bfloat16()
        new = old.clone()
        new[::37] *= 1.5
    else:
        old = torch.randint(0, 255, (80_000,), generator=g, dtype=torch.uint8)
        new = old.clone()
        new[8192:16384] = torch.randint(0, 255, (8192,), generator=g, dtype=torch.uint8)
    return {"x": old, "same": floats}, {"x": new, "same": floats}


CODECS = ("difference+planes+zstd", "xor+planes+zstd", "changed-elements", "dirty-units")
BASE, OTHER = _float32(1), _float32(2)
KINDS = [
    Kind("full raw", (_noise(1),), _noise(2), {"compress": "raw", "full_every": 0}),
    Kind("full planes", (BASE,), OTHER, {"full_every": 0}, codec="planes+zstd"),
    Kind("delta of same extents", (BASE,), _one_changed(BASE), kind="delta", codec="same-as-parent"),
    Kind("retention", (BASE, _one_changed(BASE)), OTHER, {"keep": (lf_ckpt.Last(1),)}, codec="planes+zstd"),
    Kind("marker last", (BASE,), OTHER, {"mode": "shared", "full_every": 0}, codec="planes+zstd"),
    *(Kind(f"delta of {c}", _coded(c)[:1], _coded(c)[1], kind="delta", codec=c) for c in CODECS),
    Kind("group of 3", (BASE,), _one_changed(BASE), kind="delta", codec="same-as-parent", ranks=3),
]


# -- ranks as threads ------------------------------------------------------------------------------------------------


class Table:
    """Where threads that play ranks meet. A round in which one is missing for `patience` seconds is lost."""

    def __init__(self, world: int, patience: float = 20.0) -> None:
        self.world, self.patience = world, patience
        self.barrier = threading.Barrier(world)
        self.told: list[Any] = [None] * world
        self.answers: list[Any] = []
        self.failed: BaseException | None = None


class ThreadPeers:
    """lf_ckpt.peers.Peers of one thread."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.world, self._table = rank, table.world, table

    def round(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """See Peers.round."""
        table = self._table
        table.told[self.rank] = mine
        self._meet()
        if self.rank == 0:
            table.failed = None
            try:
                table.answers = list(decide(list(table.told)))
            except BaseException as error:
                table.failed = error
        self._meet()
        failed, answer = table.failed, None if table.failed else table.answers[self.rank]
        self._meet()
        if failed is not None:
            raise failed if self.rank == 0 else RankFailedError("not done", {0: str(failed)})
        return answer

    def close(self) -> None:
        """Leave; the others notice in their next round."""

    def _meet(self) -> None:
        try:
            self._table.barrier.wait(self._table.patience)
        except threading.BrokenBarrierError as error:
            raise PeerLostError(-1, "a thread stopped") from error


def _on_store(
    path: Path,
    files: lf_ckpt.FileLayer | None,
    options: Mapping[str, Any],
    ranks: int,
    work: Callable[[lf_ckpt.Store], object],
) -> None:
    """Run `work` on an open store: in this thread, or at once in one thread per rank."""
    if ranks > 1:
        _in_ranks(path, files, options, ranks, work)
        return
    with lf_ckpt.open(path, files=files, **options) as store:
        work(store)


def _in_ranks(
    path: Path,
    files: lf_ckpt.FileLayer | None,
    options: Mapping[str, Any],
    ranks: int,
    work: Callable[[lf_ckpt.Store], object],
) -> None:
    table, errors = Table(ranks), [None] * ranks

    def rank(number: int) -> None:
        try:
            group: Any = ThreadPeers(table, number)
            with lf_ckpt.open(path, files=files, group=group, **options) as store:
                work(store)
        except BaseException as error:
            errors[number] = error
            table.barrier.abort()

    with threads_are_ranks():
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # The rank that failed says why; the others say that it did.
    for error in sorted((e for e in errors if e is not None), key=_secondary):
        raise error


def _secondary(error: BaseException) -> int:
    return isinstance(error, RankFailedError) + 2 * isinstance(error, PeerLostError)


@contextmanager
def threads_are_ranks() -> Iterator[None]:
    """`open(group=ThreadPeers)` takes them as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "join", lambda group, timeout: group)
        yield


def copy_of_store(source: Path, target: Path) -> Path:
    """A store of its own for one trial."""
    shutil.copytree(source, target)
    return target
