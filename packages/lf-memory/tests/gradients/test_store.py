"""Plans in files: what is read back, what is refused, what is made anew."""

import json
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from lf_memory import gradients
from lf_memory.gradients import Placement, PlanError, predict, read_plan, write_plan
from lf_memory.gradients._json import _check_placements, _checksum, from_text, to_text

MODULE_FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def plan(gpt, ids):
    return predict(gpt(), ids, mode="bucket", bucket_bytes=100_000)


@pytest.fixture
def sealed(plan):
    """sealed(change): the text of the plan with `change` made to its body, and a checksum that fits."""

    def make(change):
        document = json.loads(to_text(plan))
        change(document["plan"])
        document["sha256"] = _checksum(document["plan"])
        return json.dumps(document).encode()

    return make


def test_a_plan_comes_back_as_it_was(plan, tmp_path):
    path = tmp_path / "new" / "dag_model.pkl"
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert asdict(read_plan(path)) == asdict(plan)
    assert [p.name for p in path.parent.iterdir()] == ["dag_model.pkl"]
    assert json.loads(path.read_text())["version"] == 1


def test_a_second_prediction_is_read_and_not_made(gpt, ids, tmp_path, monkeypatch):
    path = tmp_path / "dag.json"
    first = predict(gpt(), ids, dag_cache_path=path)
    assert re.match(r"made: .*dag\.json cannot be read \(No such file", first.origin)
    monkeypatch.setattr(gradients._run, "_record_backward", None)  # whatever runs the backward pass fails
    second = predict(gpt(), ids, dag_cache_path=str(path))
    assert second == first
    assert second.origin == f"read from {path}"


def test_rebuild_makes_it_in_any_case(gpt, ids, tmp_path):
    path = tmp_path / "dag.json"
    predict(gpt(), ids, dag_cache_path=path)
    before = path.stat().st_ino
    assert predict(gpt(), ids, dag_cache_path=path, rebuild=True).origin == "made: asked to rebuild"
    assert path.stat().st_ino != before
    assert not list(tmp_path.glob("*.bad"))


def test_another_model_shape_policy_or_torch_is_another_plan(gpt, ids, tmp_path, monkeypatch):
    path = tmp_path / "dag.json"
    keys = set()

    def make(model, ids, **options):
        plan = predict(model, ids, dag_cache_path=path, **options)
        keys.add(plan.key)
        return plan

    make(gpt(), ids)
    for change in (
        lambda: make(gpt(layers=3), ids),
        lambda: make(gpt(), ids[:, :16]),
        lambda: make(gpt().bfloat16(), ids),
        lambda: make(gpt(tied=True), ids),
        lambda: make(gpt(), ids, mode="bucket"),
        lambda: make(gpt(), ids, mode="bucket", bucket_bytes=1000),
        lambda: make(gpt(), ids, accumulation=2),
    ):
        assert "another graph, policy or version" in change().origin
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert "another graph" in make(gpt(), ids).origin
    assert len(keys) == 9


def test_a_change_inside_the_model_is_noticed(gpt, ids, tmp_path):
    """The articles: a custom layer changes the graph and the plan has to be made again."""
    model = gpt()
    predict(model, ids, dag_cache_path=tmp_path)
    model.run_block = lambda block, x: block(x) * 1.5
    assert predict(model, ids, dag_cache_path=tmp_path).origin.startswith("made")


def test_a_checkpointed_model_has_the_same_graph_but_another_plan(gpt, ids, tmp_path):
    model = gpt()
    plain = predict(model, ids, dag_cache_path=tmp_path / "dag.json")
    model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False)
    checkpointed = predict(model, ids, dag_cache_path=tmp_path / "dag.json")
    assert checkpointed.slots == plain.slots
    assert checkpointed.origin.startswith("made: ")
    assert checkpointed.saved_bytes < plain.saved_bytes


def test_a_directory_holds_any_number_of_plans(gpt, ids, tmp_path):
    for mode in ("fused", "all-alive"):
        predict(gpt(), ids, mode=mode, dag_cache_path=f"{tmp_path}/plans/")
    assert len(list((tmp_path / "plans").glob("*.plan.json"))) == 2
    for mode in ("fused", "all-alive"):
        assert predict(gpt(), ids, mode=mode, dag_cache_path=tmp_path / "plans").origin.startswith("read")


def test_a_file_that_is_no_plan_is_kept_aside(gpt, ids, tmp_path):
    path = tmp_path / "dag_gr00t_n16.pkl"
    precious = pickle.dumps({"weights": [1.0]})
    path.write_bytes(precious)
    plan = predict(gpt(), ids, dag_cache_path=path)
    assert "not JSON" in plan.origin
    assert (tmp_path / "dag_gr00t_n16.pkl.bad").read_bytes() == precious
    assert predict(gpt(), ids, dag_cache_path=path).origin.startswith("read")


