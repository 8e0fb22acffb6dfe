"""Stop signals: the first is a request, the second is final, also while the main thread is inside C."""

import signal
import subprocess
import sys
import time

import pytest

from lf_meta.signals import HANDLED, StopSignal, exit_code

PROGRAM = """
import signal, sys, time
from lf_meta.signals import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    {body}
"""


HEARD = "import signal\nfor s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_DFL)\n"


def _start(body: str) -> "subprocess.Popen[str]":
    # the tests themselves may run behind nohup, or in the background of a shell
    program = HEARD + "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + PROGRAM.format(body=body)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_first_signal_is_recorded_and_the_program_goes_on(signum: int) -> None:
    process = _start("\n    while not stop.signum: time.sleep(0.01)\n    print(stop.signum)")
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{int(signum)}\n")


def test_second_signal_ends_at_once_even_inside_a_c_call() -> None:
    # a lock held in C: no bytecode runs, so an ordinary handler would wait for ever
    body = "import threading; e = threading.Lock(); e.acquire(); signal.pthread_sigmask(0, []); e.acquire()"
    process = _start(body)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)  # later than what counts as one request
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in HANDLED]
    with StopSignal():
        pass
    assert [signal.getsignal(s) for s in HANDLED] == before
    assert (exit_code(signal.SIGTERM), exit_code(signal.SIGINT)) == (143, 130)


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    body = "\n    time.sleep(0.5)\n    print(stop.signum)"
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=60)
    assert out == "0\n"


def test_the_same_request_on_two_ways_is_one_request() -> None:
    process = _start("\n    time.sleep(2.0)\n    print(stop.signum)")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{int(signal.SIGTERM)}\n")
