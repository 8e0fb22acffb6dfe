"""The staging ring never hands out the same byte twice and never past its end."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lf_ckpt.errors import CkptError
from lf_ckpt.format import align
from lf_ckpt.sizing import MIN_SLAB, choose_slab, chunk_bytes_for
from lf_ckpt.slab import Slab, StagingAbortedError

SIZE = 64 * 4096


@given(st.lists(st.tuples(st.integers(1, SIZE // 4), st.integers(0, 3)), max_size=60))
def test_pieces_in_use_never_overlap_and_lie_inside(moves: list[tuple[int, int]]) -> None:
    slab = Slab(SIZE, pinned=False)
    held = []
    for length, releases in moves:
        for _ in range(min(releases, len(held))):
            slab.release(held.pop(0))
        while held and sum(piece.cost for piece in held) + 2 * align(length) > SIZE:
            slab.release(held.pop(0))  # room for sure, so that `take` cannot wait in this one thread
        piece = slab.take(length)
        held.append(piece)

        assert piece.offset % 4096 == 0
        spans = sorted((p.offset, p.offset + align(p.length)) for p in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= SIZE


def test_take_waits_for_release_and_is_woken_by_abort() -> None:
    slab = Slab(SIZE, pinned=False)
    pieces = [slab.take(SIZE // 2) for _ in range(2)]
    got: list[object] = []

    def take_two() -> None:
        got.append(slab.take(SIZE // 2))
        try:
            slab.take(SIZE // 2)
        except StagingAbortedError as error:
            got.append(error)

    thread = threading.Thread(target=take_two)
    thread.start()
    slab.release(pieces[0])
    while not got:
        pass
    slab.abort()
    thread.join(10)

    assert len(got) == 2


sizes = st.integers(0, 1 << 40)


@given(state=sizes, asked=st.none() | st.integers(MIN_SLAB, 1 << 38), free=st.none() | sizes)
def test_the_slab_holds_the_state_or_stays_in_its_budget(
    state: int, asked: int | None, free: int | None
) -> None:
    size, reason = choose_slab(state, asked, free)

    assert size % 4096 == 0
    assert size >= MIN_SLAB
    assert reason
    assert size <= max(align(state), MIN_SLAB)
    if asked is not None:
        assert size <= asked
    assert chunk_bytes_for(size) <= size // 4


def test_a_slab_that_is_too_small_is_refused() -> None:
    with pytest.raises(CkptError, match="4194304"):
        choose_slab(100, 4096, None)
