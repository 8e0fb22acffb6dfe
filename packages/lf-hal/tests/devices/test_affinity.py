"""LOONGFORGE_CPU_AFFINITY: what it means for each rank, and every way of being wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lf_hal.affinity import _text as as_list
from lf_hal.affinity import apply, nodes, parse, plan
from lf_hal.errors import AffinityError

NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
ALL = frozenset(range(8))


def cpus(text: str, rank: int = 0, ranks: int = 1) -> set[int]:
    return set(plan(text, rank, ranks, ALL, NODES).cpus)


def test_two_parts_are_of_two_ranks_as_on_a_host_with_two_sockets() -> None:
    assert cpus("0-3,4-7", 0, 2) == {0, 1, 2, 3}
    assert cpus("0-3,4-7", 1, 2) == {4, 5, 6, 7}
    assert "part 1 of 2" in plan("0-3,4-7", 1, 2, ALL, NODES).reason


def test_one_rank_or_another_number_of_them_shares_the_whole_list() -> None:
    assert cpus("0-3,6") == {0, 1, 2, 3, 6}
    assert cpus("0-3,6", 2, 3) == {0, 1, 2, 3, 6}
    assert "shared by 3 ranks" in plan("0-3,6", 2, 3, ALL, NODES).reason


def test_semicolons_give_each_rank_a_list_of_any_form() -> None:
    assert cpus("0,2,4;1,3,5", 1, 2) == {1, 3, 5}
    with pytest.raises(AffinityError, match="2 lists for 4 ranks"):
        cpus("0;1", 0, 4)


def test_nodes_stand_for_their_cpus() -> None:
    assert cpus("node:1") == {4, 5, 6, 7}
    assert cpus("node:0-1") == set(range(8))
    assert cpus("node:0,node:1", 1, 2) == {4, 5, 6, 7}
    assert cpus("node:0, 6") == {0, 1, 2, 3, 6}


@pytest.mark.parametrize(
    ("text", "part", "said"),
    [
        ("", "", "none of"),
        ("0,", "", "none of"),
        ("a", "a", "none of"),
        ("0-", "0-", "none of"),
        ("-1", "-1", "none of"),
        ("0-3-5", "0-3-5", "none of"),
        ("0x1", "0x1", "none of"),
        ("node:", "node:", "none of"),
        ("Node:0", "Node:0", "none of"),
        ("3-1", "3-1", "write 1-3"),
        ("0-2,2", "2", "CPU 2 again"),
        ("node:0,3", "3", "CPU 3 again"),
        ("node:7", "node:7", "this host has 0, 1"),
        ("0-63", "8", "may use 0-7"),
        ("9999999", "9999999", "none of"),
    ],
)
def test_what_cannot_be_had_is_named_with_its_part(text: str, part: str, said: str) -> None:
    with pytest.raises(AffinityError, match=said) as caught:
        cpus(text)
    assert caught.value.part == part
    assert caught.value.text == text
    assert "LOONGFORGE_CPU_AFFINITY" in str(caught.value)


def test_a_rank_that_is_none_of_them_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        cpus("0,1", 2, 2)


@given(st.frozensets(st.integers(0, 999), min_size=1))
def test_a_list_as_it_is_written_is_read_again(numbers: frozenset[int]) -> None:
    (parts,) = parse(as_list(numbers), {})
    assert frozenset().union(*parts) == numbers


@given(st.text(alphabet="0123456789-,;:node ", max_size=20))
def test_any_text_gives_cpus_or_one_typed_error(text: str) -> None:
    try:
        found = plan(text, 0, 1, ALL, NODES)
    except AffinityError:
        return
    assert found.cpus <= ALL


def test_nodes_are_read_from_sys(tmp_path: Path) -> None:
    for name, text in (("node0", "0-1,4\n"), ("node1", "\n"), ("node10", "2\n")):
        folder = tmp_path / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert nodes(tmp_path) == {0: {0, 1, 4}, 10: {2}}
    assert nodes(tmp_path / "nowhere") == {}


BIND = """
import os, threading, sys
from lf_hal.affinity import apply
started, go = threading.Event(), threading.Event()
seen = []
def worker():
    started.set(); go.wait(); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=worker); thread.start(); started.wait()
found = apply()
go.set(); thread.join()
print(sorted(found.cpus), sorted(os.sched_getaffinity(0)), sorted(seen[0]))
"""


def test_every_thread_of_the_process_is_bound() -> None:
    last = max(os.sched_getaffinity(0))
    env = os.environ | {"LOONGFORGE_CPU_AFFINITY": f"{last}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", BIND], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == f"[{last}] [{last}] [{last}]", done.stderr


def test_nothing_is_done_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOONGFORGE_CPU_AFFINITY", raising=False)
    before = os.sched_getaffinity(0)
    assert apply() is None
    assert apply(" ") is None
    assert os.sched_getaffinity(0) == before
