"""Ctrl-C and signal handlers anywhere inside a save: it costs that save only, and nothing waits for ever."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ckpt_states import assert_same, state
from torch import nn

import lf_ckpt
from lf_ckpt import saver, saving, staging

pytestmark = pytest.mark.timeout(120)


class Signals(lf_ckpt.FileLayer):
    """Sends a signal to this process at the creation of a data file, so its handler runs inside `save`."""

    def __init__(self, number: int) -> None:
        self.number, self.armed = number, False

    def create(self, path: str) -> int:
        if self.armed and path.endswith(".lfckpt"):
            self.armed = False
            signal.raise_signal(self.number)
        return super().create(path)


def test_ctrl_c_inside_a_save_costs_that_save_only(tmp_path: Path) -> None:
    files = Signals(signal.SIGINT)
    with lf_ckpt.open(tmp_path, files=files) as store:
        store.save(1, state(1)).wait()
        files.armed = True
        with pytest.raises(KeyboardInterrupt):
            store.save(2, state(2))
        store.save(3, state(3)).wait()
        assert_same(store.load().tensors, state(3))
        assert store.steps() == (1, 3)


def test_ctrl_c_while_the_state_is_copied_costs_that_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, left = staging.copy_range, [5]

    def interrupted(*arguments: object, **options: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        copy(*arguments, **options)  # type: ignore[arg-type]

    with lf_ckpt.open(tmp_path) as store:
        store.save(1, state(1)).wait()
        monkeypatch.setattr(staging, "copy_range", interrupted)
        left[0] = 3
        with pytest.raises(KeyboardInterrupt):
            store.save(2, state(2))
        with pytest.raises(lf_ckpt.CkptError, match="interrupted"):
            store.save(3, state(3))
        store.save(3, state(3)).wait()
        assert store.steps() == (1, 3)


def test_saving_from_a_signal_handler_inside_a_save_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    files, met = Signals(signal.SIGUSR1), []

    def handler(*_: object) -> None:
        try:
            store.save(3, state(3))
        except lf_ckpt.CkptError as error:
            met.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with lf_ckpt.open(tmp_path, files=files) as store:
            store.save(1, state(1)).wait()
            files.armed = True
            store.save(2, state(2)).wait()
            assert_same(store.load().tensors, state(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(met) == 1
    assert "inside" in met[0]


STARTING = {
    getattr(saver.Saver, name).__code__
    for name in (
        "start",
        "_begin",
        "_agree",
        "_prepare",
        "_hand_over",
        "_stage_now",
        "_stage_behind",
        "_arm",
        "_stage",
    )
}


@contextmanager
def interrupted_at(count: int) -> Iterator[list[int]]:
    """Ctrl-C as line number `count` of what starts a save is reached; yields the number of lines that are left."""
    left = [count]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code in STARTING else None)
    try:
        yield left
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("fenced", [False, True])
def test_ctrl_c_at_any_line_that_starts_a_save_leaves_no_handle_that_never_ends(
    tmp_path: Path, fenced: bool
) -> None:
    layer = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    how: dict[str, Any] = {"overlap": True, "fence": optimizer} if fenced else {}
    descriptors = len(os.listdir("/proc/self/fd"))
    with lf_ckpt.open(tmp_path, engine="threads") as store:
        store.save(0, dict(layer.state_dict())).wait()
        assert store._saver is not None
        for count in range(1000):
            try:
                with interrupted_at(count) as left:
                    handle = store.save(2 * count + 1, dict(layer.state_dict()), **how)
            except KeyboardInterrupt:
                current = store._saver.current
                assert current is not None
                assert current._over.wait(20), f"line {count}"
                optimizer.step()  # nor does a gate wait for it
            if left[0] >= 0:
                handle.wait()
                break  # a save without Ctrl-C
            try:
                store.save(2 * count + 2, dict(layer.state_dict())).wait()
            except lf_ckpt.CkptError as error:
                assert "interrupted" in str(error)  # noqa: PT017
                store.save(2 * count + 2, dict(layer.state_dict())).wait()
        assert 20 < count < 999
        assert {2 * n + 2 for n in range(count)} <= set(store.steps())
        assert set(os.listdir(tmp_path / "steps")) == set(map(str, store.steps()))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_a_save_whose_writer_cannot_be_made_ends_with_its_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with lf_ckpt.open(tmp_path, engine="threads") as store:
        store.save(1, state(1)).wait()
        descriptors = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(saving, "_new_writer", fails)
            handle = store.save(2, state(2))
            with pytest.raises(OSError, match="Cannot allocate"):
                handle.wait(60)
        assert os.listdir(tmp_path / "steps") == ["1"]
        assert set(os.listdir("/proc/self/fd")) <= descriptors
        store.save(3, state(3)).wait()
        assert store.steps() == (1, 3)
