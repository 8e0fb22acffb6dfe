"""HostPool against a model, over random histories of everything one can do to it."""

import gc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lf_memory import HostPool, PoolError

SLOTS = 4


class ManualFence:
    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed

    def wait(self):
        self.passed = True


class Machine(RuleBasedStateMachine):
    """The model: leases in hand, arrays in hand by slot, slots behind a fence; all others are free."""

    def __init__(self):
        super().__init__()
        self.pool = HostPool(64, SLOTS)
        self.leases, self.arrays, self.fenced, self.dead = [], [], {}, []
        self.released = set()  # positions of arrays whose lease was released
        self.serial = 0

    def held(self):
        """Slots that a lease or an unreleased array keeps."""
        return {lease.index for lease, _, _ in self.leases} | {i for i, _, _, kept in self.arrays if kept}

    @rule()
    def acquire(self):
        free = SLOTS - len(self.held()) - len(self.fenced)
        lease = self.pool.try_acquire()
        assert (lease is not None) == (free > 0)
        if lease is not None:
            assert lease.index not in self.held()
            assert lease.index not in self.fenced
            self.serial += 1
            lease.array[:] = self.serial % 251
            self.leases.append((lease, self.serial % 251, []))

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0), start=st.integers(0, 30))
    def view(self, at, start):
        lease, mark, _ = self.leases[at % len(self.leases)]
        view = lease.view((8, 2), np.uint16, 32)[start % 8 :]
        self.arrays.append((lease.index, view, mark, True))

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0), fenced=st.booleans())
    def release(self, at, fenced):
        lease, _, _ = self.leases.pop(at % len(self.leases))
        if fenced:
            self.fenced[lease.index] = ManualFence()
            lease.fence(self.fenced[lease.index])
        lease.release()
        self.arrays = [(i, view, mark, kept and i != lease.index) for i, view, mark, kept in self.arrays]
        self.dead.append(lease)

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0))
    def drop_lease(self, at):
        del self.leases[at % len(self.leases)]

    @precondition(lambda self: self.arrays)
    @rule(at=st.integers(0))
    def drop_array(self, at):
        del self.arrays[at % len(self.arrays)]

    @precondition(lambda self: self.fenced)
    @rule(at=st.integers(0))
    def pass_fence(self, at):
        index = sorted(self.fenced)[at % len(self.fenced)]
        self.fenced.pop(index).passed = True

    @precondition(lambda self: self.dead)
    @rule(at=st.integers(0))
    def use_after_release(self, at):
        lease = self.dead[at % len(self.dead)]
        with pytest.raises(PoolError, match="twice"):
            lease.release()
        with pytest.raises(PoolError, match="after its release"):
            lease.view((1,), np.uint8)

    @invariant()
    def the_pool_agrees(self):
        self.pool._table._sweep()
        stats = self.pool.stats()
        assert (stats.live, stats.fenced) == (len(self.held()), len(self.fenced))
        assert stats.free == SLOTS - stats.live - stats.fenced

    @invariant()
    def what_is_held_is_not_overwritten(self):
        for lease, mark, _ in self.leases:
            assert (lease.array == mark).all()
        for _, view, mark, kept in self.arrays:
            assert not kept or (view == mark * 257).all()

    def teardown(self):
        self.leases, self.arrays, self.dead = [], [], []
        for fence in self.fenced.values():
            fence.passed = True
        gc.collect()
        assert sorted(lease.index for lease in [self.pool.acquire(timeout=0) for _ in range(SLOTS)]) == [
            0,
            1,
            2,
            3,
        ]


Machine.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
test_any_history_agrees_with_the_model = Machine.TestCase
