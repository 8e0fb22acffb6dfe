"""Errors that go to another process arrive whole; DCP sends what its ranks raise."""

from __future__ import annotations

import pickle

import pytest

import lf_ckpt

ERRORS = [
    lf_ckpt.CkptError("text"),
    lf_ckpt.CorruptError("path", "reason", tensor="x", extent=3, offset=4, expected="a", found="b"),
    lf_ckpt.DiskFullError("path", 5, 6),
    lf_ckpt.LockedError("path", "owner", "advice"),
    lf_ckpt.MismatchError(["a"], ["b"], ["c"]),
    lf_ckpt.NoCheckpointError("path", [(1, "bad")]),
    lf_ckpt.PeerLostError(2, "gone"),
    lf_ckpt.RankFailedError("what", {1: "reason"}, damage=True),
    lf_ckpt.UnsupportedError("text"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error: lf_ckpt.CkptError) -> None:
    found = pickle.loads(pickle.dumps(error))

    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
