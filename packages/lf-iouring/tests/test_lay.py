"""Staging and laying packed rows: C and Python agree, groups save the padding they are for."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_iouring import Mixture, PackPlan, _lay, packing
from lf_iouring._batch import Layout
from lf_iouring._compiled import lib
from lf_iouring._layout import HeapSlot, SlotLayout
from lf_iouring._staging import MAX_GROUPS, group_edges, stage
from lf_iouring.packing import pack

needs_c = pytest.mark.skipif(lib is None, reason="no C module")


class Documents:
    """What `stage` needs of a data set; it is its own only file, at whose bytes nobody looks."""

    path, codecs_raw, buckets = "none", True, (300,)

    def __init__(self, lengths, masked):
        self.lengths = np.array(lengths, np.uint32)
        self.readers = (self,)
        mask = [lff.Field.bits("loss_mask", (-1,), "loss_mask")] if masked else []
        self.fields = [lff.Field.tokens("tokens", "uint16"), *mask]

    def __len__(self):
        return len(self.lengths)

    def fileno(self):
        return 0

    def codings(self):
        return []

    def locations(self, ids):
        zeros = np.zeros(len(ids), np.uint64)
        counts = np.stack([self.lengths[ids]] * len(self.fields))
        return lff.Locations(
            zeros.astype(np.int64), zeros, zeros.astype(np.uint32), counts * 0, counts * 0, counts
        )


@st.composite
def staged(draw):
    """A staged window of random documents and the staging memory of one of its batches, filled with noise."""
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any))
    capacity, rows, masked = draw(st.integers(1, 200)), draw(st.integers(1, 5)), draw(st.booleans())
    plan = PackPlan([np.array(lengths)], Mixture([1]), capacity, rows, seed=1, window=len(lengths))
    dataset = Documents(lengths, masked)
    window = stage(dataset, SlotLayout(dataset), plan.packed(0), 0, slice(0, rows), rows, verify=False)
    batch = draw(st.integers(0, plan.packed(0).batches - 1))
    noise = np.random.default_rng(draw(st.integers(0, 99)))
    sources = []
    for group in window.groups:
        layout = Layout(group.reads.rows, np.dtype(np.uint16), masked)
        memory = noise.integers(0, 256, layout.slot_bytes(group.edge), np.uint8)
        target = layout.target(HeapSlot(memory), group.edge)
        if masked:
            target.mask[...] &= 1
        sources.append(target if group.used[batch] else None)
    return window, batch, sources, Layout(rows, np.dtype(np.uint16), True), capacity


def contents(lay, window, batch, sources, layout, capacity):
    target = layout.on_heap(capacity)
    target.tokens[...], target.mask[...] = 7, 7
    cut = slice(int(window.cuts[batch]), int(window.cuts[batch + 1]))
    found = lay(window, cut, sources, target)
    arrays = (found.cu_seqlens, found.position_ids, found.segment_ids, found.lengths, *target[:2])
    return found.max_seqlen, [(array.dtype, array.tolist()) for array in arrays]


@needs_c
@given(staged())
@settings(max_examples=150, deadline=None)
def test_c_and_python_lay_the_same_rows(case):
    assert contents(_lay._lay_in_c, *case) == contents(_lay._lay_in_python, *case)


@needs_c
@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_c_and_python_fit_the_same_rows(lengths, capacity):
    def columns():
        made = pack(lengths, capacity)
        return made.rows, *(
            getattr(made, name).tolist() for name in ("row", "place", "item", "start", "length")
        )

    in_c = columns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "lib", None)
        assert columns() == in_c


@given(st.lists(st.integers(1, 10**6), max_size=50), st.integers(1, 64))
def test_groups_take_every_record_and_a_group_more_saves_padding(sizes, batches):
    sizes = np.array(sizes, np.int64)
    edges = group_edges(sizes, batches, 2)
    assert edges == sorted(set(edges))
    assert 1 <= len(edges) <= MAX_GROUPS
    assert edges[-1] == max(sizes, default=1)
    for low, high in itertools.pairwise(edges):
        assert np.count_nonzero(sizes <= low) * (high - low) * 2 >= batches << 16
