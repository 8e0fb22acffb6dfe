"""lf_graph.stats() and lf_graph.close(): everything captured that is alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lf_graph
from lf_graph import Buckets, Chain, ClosedError, GraphCaptureError, Piece, TrainStep, capture
from lf_graph._registry import register


def square(x: Tensor) -> Tensor:
    return x * x


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    lf_graph.close()
    yield
    lf_graph.close()


def names() -> list[str]:
    return [s.name for s in lf_graph.stats()]


def test_every_captured_object_is_listed_once_oldest_first() -> None:
    chain = Chain([Piece(square)], name="chain").capture(torch.ones(2))
    captured = capture(square, torch.ones(2), name="captured")
    model = nn.Linear(2, 1)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), loss=lambda x: model(x).sum(), name="step")
    buckets = Buckets(square, (2, 4), name="buckets")
    step(torch.ones(1, 2))
    buckets(torch.ones(1, 2)), buckets(torch.ones(1, 4))
    assert names() == ["chain", "captured", "step", "buckets"]
    assert all('"version": 1' in s.to_json() for s in lf_graph.stats())
    for thing in (chain, captured, step, buckets):
        thing.close()
    assert names() == []


def test_a_chain_without_a_capture_is_not_listed() -> None:
    chain = Chain([Piece(square)], name="chain")
    assert names() == []
    chain.capture(torch.ones(2)).close()
    assert names() == []
    chain.capture(torch.ones(2))
    assert names() == ["chain"]


def test_close_closes_everything() -> None:
    captured, buckets = capture(square, torch.ones(2)), Buckets(square, (2,))
    buckets(torch.ones(1, 2))
    lf_graph.close()
    for use in (lambda: captured(torch.ones(2)), lambda: buckets(torch.ones(1, 2))):
        with pytest.raises(ClosedError):
            use()
    lf_graph.close()


def test_what_nobody_holds_is_forgotten() -> None:
    captured = capture(square, torch.ones(2), name="short")
    assert names() == ["short"]
    del captured
    gc.collect()
    assert names() == []


def test_a_chain_whose_second_capture_fails_is_not_listed() -> None:
    faulty = [False]

    def fn(x: Tensor) -> Tensor:
        return x * x.sum().item() if faulty[0] else x * x

    chain = Chain([Piece(fn)], name="chain").capture(torch.ones(2))
    faulty[0] = True
    with pytest.raises(GraphCaptureError):
        chain.capture(torch.ones(2))
    assert names() == []


def test_a_failed_capture_is_not_listed() -> None:
    with pytest.raises(GraphCaptureError) as kept:  # the traceback holds the chain
        capture(lambda x: x * x.sum().item(), torch.ones(2))
    assert names() == []
    assert kept.value.op


def test_a_fallback_is_listed_with_its_reason() -> None:
    captured = capture(lambda x: x * x.sum().item(), torch.ones(2), fallback="eager")
    captured(torch.ones(2))
    (stats,) = lf_graph.stats()
    assert (stats.eager, stats.reason) == (1, captured.reason)


class Recorded:
    """Something with graphs; notes when it is closed."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, log, error
        register(self)

    def stats(self) -> Any:
        return self

    def close(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def test_the_newest_is_closed_first_and_an_error_stops_nothing() -> None:
    log: list[str] = []
    kept = [Recorded("a", log), Recorded("b", log, ValueError("b is stuck")), Recorded("c", log)]
    with pytest.raises(ExceptionGroup) as caught:
        lf_graph.close()
    assert log == ["c", "b", "a"]
    assert [str(e) for e in caught.value.exceptions] == ["b is stuck"]
    assert names() == []
    assert len(kept) == 3


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_at_exit_graphs_go_before_the_process_group_and_errors_are_told() -> None:
    """Row 20: a process hangs at exit while graphs hold operations of a destroyed group."""
    found = run(
        """
        import atexit, os, tempfile
        import torch, torch.distributed as dist
        import lf_graph
        from lf_graph._recorder import RecordedGraph
        was_closed = RecordedGraph.close
        def close(self):
            print("graph closed, group alive:", dist.is_initialized())
            was_closed(self)
        RecordedGraph.close = close
        def destroy():
            print("group destroyed")
            dist.destroy_process_group()
        store = "file://" + os.path.join(tempfile.mkdtemp(), "s")
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        atexit.register(destroy)  # after the import of lf_graph: it would run before handlers made there
        class Stuck:
            def stats(self): return None
            def close(self): raise RuntimeError("the device is gone")
        stuck = Stuck()
        lf_graph._registry.register(stuck)
        captured = lf_graph.capture(lambda x: x * 2, torch.ones(2))
        """
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["graph closed, group alive: True", "group destroyed"]
    assert "lf_graph: some graphs could not be closed" in found.stderr
    assert "the device is gone" in found.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_its_parents_graphs_alone() -> None:
    captured = capture(square, torch.ones(2), name="parents")
    pid = os.fork()
    if pid == 0:
        os._exit(len(lf_graph.stats()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names() == ["parents"]
    assert captured(torch.ones(2)).tolist() == [1.0, 1.0]
