"""The published order: saved positions depend on it, so these digests never change."""

import hashlib

import numpy as np
import pytest

from lf_iouring import Plan

RUNS = np.repeat([1, 0, 2, 0, 1, 2, 1], [37, 50, 3, 41, 29, 64, 1])
SCATTERED = np.arange(500) * 7919 % 3


def _digest(plan):
    total = hashlib.sha256()
    window = plan.window(0, 3 * plan.steps_per_epoch + 2)
    for column in (window.epoch, window.edge, window.ids):
        total.update(column.astype("<i8").tobytes())
    return total.hexdigest()[:16]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (lambda: Plan(np.array([4, 8, 16])[RUNS], RUNS, (4, 8, 16), 24, 7, True), "20146985bbec0e15"),
        (lambda: Plan(np.array([4, 8, 16])[RUNS], RUNS, (4, 8, 16), 24, 7, False), "e1ee7f57d6447f8b"),
        (lambda: Plan(None, None, (8,), 24, 7, records=1000), "cbbfc0d038537662"),
        (lambda: Plan(None, SCATTERED, (4, 8, 16), 10, 2**63), "60ee8adca46f37e2"),
    ],
    ids=["buckets", "unshuffled", "one bucket", "scattered"],
)
def test_the_order_of_three_epochs_is_the_published_one(plan, expected):
    assert _digest(plan()) == expected
