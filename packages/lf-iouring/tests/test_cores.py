"""Engine threads: how many, and bound to which cores."""

import os
import threading
from pathlib import Path

import pytest

from lf_iouring import LoaderError
from lf_iouring._cores import bound_to, cores_for, engine_threads, rank_share

CORES = sorted(os.sched_getaffinity(0))


def affinities():
    """Allowed cores of every thread of this process, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize("engine", ["auto", "pread", "python"])
def test_engine_threads_are_bound_and_the_caller_is_not(loader_of, engine):
    before = affinities()
    loader = loader_of(engine=engine, pin_threads=[CORES[-1]], num_workers=2)
    for _ in range(4):
        next(loader)
    made = {thread: cores for thread, cores in affinities().items() if thread not in before}
    assert len(made) == loader.info().engine.threads == 2
    assert set(map(frozenset, made.values())) == {frozenset({CORES[-1]})}
    assert os.sched_getaffinity(0) == set(CORES)
    assert loader.info().cores == (CORES[-1],)


def test_threads_are_left_alone_by_default(loader_of):
    before = affinities()
    loader = loader_of(num_workers=1)
    made = {thread: cores for thread, cores in affinities().items() if thread not in before}
    assert list(made.values()) == [set(CORES)]
    assert loader.info().cores == ()


def test_a_binding_ends_with_its_block():
    with bound_to([CORES[0]]):
        assert os.sched_getaffinity(0) == {CORES[0]}
        seen = []
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{CORES[0]}]
    assert os.sched_getaffinity(0) == set(CORES)


def test_ranks_of_a_host_share_its_cores():
    assert [rank_share(range(8), rank, 3) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [rank_share([3, 5], rank, 4) for rank in range(4)] == [[3], [5], [3], [5]]


def test_the_share_leaves_its_first_core_to_the_trainer(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert engine_threads(0, 30)[0] == 7
    assert cores_for(True, 7) == tuple(range(9, 16))
    assert cores_for(True, 2) == (14, 15)
    assert cores_for([4, 2, 4], 1) == (2, 4)
    assert engine_threads(9, 30) == (9, "num_workers, more than the 8 cores of a rank")
    assert engine_threads(8, 4) == (4, "num_workers")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert engine_threads(0, 30)[0] == 1
    assert cores_for(True, 1) == (1,)


@pytest.mark.parametrize("local_rank", ["", "2", "x"])
def test_a_share_that_is_not_known_is_refused(loader_of, monkeypatch, local_rank):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(LoaderError, match="needs LOCAL_RANK"):
        loader_of(pin_threads=True)


@pytest.mark.parametrize(
    ("pin", "text"),
    [([10**6], "may use the cores"), ([], "list of cores"), ("0", "list of cores"), (1, "list")],
)
def test_cores_that_cannot_be_had_are_refused(loader_of, pin, text):
    with pytest.raises(LoaderError, match=text):
        loader_of(pin_threads=pin)
