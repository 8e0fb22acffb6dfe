"""The arena: no two values that live together share a byte, and no byte is wasted without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lf_hal.codegen.arena import ALIGNMENT, Lifetime, plan_arena


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    count = draw(st.integers(0, 24))
    found = []
    for i in range(count):
        first = draw(st.integers(0, 30))
        found.append(Lifetime(f"v{i}", draw(st.integers(0, 1000)), first, first + draw(st.integers(0, 12))))
    return found


@given(lifetimes())
def test_no_byte_belongs_to_two_living_values(values: list[Lifetime]) -> None:
    plan = plan_arena(values)
    assert set(plan.offsets) == {v.name for v in values}
    for step in range(50):
        owner: dict[int, str] = {}
        for v in values:
            if v.first <= step <= v.last:
                begin = plan.offsets[v.name]
                assert begin % ALIGNMENT == 0
                assert begin + v.nbytes <= plan.nbytes
                for byte in range(begin, begin + max(v.nbytes, 1)):
                    assert owner.setdefault(byte, v.name) == v.name


@given(lifetimes())
def test_the_arena_is_between_the_busiest_step_and_the_sum(values: list[Lifetime]) -> None:
    def size(v: Lifetime) -> int:
        return -(-max(v.nbytes, 1) // ALIGNMENT) * ALIGNMENT

    plan = plan_arena(values)
    busiest = max((sum(size(v) for v in values if v.first <= s <= v.last) for s in range(50)), default=0)
    assert busiest <= plan.nbytes <= sum(map(size, values))


@given(lifetimes())
def test_equal_inputs_give_equal_plans_in_any_order(values: list[Lifetime]) -> None:
    assert plan_arena(values) == plan_arena(list(reversed(values)))


def test_padding_keeps_neighbours_of_round_sizes_off_the_same_sets() -> None:
    values = [Lifetime(f"v{i}", 4096 << i % 4, 0, 3) for i in range(40)]
    plain, apart = (plan_arena(values, padding=padding) for padding in (False, True))
    assert len({offset % 4096 for offset in plain.offsets.values()}) == 1
    assert len({offset % 4096 for offset in apart.offsets.values()}) == 40
    assert all(offset % ALIGNMENT == 0 for offset in apart.offsets.values())
    assert apart.nbytes == plain.nbytes + 40 * ALIGNMENT


def test_a_chain_needs_two_places_only() -> None:
    chain = [Lifetime(f"v{i}", 640, i, i + 1) for i in range(50)]
    assert plan_arena(chain).nbytes == 2 * 640


def test_the_smallest_gap_is_taken() -> None:
    values = [
        Lifetime("left", 1024, 0, 9),
        Lifetime("wide", 512, 0, 3),
        Lifetime("middle", 384, 0, 9),
        Lifetime("narrow", 192, 0, 3),
        Lifetime("right", 128, 0, 9),
        Lifetime("late", 64, 5, 9),
    ]
    plan = plan_arena(values)
    assert plan.offsets["late"] == plan.offsets["narrow"]


@pytest.mark.parametrize(
    "bad",
    [
        [Lifetime("a", 1, 0, 1), Lifetime("a", 1, 3, 4)],
        [Lifetime("a", -1, 0, 1)],
        [Lifetime("a", 1, 2, 1)],
    ],
)
def test_senseless_lives_are_refused(bad: list[Lifetime]) -> None:
    with pytest.raises(ValueError, match=r"one name|sensible"):
        plan_arena(bad)
