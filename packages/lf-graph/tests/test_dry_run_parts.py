"""The parts of a dry run: comparing runs, finding modules, putting state back, structure without running."""

from __future__ import annotations

import functools
import math
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lf_graph._findings import Finding, Parameters, Report
from lf_graph._frames import call_users, definition, is_users, locate
from lf_graph._names import names_behind
from lf_graph._preserve import RandomState, preserved
from lf_graph._rules import HOST_CONSTANT, read
from lf_graph._stream import Step, first_difference, step
from lf_graph._structure import named_inputs, target_of, wrong_devices
from lf_graph._watch import DEVICE_WAIT, Watch, _covers, _sync_warnings

# comparing runs

steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["aten.add", "aten.mul"]),
        st.tuples(st.sampled_from(["float32[2]", "float32[3]"])),
        st.tuples(st.sampled_from(["1", "2", "nan"])),
    ),
    max_size=6,
)


@given(steps)
def test_a_run_does_not_differ_from_itself(run):
    assert first_difference(run, list(run)) is None


@given(steps, steps)
def test_runs_differ_exactly_when_a_step_does_and_the_first_one_is_told(a, b):
    difference = first_difference(a, b)
    assert (difference is None) == (a == b)
    if difference:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert difference.op == (b[same] if same < len(b) else a[same]).op
        assert difference.old != difference.new


def test_a_difference_names_only_the_values_that_changed():
    old = step("aten.slice", (torch.ones(2), 1, 0, 5), {})
    new = step("aten.slice", (torch.ones(2), 1, 0, 7), {}, "here.py:3", "block")
    difference = first_difference([old], [new])
    assert (difference.what, difference.old, difference.new) == ("value", "5", "7")
    assert (difference.where, difference.module) == ("here.py:3", "block")


def test_shapes_and_dtypes_are_compared_and_contents_are_not():
    one, other = step("op", (torch.ones(2),), {}), step("op", (torch.zeros(2),), {})
    assert first_difference([one], [other]) is None
    half = step("op", (torch.ones(2).half(),), {})
    assert first_difference([one], [half]).what == "shape"


def test_a_nan_is_the_same_as_a_nan():
    run = [step("op", (math.nan,), {})]
    assert first_difference(run, [step("op", (float("nan"),), {})]) is None


# finding modules

model = nn.Sequential(nn.Linear(2, 2))


class Trainer:
    def __init__(self):
        self.model, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def step(self, x):
        return self.other(self.model(x))

    __call__ = step


def helper(x):
    return model(x)


def test_modules_are_found_wherever_a_function_gets_them():
    inner = nn.Linear(2, 2)
    holder = [inner]
    for fn in (
        inner,
        inner.forward,
        lambda x: inner(x),
        lambda x: holder[0](x),
        lambda x, m=inner: m(x),
        functools.partial(lambda m, x: m(x), inner),
    ):
        assert list(names_behind(fn).roots.values()) == [inner]
    assert list(names_behind(lambda m, x: m(x), (inner, 1)).roots.values()) == [inner]
    assert list(names_behind(lambda x: helper(x)).roots.values()) == [model]


def test_one_module_keeps_its_own_names_and_several_are_named_by_who_holds_them():
    assert [n for n, _ in names_behind(helper).parameters] == ["0.weight", "0.bias"]
    trainer = Trainer()
    expected = ["model.weight", "model.bias", "other.weight", "other.bias"]
    assert [n for n, _ in names_behind(trainer.step).parameters] == expected
    assert [n for n, _ in names_behind(trainer).parameters] == expected


def test_a_submodule_beside_its_parent_is_named_inside_it():
    child = model[0]
    assert list(names_behind(lambda x: child(model(x))).roots) == [""]


def test_functions_that_call_each_other_are_followed_once():
    def even(x):
        return odd(x)

    def odd(x):
        return even(x)

    assert names_behind(even).roots == {}


# lines


def test_the_users_line_is_the_innermost_outside_of_torch_and_python():
    assert is_users(__file__)
    assert is_users("/usr/lib/python3.11/site-packages/transformers/x.py")
    assert not is_users(torch.nn.functional.__file__)
    assert not is_users(random.__file__)
    assert not is_users("<string>")


def test_a_search_for_the_users_line_ends_at_the_call_of_the_users_function():
    assert call_users(locate, {}) == ("", "")
    where, _ = call_users(lambda: locate({}))
    assert where.startswith(__file__ + ":")


def test_the_definition_of_a_callable_is_its_function_or_the_forward_of_its_class():
    line = helper.__code__.co_firstlineno
    assert definition(helper) == definition(functools.partial(helper, 1)) == f"{__file__}:{line}"
    assert definition(Trainer().step).startswith(__file__)
    assert "torch" in definition(nn.Linear(1, 1))
    assert definition(len) == ""


# putting back


@given(st.sampled_from(["python", "numpy", "torch"]), st.integers(1, 5))
def test_each_generator_is_seen_to_move_and_put_back(which, draws):
    state = RandomState.take()
    draw = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[which]
    values = [float(draw()) for _ in range(draws)]
    assert (state.python_moved(), state.numpy_moved(), state.torch_moved()) == (
        which == "python",
        which == "numpy",
        which == "torch",
    )
    state.restore()
    assert not any((state.python_moved(), state.numpy_moved(), state.torch_moved()))
    assert [float(draw()) for _ in range(draws)] == values


