"""BestFit against a plain bitmap, over random histories."""

from hypothesis import given
from hypothesis import strategies as st

from lf_memory._best_fit import BestFit

SIZE = 60


def holes_of(used):
    """(start, length) of every run of False."""
    holes, start = [], None
    for at, taken in enumerate([*used, True]):
        if not taken and start is None:
            start = at
        if taken and start is not None:
            holes.append((start, at - start))
            start = None
    return holes


@given(st.lists(st.one_of(st.integers(1, 25), st.integers(-30, -1)), max_size=80))
def test_any_history_keeps_ranges_apart_and_holes_joined(history):
    """Positive: take so many; negative: give back one of the live ranges."""
    fit, used, live = BestFit([(0, SIZE)]), [False] * SIZE, {}
    for step in history:
        if step > 0:
            fitting = [length for _, length in holes_of(used) if length >= step]
            start = fit.take(step)
            assert (start is None) == (not fitting)
            if start is None:
                continue
            expected = min((hole, at) for at, hole in holes_of(used) if hole >= step)
            assert start == expected[1]
            assert not any(used[start : start + step])
            used[start : start + step] = [True] * step
            live[start] = step
        elif live:
            start = sorted(live)[-step % len(live)]
            length = live.pop(start)
            fit.give(start, length)
            used[start : start + length] = [False] * length
        assert list(fit.holes) == holes_of(used)
        assert fit.free == used.count(False)
        assert fit.largest == max((length for _, length in holes_of(used)), default=0)
        assert BestFit.around([(0, SIZE)], live.items()).holes == fit.holes
    for start, length in live.items():
        fit.give(start, length)
    assert fit.holes == ((0, SIZE),)


def test_the_tightest_hole_is_taken():
    fit = BestFit([(0, 30)])
    starts = [fit.take(length) for length in (5, 2, 3, 2, 18)]
    assert starts == [0, 5, 7, 10, 12]
    for start, length in ((0, 5), (7, 3)):
        fit.give(start, length)
    assert fit.take(3) == 7
    assert fit.take(3) == 0
    assert fit.take(3) is None


def test_no_range_spans_two_extents():
    fit = BestFit([(0, 10), (10, 10)])
    assert (fit.largest, fit.free) == (10, 20)
    assert fit.take(11) is None
    assert [fit.take(6), fit.take(6)] == [0, 10]
    fit.add_extent(40, 4)
    assert fit.holes == ((6, 4), (16, 4), (40, 4))
    fit.give(0, 6)
    fit.give(10, 6)
    assert fit.holes == ((0, 10), (10, 10), (40, 4))
    assert BestFit.around([(10, 10), (0, 10)], [(0, 6), (19, 1)]).holes == ((6, 4), (10, 9))
