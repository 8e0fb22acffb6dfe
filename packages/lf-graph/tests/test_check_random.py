"""check: random numbers and Python state, which make one call differ from the next."""

from __future__ import annotations

import functools
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from check_cases import X, kinds, only
from marks import marks_of
from torch import nn

from lf_graph._check import check

at = marks_of(__file__)


# random numbers


def own_generator(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))  # at: generator


def python_random(x):
    return x * random.random()  # at: random


def python_randint(x):
    return x if random.randint(0, 3) < 9 else -x  # at: randint


def numpy_random(x):
    return x + 0 * np.random.rand()  # at: np_random


def test_a_generator_of_ones_own_has_to_be_registered():
    report = check(own_generator, X)
    finding = only(report, "generator")
    assert finding.where == at("generator")
    assert "register" in finding.fix
    assert report.random


def test_the_default_generator_may_be_named():
    report = check(lambda x: x + torch.rand(3, generator=torch.default_generator), X)
    assert report.findings == ()
    assert report.random


@pytest.mark.parametrize(
    ("fn", "mark"), [(python_random, "random"), (python_randint, "randint"), (numpy_random, "np_random")]
)
def test_random_numbers_of_the_host_are_an_error_where_they_are_drawn(fn, mark):
    found = [f for f in check(fn, X).findings if f.kind == "host_random"]
    assert [f.where for f in found] == [at(mark)]


def test_random_numbers_of_the_host_that_reach_an_operator_are_told_as_a_change_too():
    report = check(python_random, X)
    assert kinds(report) == ["host_random", "changes_between_calls"]
    assert report.findings[1].where == at("random")


def test_a_private_generator_of_python_is_found_and_put_back():
    mine = random.Random(7)
    expected = random.Random(7).random()
    assert "host_random" in kinds(check(lambda x: x * mine.random(), X))
    assert mine.random() == expected


def test_host_random_numbers_are_found_under_another_profiler_too():
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    try:
        report = check(lambda x: (random.random(), x)[1], X)
    finally:
        profile.disable()
    assert kinds(report) == ["host_random"]


def test_random_tells_whether_torchs_generators_are_used():
    assert check(lambda x: F.dropout(x), X).random
    assert not check(lambda x: F.dropout(x, training=False), X).random


# what changes between calls


class Clock:
    def __init__(self):
        self.ticks = 0

    def scaled(self, x):
        self.ticks += 1
        return x * self.ticks  # at: scaled

    def branch(self, x):
        self.ticks += 1
        return x.exp() if self.ticks % 2 else x.log()  # at: branch

    def longer(self, x):
        self.ticks += 1
        return torch.zeros(self.ticks) + x.sum()  # at: longer


@pytest.mark.parametrize(
    ("method", "op", "old", "new"),
    [
        ("scaled", "aten.mul", "2", "3"),
        ("branch", "aten.exp", "aten.log", "aten.exp"),
        ("longer", "aten.zeros", "2", "3"),
    ],
)
def test_what_follows_python_state_is_named_with_old_and_new(method, op, old, new):
    finding = only(check(getattr(Clock(), method), X), "changes_between_calls")
    assert (finding.op, finding.where) == (op, at(method))
    assert f"{old} -> {new}" in finding.why


def test_random_numbers_of_torch_are_the_same_in_every_run_of_a_check():
    report = check(lambda x: x.sum() * torch.ones(1000)[torch.rand(1000) > 0.5], X)
    assert kinds(report) == ["data_dependent_shape"]  # and no change of that shape


def test_time_in_the_operands_is_a_change():
    assert kinds(check(lambda x: x * time.perf_counter(), X)) == ["changes_between_calls"]


def test_a_cache_made_by_the_first_call_is_no_finding():
    class Rope(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(3.0).cos()
            return x * self.table

    model = Rope()
    assert kinds(check(model, X)) == []
    assert "table" not in vars(model)


def slice_by_length(x, lengths):
    longest = max(lengths)
    return x[:, :longest] * 2  # at: again


def test_a_second_set_of_arguments_shows_what_follows_the_data():
    report = check(slice_by_length, X, [1, 1], again=(X, [1, 2]))
    finding = only(report, "changes_between_calls")
    assert (finding.where, finding.op) == (at("again"), "aten.slice")
    assert "1 -> 2" in finding.why


def test_arguments_of_another_shape_are_told_with_old_and_new_and_lead_to_buckets():
    finding = only(check(lambda x: x * 2, X, again=(torch.ones(5, 3),)), "changes_between_calls")
    assert "float32[2, 3] -> float32[5, 3]" in finding.why
    assert "Buckets" in finding.fix


def test_other_data_of_the_same_shape_is_no_finding():
    assert kinds(check(lambda x: x * x.sum(), X, again=(X + 1,))) == []


def with_number(x, n):  # at: number
    return x[:, :n]


def test_a_python_number_as_argument_is_a_warning_unless_again_shows_that_it_stays():
    finding = only(check(with_number, X, 2), "frozen_argument")
    assert (finding.op, finding.where, finding.severity) == ("args[1]", at("number"), "warning")
    assert kinds(check(with_number, X, 2, again=(X, 2))) == []
    assert kinds(check(functools.partial(with_number, n=2), X)) == []


def test_flags_are_no_numbers():
    assert kinds(check(lambda x, flip=False: -x if flip else x, X, flip=True)) == []


def test_the_interface_of_torch_and_numpy_is_as_before():
    before = torch.cuda.is_current_stream_capturing, np.random.rand, random.random
    check(python_random, X)
    assert (torch.cuda.is_current_stream_capturing, np.random.rand, random.random) == before
