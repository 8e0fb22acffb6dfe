"""Captures in two threads that overlap leave torch as it was."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph import TrainStep
from lf_graph._replaced import replaced


def test_replacements_that_end_in_another_order_are_all_taken_back() -> None:
    owner = types.SimpleNamespace(name="original")
    one = replaced(owner, "name", lambda below: ("one", below))
    two = replaced(owner, "name", lambda below: ("two", below))
    one.__enter__()
    two.__enter__()
    assert owner.name[1].held[0] == "one"
    one.__exit__(None, None, None)
    assert owner.name[0] == "two"
    assert owner.name[1].held == "original"
    two.__exit__(None, None, None)
    assert owner.name == "original"


def patched() -> list[Any]:
    owners = [(torch, "manual_seed"), (torch, "get_rng_state"), (torch.autograd, "backward")]
    owners += [(torch._tensor_str, "_str"), (torch.cuda, "is_current_stream_capturing"), (nn.Module, "train")]
    return [vars(owner)[name] for owner, name in owners]


def test_a_capture_that_ends_inside_another_threads_leaves_torch_as_it_was() -> None:
    before, raised = patched(), []
    second_began, first_ended = threading.Event(), threading.Event()

    def train(wait: threading.Event, tell: threading.Event, at: str) -> None:
        model = nn.Linear(4, 1)

        def loss(x: Tensor) -> Tensor:
            if at == "first":
                assert wait.wait(60)
            else:
                tell.set()
                assert wait.wait(60)
            return model(x).square().mean()

        try:
            with TrainStep(model, torch.optim.AdamW(model.parameters()), loss=loss) as step:
                step(torch.ones(2, 4))
        except Exception as e:
            raised.append(e)
        finally:
            tell.set()

    threads = [
        threading.Thread(target=train, args=(second_began, first_ended, "first")),
        threading.Thread(target=train, args=(first_ended, second_began, "second")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert raised == []
    assert all(a is b for a, b in zip(patched(), before, strict=True))
