"""Who is gone, when a collective fails: every rank beats in the group's store, and a failed step names the rank that
stopped.

    watch = lf_comm.PeerWatch()                    # every rank, once
    for number, batch in enumerate(loader):
        with watch.step(model, number):            # forward and backward
            loss(model, batch).backward()
        optimizer.step()                           # never reached with gradients of which some were summed

Backends report a lost peer as a reset connection or a timeout, without a name. What they report, and when, is theirs
(set the group's ``timeout``); this adds the name, and takes the gradients of the step away. NCCL's kernels wait on the
device, where no timeout of the host ends them soon: its groups are aborted once a rank has been silent for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf_comm._errors import CommError
from lf_comm._worker import at_exit

_PREFIX = "lf_comm/beat"


class PeerLost(CommError, RuntimeError):  # noqa: N818 - the name users of the articles know
    """A rank stopped. rank: which, None when the store that holds the beats went with it; op: what this rank was in;
    bucket: of DDP, None when not known; step; waited_s: seconds this rank was in the step."""

    def __init__(self, rank: int | None, op: str, bucket: int | None, step: int, waited_s: float) -> None:
        self.rank, self.op, self.bucket, self.step, self.waited_s = rank, op, bucket, step, waited_s
        who = "the rank that holds the store" if rank is None else f"rank {rank}"
        where = "" if bucket is None else f", bucket {bucket}"
        super().__init__(
            f"{who} is gone (step {step}, {op}{where}, {waited_s:.1f} s); its gradients were dropped, no rank "
            "may go on with this group"
        )

    def __reduce__(self) -> tuple[type[PeerLost], tuple[object, ...]]:
        return PeerLost, (self.rank, self.op, self.bucket, self.step, self.waited_s)


class PeerWatch:
    """Beats for this rank in a thread, and knows since when each other rank has not."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interval_s: float = 0.5,
        patience_s: float | None = None,
        store: Any = None,
        abort: Iterable[dist.ProcessGroup] | None = None,
    ) -> None:
        """All ranks of `group` make one. interval_s: between beats; patience_s: a rank that has not beaten for so long
        is gone (None: 4 intervals). store: a torch.distributed.Store for the beats; None: that of the default group.

        abort: groups whose ``abort()`` is called when a rank has not beaten for twice its patience, or the store is
        gone, while this rank is in a :meth:`step`; None: all of NCCL's. (Gloo's ends nothing that waits.)

        A rank that computes holds the interpreter at most for one operator, so it beats on.
        """
        for name, seconds in (("interval_s", interval_s), ("patience_s", patience_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"{name}={seconds}: seconds above 0 are wanted")
        self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._rank = dist.get_rank()
        self._interval = interval_s
        self._patience = 4 * interval_s if patience_s is None else patience_s
        held: Any = dist.distributed_c10d._get_default_store() if store is None else store
        # A connection of its own: on a shared one a rank that waits for a key would keep its beat waiting.
        try:
            self._store = held.clone()
        except (AttributeError, RuntimeError):  # a store without connections, or an older torch
            self._store = held
        self._changed = threading.Condition()
        began = time.monotonic()
        self._beats = dict.fromkeys(self._ranks, "")
        self._seen = dict.fromkeys(self._ranks, began)
        self._store_lost = False
        self._abort = None if abort is None else list(abort)
        self._inside = False  # a step
        self._aborted = False
        self._closed = threading.Event()
        self._store.set(self._key(self._rank), "0")
        self._thread = threading.Thread(target=self._run, name="lf-comm-watch", daemon=True)
        at_exit(self._thread, self._closed.set)
        self._thread.start()

    def ages(self) -> dict[int, float]:
        """Seconds since each rank's last beat, as this rank sees it; its own is 0."""
        with self._changed:
            now = time.monotonic()
            return {rank: 0.0 if rank == self._rank else now - at for rank, at in self._seen.items()}

    def lost(self) -> list[int]:
        """Ranks that are gone, the longest gone first."""
        found = {rank: age for rank, age in self.ages().items() if age > self._patience}
        return sorted(found, key=found.__getitem__, reverse=True)

    @contextmanager
    def step(
        self,
        parameters: nn.Module | Iterable[Tensor],
        step: int,
        *,
        op: str = "backward",
        hook: object = None,
    ) -> Iterator[None]:
        """What a step does before its optimizer. hook: of this package, if one sums; it knows the bucket.

        When anything is raised in there, ``.grad`` of all parameters becomes None: of some of them only some ranks may
        have the sum. Raises PeerLost, from the backend's error, when a rank turns out to be gone; else what was raised.
        """
        held = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        began = time.monotonic()
        self._inside = True
        try:
            yield
            self._inside = False
            if self._aborted:  # what an aborted collective leaves in its tensors is nothing, and says nothing
                raise RuntimeError("a group was aborted while this step ran")
        except Exception as error:
            self._inside = False
            for parameter in held:
                parameter.grad = None
            # A wrong shape is no reason to wait whether somebody dies.
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | PeerLost):
                raise
            gone, store = self._who()
            if gone is None and not store:
                raise
            waited = time.monotonic() - began
            raise PeerLost(gone, op, getattr(hook, "summing", None), step, waited) from error

    def close(self) -> None:
        """Stop beating: for the others this rank is gone then, so close when all have ended."""
        self._closed.set()
        self._thread.join()

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{'-'.join(map(str, self._ranks[:1]))}/{rank}"

    def _who(self) -> tuple[int | None, bool]:
        """(the rank that is gone, whether the store is), waited for until it must have shown.

        A rank that is only slow has the time of its patience to beat once more; one silent twice as long is gone.
        """
        began = time.monotonic()
        with self._changed:
            while (waited := time.monotonic() - began) <= self._patience + 2 * self._interval:
                if self._store_lost:
                    return None, True
                now = time.monotonic()
                ages = {r: now - at for r, at in self._seen.items() if r != self._rank}
                oldest = max(ages, key=ages.__getitem__, default=self._rank)
                age = ages.get(oldest, 0.0)
                if age > 2 * self._patience or (age > self._patience and waited >= self._patience):
                    return oldest, False
                self._changed.wait(self._interval / 4)
        return None, False

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(self._interval):
            number += 1
            try:
                self._store.set(self._key(self._rank), str(number))
                found = self._read()
            except Exception:  # the store went with the rank that held it: any of torch's kinds
                with self._changed:
                    self._store_lost = True
                    self._changed.notify_all()
                self._abort_groups()
                return
            with self._changed:
                now = time.monotonic()
                for rank, beat in found.items():
                    if self._beats[rank] != beat:
                        self._beats[rank], self._seen[rank] = beat, now
                self._changed.notify_all()
            if max(self.ages().values()) > 2 * self._patience:
                self._abort_groups()

    def _abort_groups(self) -> None:
        """In a thread of its own: an abort can hang, and this rank's beats must not."""
        if not self._inside or self._aborted:
            return
        groups = _nccl_groups() if self._abort is None else self._abort
        if not groups:
            return
        self._aborted = True
        for group in groups:
            threading.Thread(target=group.abort, name="lf-comm-abort", daemon=True).start()

    def _read(self) -> dict[int, str]:
        """The beats that are there; a rank that has not made its watch yet has none."""
        keys = {rank: self._key(rank) for rank in self._ranks}
        return {r: self._store.get(k).decode() for r, k in keys.items() if self._store.check([k])}


def _nccl_groups() -> list[dist.ProcessGroup]:
    known: list[dist.ProcessGroup] = list(dist.distributed_c10d._world.pg_map)
    return [group for group in known if "nccl" in dist.get_backend(group)]
