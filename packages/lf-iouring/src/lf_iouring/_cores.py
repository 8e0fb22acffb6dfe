"""How many engine threads a rank has, and the cores they may run on."""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

from ._errors import LoaderError


def engine_threads(num_workers: int, prefetch: int) -> tuple[int, str]:
    """Number of engine threads and where it comes from; more than batches in flight would idle.

    Args:
        num_workers: as asked for, >= 0; 0 takes this rank's share of the cores, less one for the trainer.
        prefetch: most batches in flight.
    """
    cores, ranks = len(os.sched_getaffinity(0)), _ranks()
    if num_workers:
        share = max(1, cores // ranks)
        over = f", more than the {share} cores of a rank" if num_workers > share else ""
        return min(num_workers, prefetch), "num_workers" + over
    threads = max(1, min(cores // ranks - 1, prefetch))
    return threads, f"{cores} cores over {ranks} ranks of this host, one left to the trainer"


def cores_for(pin: bool | Sequence[int], threads: int) -> tuple[int, ...]:
    """Cores that `threads` engine threads are bound to, ascending; empty to leave them unbound.

    Args:
        pin: True takes the last cores of this rank's share (LOCAL_RANK of LOCAL_WORLD_SIZE) and leaves its first
            to the trainer where there are two; or the cores themselves.

    Raises LoaderError for cores that this process may not use, or when the share is not known.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if pin is False:
        return ()
    if pin is True:
        share = rank_share(allowed, _local_rank(), _ranks())
        return tuple(share[1:][-threads:] or share)
    if not isinstance(pin, list | tuple | range) or not pin:
        raise LoaderError(f"pin_threads={pin!r}: pass True, False or a list of cores")
    wrong = [core for core in pin if core not in allowed]
    if wrong:
        raise LoaderError(f"pin_threads={list(pin)}: this process may use the cores {allowed}, not {wrong}")
    return tuple(sorted(set(pin)))


def rank_share(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The cores of one of the ranks of a host: an equal part, or one of them where there are more ranks."""
    each = len(cores) // ranks
    return list(cores[rank * each : (rank + 1) * each]) if each else [cores[rank % len(cores)]]


@contextlib.contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Bind threads that the calling thread makes meanwhile to `cores`; they inherit its binding. Empty: do not."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def _ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE")
    return max(1, int(text)) if text and text.isdigit() else 1


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "0" if _ranks() == 1 else "")
    if not text.isdigit() or int(text) >= _ranks():
        raise LoaderError(
            f"pin_threads=True with {_ranks()} ranks on this host needs LOCAL_RANK, which is {text!r}: "
            "start with torchrun, or pass the cores"
        )
    return int(text)
