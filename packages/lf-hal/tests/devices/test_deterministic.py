"""Transforms that are random are named, with what they draw from; others pass, and no generator is moved."""

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from lf_hal.deterministic import check_deterministic, random_transforms
from lf_hal.errors import NondeterministicError

IMAGE = np.arange(12, dtype=np.float32).reshape(3, 4)


def flip(x: Any) -> Any:
    return x[:, ::-1].copy() if random.random() < 0.5 else x


def noise(x: Any) -> Any:
    return x + np.random.standard_normal(x.shape)


def shift(x: Any) -> Any:
    return x + float(torch.rand(()))


class Unseeded:
    def __init__(self) -> None:
        self.source = np.random.default_rng()

    def __call__(self, x: Any) -> Any:
        return x + self.source.random()


class Counter:
    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, x: Any) -> Any:
        return x + next(self.calls)


class Seeded:
    """A function of (seed, input): what deterministic mode asks for."""

    def __call__(self, x: Any) -> Any:
        return x + np.random.default_rng(7).random()


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


def scale(x: Any) -> Any:
    return x / 255


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (flip, "flip draws from the global generator of random"),
        (noise, "noise draws from the global generator of numpy.random"),
        (shift, "shift draws from the global generator of torch"),
        (Unseeded(), "Unseeded gives another result the second time"),
        (lambda x: x + time.perf_counter_ns() % 2**20, "gives another result"),
        (Counter(), "Counter gives another result"),
        (torch.nn.Sequential(torch.nn.Dropout(0.5)), "Sequential draws from the global generator of torch"),
    ],
)
def test_a_random_transform_is_named_with_what_it_draws_from(transform: Any, said: str) -> None:
    sample = torch.ones(4) if isinstance(transform, torch.nn.Module) else IMAGE
    with pytest.raises(NondeterministicError, match=said) as caught:
        check_deterministic(transform, sample)
    assert len(caught.value.transforms) == 1


def test_a_rare_choice_is_found_though_it_does_not_fall() -> None:
    assert random_transforms(lambda x: x + 1 if random.random() < 1e-9 else x, IMAGE)


@pytest.mark.parametrize(
    "transform",
    [scale, Seeded(), torch.nn.Dropout(0.5).eval(), lambda x: {"a": [x, float("nan")], "b": (x.dtype, None)}],
)
def test_a_function_of_the_input_passes(transform: Any) -> None:
    check_deterministic(transform, torch.ones(4))


def test_each_of_a_composition_is_named_and_the_others_are_not() -> None:
    found = random_transforms(Compose(scale, flip, Compose(Seeded(), noise)), IMAGE)
    assert [f.name for f in found] == ["1: flip", "2: 1: noise"]
    found = random_transforms({"train": [scale, flip], "eval": scale}, IMAGE)
    assert len(found) == 1
    assert "flip" in found[0].name
    assert "train" in found[0].name


def test_a_transform_that_writes_into_its_input_spoils_no_comparison() -> None:
    def in_place(x: Any) -> Any:
        x += 1
        return x

    sample = IMAGE.copy()
    check_deterministic(in_place, sample)
    assert (sample == IMAGE).all()


def test_global_generators_are_left_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wanted = random.random(), np.random.random(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random_transforms([flip, noise, shift], IMAGE)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == wanted
