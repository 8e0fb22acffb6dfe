"""Shared tensors lie once in memory, cannot be changed for others, and outlive who shared them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import comm_peer_jobs as jobs
import pytest
import torch
import torch.multiprocessing as mp
from comm_ranks import Ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_comm
from lf_comm import _sealed

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(("world", "owner"), [(1, 0), (2, 0), (4, 2)])
def test_all_ranks_read_the_same_pages(ranks: Ranks, world: int, owner: int) -> None:
    answers = ranks.call(jobs.shared, world, owner=owner)
    assert len({answer.pop("inode") for answer in answers}) == 1
    for answer in answers:
        answer.pop("descriptors")
        assert answer == dict.fromkeys(answer, True)


def test_what_a_rank_writes_stays_its_own_and_is_named(ranks: Ranks) -> None:
    first, second, third = ranks.call(jobs.written, 3)
    assert second["said"] == ("b",)
    assert second["seen"] == 5
    for other in (first, third):
        assert other["said"] == ()
        assert other["seen"] == 1
    for answer in (first, second, third):
        assert answer["refused"] == ["PermissionError"] * 3  # by the kernel


def test_the_memory_outlives_the_owners_handle_and_descriptors_go(ranks: Ranks) -> None:
    for answer in ranks.call(jobs.closed, 3):
        assert answer["sum"] == 499500
        assert answer["left"] == 0
        assert answer["size"] == 0
    assert "closed" in ranks.call(jobs.closed, 2)[0]["said"]


def test_a_frozen_module_is_held_once_and_stays_tied(ranks: Ranks) -> None:
    answers = ranks.call(jobs.towers, 3)
    assert len({answer["inode"] for answer in answers}) == 1
    assert len({(answer["out"], answer["gradient"]) for answer in answers}) == 1
    assert all(answer["tied"] and answer["same"] for answer in answers)


def test_what_cannot_be_shared_is_said_on_every_rank(ranks: Ranks) -> None:
    first, second, third = ranks.call(jobs.refusals, 3)
    kinds = [[text.split(":")[0] for text in said] for said in (first, second, third)]
    assert kinds[0] == ["TypeError"] * 3 + ["ValueError"] + ["PeerError"] * 4
    assert kinds[1] == kinds[2] == ["PeerError"] * 3 + ["ValueError"] + ["PeerError"] * 4
    words = ("sparse_coo", "meta", "None", "owner=9")
    assert all(word in text for word, text in zip(words, first, strict=False))
    assert "first.weight needs a gradient" in second[4]
    assert "rank 1 needs a gradient" in third[4]
    assert all("not what rank 0's module has" in said[5] for said in (first, second, third))
    assert "not sealed" in second[6]
    assert "rank 1 could not" in first[6]
    assert "another host" in second[7]
    assert "rank 1 could not" in third[7]


@pytest.mark.parametrize(
    ("when", "kinds"),
    [("before", {"PeerGoneError"}), ("offered", {"PeerGoneError", "PeerError"}), ("after", set())],
)
def test_an_owner_that_dies_is_a_typed_error_before_and_nothing_after(
    ranks: Ranks, tmp_path: Path, when: str, kinds: set[str]
) -> None:
    outs = [tmp_path / f"{rank}.json" for rank in range(3)]
    context = mp.get_context("forkserver")  # that of `ranks`, with torch imported
    processes = [
        context.Process(target=jobs.leaving, args=(rank, 3, str(tmp_path / "store"), when, str(out)))
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    for process, code in zip(processes, (9, 3, 3), strict=True):
        process.join(100)
        process.kill()
        assert process.exitcode == code
    answers: list[dict[str, Any]] = [json.loads(outs[rank].read_text()) for rank in (1, 2)]
    if when == "after":
        assert answers == [{"sum": 499500.0}] * 2
        return
    assert {answer["kind"] for answer in answers} <= kinds
    assert any(answer["owner"] == 0 and "rank 0 left" in answer["text"] for answer in answers)


def test_sealed_memory_is_known_from_other_memory() -> None:
    tensors = {"a": torch.arange(3)}
    entries, nbytes = _sealed.layout(tensors)
    fd = _sealed.create(tensors, entries, nbytes)
    plain = os.memfd_create("plain")
    try:
        assert _sealed.is_sealed(fd)
        assert not _sealed.is_sealed(plain)
        assert not _sealed.is_sealed(0)
    finally:
        os.close(fd)
        os.close(plain)


dtypes = st.sampled_from([torch.float32, torch.bool, torch.int16])
kinds_of_tensors = st.lists(st.tuples(dtypes, st.lists(st.integers(0, 4))), max_size=6)


@patient
@given(kinds_of_tensors)
def test_tables_come_back_as_they_were(made: list[tuple[torch.dtype, list[int]]]) -> None:
    entries, nbytes = _sealed.layout(
        {str(i): torch.empty(shape, dtype=d) for i, (d, shape) in enumerate(made)}
    )
    assert _sealed.entries_of_json(_sealed.entries_to_json(entries), nbytes) == entries
    assert all(entry.offset % 64 == 0 for entry in entries)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
entry = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3) | json_values,
        "dtype": st.sampled_from(["float32", "bool", "nn", "Tensor", "__doc__"]) | json_values,
        "shape": st.lists(st.integers(-2, 1 << 70), max_size=3) | json_values,
        "offset": st.integers(-64, 256) | json_values,
    }
)


@patient
@given(st.one_of(st.text(), json_values.map(json.dumps), st.lists(entry, max_size=2).map(json.dumps)))
def test_any_other_table_is_a_value_error_or_lies_within(text: str) -> None:
    try:
        found = _sealed.entries_of_json(text, 256)
    except ValueError:
        return
    memory = torch.zeros(256, dtype=torch.uint8)
    for one in found:
        seen = _sealed.view(memory, one)
        assert one.offset >= 0
        assert one.offset + seen.nbytes <= memory.nbytes


def test_errors_travel_between_processes() -> None:
    gone = pickle.loads(pickle.dumps(lf_comm.PeerGoneError(3, "reset")))
    assert (gone.owner, gone.why) == (3, "reset")
    assert pickle.loads(pickle.dumps(lf_comm.PeerWrittenError(("a", "b")))).names == ("a", "b")
