"""What is learned from past sums, and the bits that travel: pure parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lf_comm import Load, Rates
from lf_comm._paths import Known
from lf_comm._scan import live_rows, pack_bits, unpack_bits
from lf_comm.history import QUIET, History

CHEAP = {"dense": 10.0, "gather": 1.0, "union": 2.0, "split": 3.0}
DEAR = {"dense": 1.0, "gather": 10.0, "union": 9.0, "split": 8.0}


def test_what_stays_dense_is_asked_ever_less_often() -> None:
    history, asked = History(), []
    for number in range(4000):
        if history.asks():
            assert history.choose(DEAR) == "dense"
            asked.append(number)
    assert asked[:QUIET] == list(range(QUIET))
    assert len(asked) < QUIET + 10
    assert asked[-1] > 2000


def test_a_sparse_step_makes_it_ask_every_time_again() -> None:
    history = History()
    for _ in range(QUIET):
        assert history.asks()
        history.choose(DEAR)
    while not history.asks():
        pass
    assert history.choose(CHEAP) == "gather"
    assert all(history.asks() and history.choose(CHEAP) == "gather" for _ in range(50))


def test_a_path_that_is_slower_than_predicted_is_left() -> None:
    history = History()
    assert history.choose(CHEAP) == "gather"
    history.learn(1.0)
    assert history.choose(CHEAP) == "gather"
    for _ in range(6):
        history.learn(8.0 * CHEAP[history.path])
        history.choose(CHEAP)
    assert history.corrections["gather"] > 4
    assert history.path != "gather" or history.corrections["gather"] * 1.0 < 0.95 * 10


def test_paths_do_not_change_for_a_few_percent() -> None:
    history = History()
    history.choose({"dense": 10.0, "gather": 2.0, "union": 2.1, "split": 9.0})
    for union in (1.95, 2.05, 1.9, 2.0):
        assert history.choose({"dense": 10.0, "gather": 2.0, "union": union, "split": 9.0}) == "gather"
    assert history.choose({"dense": 10.0, "gather": 2.0, "union": 1.0, "split": 9.0}) == "union"


def steady(history: History, predicted: dict[str, float], took: dict[str, float], times: int) -> list[str]:
    """Paths of sums that take what they take, however they were predicted."""
    paths = []
    for _ in range(times):
        history.learn(took[history.path] if history.predicted else 0.0)
        paths.append(history.choose(predicted))
    return paths


def test_a_dense_sum_that_is_faster_than_predicted_is_found_out() -> None:
    predicted = {"dense": 8.0, "gather": 6.0, "union": 7.0, "split": 9.0}
    paths = steady(History(), predicted, {"dense": 5.0, "gather": 6.0, "union": 7.0, "split": 9.0}, 100)
    assert set(paths[2:]) == {"dense"}


def test_a_doubtful_path_is_held_beside_dense_seldom() -> None:
    predicted = {"dense": 8.0, "gather": 6.0, "union": 7.0, "split": 9.0}
    paths = steady(History(), predicted, predicted, 1000)
    assert paths[:4] == ["dense", "gather", "gather", "gather"]
    assert 10 <= paths.count("dense") <= 1000 / 64 + 2
    assert steady(History(), CHEAP, CHEAP, 1000).count("dense") == 0


def test_where_dense_sums_are_not_measured_one_is_enough() -> None:
    history, paths = History(), []
    for _ in range(200):
        history.learn(0.0)
        paths.append(history.choose({"dense": 8.0, "gather": 6.0}))
    assert paths == ["dense"] + ["gather"] * 199


def test_a_slow_link_does_not_make_untried_paths_look_fast() -> None:
    predicted = {"dense": 8.0, "gather": 8.2, "union": 9.0, "split": 9.0}
    took = {path: 1.8 * seconds for path, seconds in predicted.items()}
    assert set(steady(History(), predicted, took, 10)) == {"dense"}


def test_a_path_that_cannot_win_any_more_is_left() -> None:
    history = History()
    assert history.choose(CHEAP) == "gather"
    assert history.choose({"dense": 1.0, "union": 0.99}) == "dense"


def test_dense_is_taken_when_it_costs_about_the_same() -> None:
    assert History().choose({"dense": 1.0, "gather": 0.97, "union": 3.0, "split": 3.0}) == "dense"


@given(
    st.lists(
        st.tuples(*[st.floats(1e-6, 10) for _ in range(4)], st.floats(0, 100, allow_nan=False)), max_size=60
    )
)
def test_a_choice_is_never_predicted_to_be_slower_than_dense(steps: list[tuple[float, ...]]) -> None:
    history = History()
    for dense, gather, union, split, seconds in steps:
        history.learn(seconds)
        if not history.asks():
            continue
        predicted = {"dense": dense, "gather": gather, "union": union, "split": split}
        path = history.choose(predicted)
        dense_cost = dense * history.corrections.get("dense", 1.0)
        assert path == "dense" or predicted[path] * history.corrections.get(path, 0.0) <= 0.95 * dense_cost


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=70), min_size=1, max_size=4))
def test_bits_come_back(rows: list[list[bool]]) -> None:
    count = min(map(len, rows))
    lives = torch.tensor([row[:count] for row in rows])
    packed = torch.stack([pack_bits(live) for live in lives])
    assert packed.shape == (len(rows), -(-count // 8))
    assert torch.equal(unpack_bits(packed, count), lives)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
)
def test_live_rows_are_those_with_any_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    tensor = torch.zeros(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    wanted = torch.zeros(rows, dtype=torch.bool)
    for row in range(0, rows, 2):
        if columns:
            tensor[row, row % columns] = -0.0 if dtype.is_floating_point else 1
            wanted[row] = True
    assert torch.equal(live_rows(tensor), wanted)


def test_bytes_follow_from_the_rows_of_all() -> None:
    lives = torch.zeros(4, 1000, dtype=torch.bool)
    for rank in range(4):
        lives[rank, rank : 100 + rank] = True
    load = Load.of(Known(lives), 4096)
    assert (load.most, load.union, load.owned) == (100, 103, 26)
    assert load.bytes_sent("dense") == 2 * 3 * 1000 * 4096 // 4
    assert load.bytes_sent("gather") == 3 * 100 * 4096
    assert load.bytes_sent("union") == 2 * 3 * 103 * 4096 // 4
    assert load.bytes_sent("split") == 3 * (100 * 4096 // 4 + 26 * 4096)


def test_rates_are_kept_in_a_file(tmp_path: Path) -> None:
    rates = Rates(1e-4, 1e-9, 2e-9, 3e-9, 4e-10, 5e-10, 6e-10)
    rates.save(tmp_path / "rates.json")
    assert Rates.load(tmp_path / "rates.json") == rates
    for bad in (
        "",
        "{",
        "[" * 100_000,
        "\ud7ff{",
        '{"version": 1}',
        '{"version": 2, "latency": 1}',
        "[]",
        '{"version": 1, "latency": "x"}',
    ):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError, match=r"bad\.json"):
            Rates.load(tmp_path / "bad.json")
    text = (tmp_path / "rates.json").read_text().replace("0.0001", "-1.0")
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match="no number of seconds"):
        Rates.load(tmp_path / "bad.json")
