"""One `except` catches all that lf-comm raises of its own; each error is also the built-in one that it is a kind of."""

import inspect
import pickle

import pytest

import lf_comm
import lf_comm.topo

ERRORS = [
    error
    for module in (lf_comm, lf_comm.topo)
    for _, error in inspect.getmembers(module, inspect.isclass)
    if issubclass(error, Exception) and error is not lf_comm.CommError
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_derives_from_the_base_and_a_built_in(error: type[Exception]) -> None:
    assert issubclass(error, lf_comm.CommError)
    assert issubclass(error, (ValueError, TypeError, RuntimeError))


def test_the_list_above_is_not_empty() -> None:
    assert {"PeerLost", "DisagreementError", "OrderChangedError", "TopologyError"} <= {
        e.__name__ for e in ERRORS
    }


def test_a_lost_peer_travels_between_processes() -> None:
    lost = lf_comm.PeerLost(2, "all_reduce", 1, 7, 1.5)

    back = pickle.loads(pickle.dumps(lost))

    assert isinstance(back, lf_comm.CommError)
    assert (back.rank, back.bucket, back.step, str(back)) == (2, 1, 7, str(lost))