def test_only_memory_that_is_written_is_copied():
    layer = nn.Linear(4, 4)
    with preserved(names_behind(layer)) as state:
        state.about_to_write(layer.bias)
        state.about_to_write(layer.weight[0])
        assert len(state._written) == 2
        state.about_to_write(torch.ones(3))
        state.about_to_write(layer.weight)
        assert len(state._written) == 2


def test_a_write_to_a_view_of_a_parameter_brings_the_whole_parameter_back():
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    with preserved(names_behind(layer)) as state, torch.no_grad():
        state.about_to_write(layer.weight[1])
        layer.weight[1] = 5
        layer.weight[2] = 6
    assert torch.equal(layer.weight, before)


def test_optimizer_state_made_before_comes_back_bit_for_bit():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    from lf_graph._check import check

    def train(x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    report = check(train, torch.ones(1, 2))
    assert "host_read" in {f.kind for f in report.findings}  # Adam without capturable=True
    for p, state in optimizer.state.items():
        assert all(torch.equal(v, moments[p][k]) for k, v in state.items())


# structure


def test_devices_are_judged_without_having_them():
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert wrong_devices({"a": first, "b": torch.device("cpu")}, current=0) == []
    (other,) = wrong_devices({"a": first, "b": second}, current=0)
    assert (other.kind, other.op) == ("wrong_device", "b on cuda:1")
    (current,) = wrong_devices({"a": second}, current=0)
    assert "pytorch#87794" in current.why
    assert "torch.cuda.device(index)" in current.fix
    assert wrong_devices({}, None) == []


def test_the_target_is_the_first_device_that_is_not_the_host():
    names = names_behind(nn.Linear(1, 1))
    assert target_of(names, [torch.ones(1)]).type == "cpu"
    assert target_of(names, [torch.ones(1), torch.ones(1, device="meta")]).type == "meta"


def test_inputs_are_named_by_their_place():
    inputs = named_inputs((1, [2, {"x": 3}]), {"mask": 4})
    assert inputs == {"args[0]": 1, "args[1][0]": 2, "args[1][1]['x']": 3, "kwargs['mask']": 4}


# waits that CUDA reports


class Waits:
    count = 0

    def waited(self):
        self.count += 1


def test_warnings_of_cudas_debug_mode_are_told_and_others_pass(monkeypatch, recwarn):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    told = Waits()
    with _sync_warnings(told):
        assert modes[-1] == "warn"
        for _ in range(2):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at x.cpp)", stacklevel=1
            )
        warnings.warn("something else", stacklevel=1)
    assert told.count == 2
    assert modes[-1] == "default"
    assert [str(w.message) for w in recwarn] == ["something else"]


def test_a_reported_wait_is_dropped_where_its_cause_is_known():
    cause = read("__bool__").at("aten._local_scalar_dense", "a.py:1", "block")
    wait = DEVICE_WAIT.at("aten._local_scalar_dense", "a.py:1", "block")
    assert _covers(cause, wait)
    assert not _covers(wait, cause)
    assert not _covers(cause, DEVICE_WAIT.at("aten.index", "a.py:2", "block"))
    assert not _covers(cause, DEVICE_WAIT.at("aten.index", "a.py:1", "other"))


def test_findings_of_one_place_are_kept_once_and_the_better_one_stays():
    names = names_behind(nn.Linear(1, 1))
    with preserved(names) as state:
        watch = Watch(names, state, "cuda")
        wait, cause = DEVICE_WAIT.at("op", "a.py:1"), HOST_CONSTANT.at("torch.tensor", "a.py:1")
        for f in (wait, wait, cause, wait, cause, HOST_CONSTANT.at("torch.tensor", "a.py:2")):
            watch.add(f)
    assert [(f.kind, f.where) for f in watch.findings] == [
        ("host_to_device", "a.py:1"),
        ("host_to_device", "a.py:2"),
    ]


# the report


def finding(severity="error", where="a.py:1"):
    return Finding("hook", "forward_hook", where, "why it is", "what to do", severity, "block.0")


def test_an_empty_report_says_that_nothing_was_found():
    report = Report((), 12, False, Parameters())
    assert str(report) == "nothing found in 12 operations"
    assert report.ok


def test_a_report_of_warnings_is_ok_and_lists_them_in_columns():
    report = Report(
        (finding("warning"), finding("warning", "long_name.py:100")), 1, True, Parameters((), ("w",))
    )
    lines = str(report).splitlines()
    assert lines[0] == "0 errors, 2 warnings in 1 operation; uses random numbers; no gradient for w"
    assert lines[1].split() == ["severity", "kind", "operation", "where", "module"]
    assert [line.index("block.0") for line in (lines[2], lines[5])] == [lines[1].index("module")] * 2
    assert [lines[i].strip() for i in (3, 4)] == ["why: why it is", "fix: what to do"]
    assert report.ok


def test_a_path_below_the_working_directory_is_printed_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = str(Report((finding(where=f"{tmp_path}/model.py:3"),), 1, False, Parameters()))
    assert " model.py:3 " in text


def test_a_report_cannot_be_changed():
    with pytest.raises(AttributeError):
        Report((), 0, False, Parameters()).operations = 1