def test_ranks_that_write_one_file_at_one_time_all_succeed(plan, tmp_path):
    path = tmp_path / "dag.json"

    def write(rank):
        for turn in range(20):
            if rank == 0:
                path.write_bytes(b"torn" * turn)
            write_plan(path, plan)

    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(write, range(4)))
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert {p.name for p in tmp_path.iterdir()} <= {"dag.json", "dag.json.bad"}


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_torn_file_is_made_anew(gpt, ids, tmp_path, keep):
    path = tmp_path / "dag.json"
    first = predict(gpt(), ids, dag_cache_path=path)
    path.write_bytes(path.read_bytes()[:keep])
    again = predict(gpt(), ids, dag_cache_path=path)
    assert again.origin.startswith("made: ")
    assert again == first == read_plan(path)


def test_a_path_that_cannot_be_written_says_so(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="name another path"):
        write_plan(tmp_path / "file" / "dag.json", plan)
    with pytest.raises(PlanError) as caught:
        read_plan(tmp_path / "nothing")
    assert caught.value.path == str(tmp_path / "nothing")


@settings(suppress_health_check=MODULE_FIXTURE, max_examples=300, deadline=None)
@given(st.data())
def test_no_changed_byte_gets_through(plan, data):
    text = to_text(plan).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != text[at]))
    changed = text[:at] + bytes([byte]) + text[at + 1 :]
    try:
        found = from_text(changed)
    except PlanError:
        return
    assert found == plan  # a space for a space of JSON, or the like


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(PlanError):
        from_text(data)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=MODULE_FIXTURE, max_examples=300, deadline=None)
@given(data=st.data(), value=NESTED)
def test_any_value_in_any_place_is_refused_or_makes_a_plan(sealed, data, value):
    """With a checksum that fits: written by a hostile program."""

    def change(body):
        where = body
        key = data.draw(st.sampled_from(sorted(where)))
        while isinstance(where[key], (list, dict)) and where[key] and data.draw(st.booleans()):
            where = where[key]
            key = data.draw(
                st.sampled_from(sorted(where)) if isinstance(where, dict) else st.integers(0, len(where) - 1)
            )
        where[key] = value

    try:
        found = from_text(sealed(change))
    except PlanError:
        return
    assert from_text(to_text(found).encode()) == found
    assert found.arena_bytes >= 0
    assert str(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.pop("steps"), "fields"),
        (lambda b: b.update(more=1), "fields"),
        (lambda b: b.update(steps=-1), "steps is no whole number"),
        (lambda b: b.update(steps=2.0), "steps is no whole number"),
        (lambda b: b.update(steps=1), "after the last step"),
        (lambda b: b.update(method="guess"), "method is none of"),
        (lambda b: b.update(key="x" * 5000), "at most 4096"),
        (lambda b: b["policy"].update(mode="eager"), "mode is 'eager'"),
        (lambda b: b["policy"].update(mode=["fused"]), "no text"),
        (lambda b: b["policy"].pop("mode"), "policy"),
        (lambda b: b["lifetimes"][0].pop(), "has not 7 values"),
        (lambda b: b["lifetimes"][0].__setitem__(6, 0), "ends before it begins"),
        (lambda b: b["placements"][1].__setitem__(1, 1 << 70), "offset in placements"),
        (lambda b: b["placements"].append(b["placements"][0]), "placed twice"),
        (lambda b: b.update(slots={}), "slots is no list"),
    ],
)
def test_a_wrong_value_is_named(sealed, change, words):
    with pytest.raises(PlanError, match=words):
        from_text(sealed(change))


def test_gradients_that_overlap_are_refused(plan):
    first, *rest = [p for p in plan.placements if p.end == plan.placements[1].end]
    moved = tuple(
        Placement(p.name, first.offset + 1, p.nbytes, p.start, p.end) if p == rest[-1] else p
        for p in plan.placements
    )
    with pytest.raises(PlanError, match="overlap"):
        from_text(to_text(replace(plan, placements=moved)).encode())


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 5), st.integers(0, 4)), max_size=9
    )
)
def test_gradients_are_refused_if_and_only_if_two_that_live_at_one_time_share_a_byte(rows):
    placements = tuple(
        Placement(str(at), offset, nbytes, start, start + steps)
        for at, (offset, nbytes, start, steps) in enumerate(rows)
    )
    overlap = any(
        a.start <= b.end
        and b.start <= a.end
        and a.offset < b.offset + b.nbytes
        and b.offset < a.offset + a.nbytes
        for at, a in enumerate(placements)
        for b in placements[:at]
    )
    with pytest.raises(PlanError, match="overlap") if overlap else nullcontext():
        _check_placements(placements, 10)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX")
def test_a_pipe_that_nobody_writes_to_is_no_plan(tmp_path):
    os.mkfifo(tmp_path / "dag.json")
    with pytest.raises(PlanError, match="not JSON"):
        read_plan(tmp_path / "dag.json")


def test_other_formats_and_versions_are_refused(plan):
    document = json.loads(to_text(plan))
    for change, words in (
        ({"format": "x"}, "not a gradient plan"),
        ({"version": 2}, "version 2"),
        ({"version": True}, "True"),
    ):
        with pytest.raises(PlanError, match=words):
            from_text(json.dumps({**document, **change}).encode())
    for text in ("[" * 100_000, "NaN", '{"version": 1}', "[]", "1" * 10_000):
        with pytest.raises(PlanError):
            from_text(text.encode())


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="64 MiB"):
        read_plan(path)
