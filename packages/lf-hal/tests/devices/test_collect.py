"""What a child wrote before it went is read, however late its end is noticed."""

import os
import subprocess
import sys
import time

import pytest

from lf_hal.probe import _run


def test_a_result_written_between_two_looks_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found under load: the child wrote and went after the pipes were looked at, and before the process was."""
    reader, writer = os.pipe()
    write = f"import os, sys; sys.stdin.read(1); os.write({writer}, b'last words')"
    child = subprocess.Popen(
        [sys.executable, "-c", write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writer]
    )
    os.close(writer)
    real, looks = os.waitid, []

    def waitid(*args: int) -> object:
        if not looks:  # the first look at the process comes after the child has gone
            looks.append(1)
            assert child.stdin is not None
            child.stdin.close()
            real(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return real(*args)

    monkeypatch.setattr(os, "waitid", waitid)
    result, _, in_time = _run._collect(child, reader, time.monotonic() + 30)
    os.close(reader)
    child.wait()
    assert in_time
    assert result == b"last words"
