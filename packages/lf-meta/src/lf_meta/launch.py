"""``--nproc``: run this command on several ranks through torchrun, and own the way they are stopped.

torchrun kills its workers 30 s after it was asked to stop (torch 2.11 has no knob for it), which tears a long
checkpoint. So a stop signal never reaches torchrun: it runs in a session of its own, and this process passes
signals to the ranks, which agree on a step, save, and leave. Ranks that end in an orderly way (also after a
signal or a configuration error) exit with 0 towards torchrun, which would otherwise kill their peers, and leave
the true exit code in a file for the launcher. Should the launcher die, the kernel sends torchrun SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lf_meta.signals import exit_code, not_ignored

EXIT_FILE = "LOONGFORGE_EXIT_FILE"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHUTDOWN_TIMEOUT_S = "3600"  # torch >= 2.13 reads it; used when torchrun itself is told to stop


@dataclass(frozen=True)
class Launch:
    """Where the ranks run; the defaults are one process without torchrun."""

    nproc: int = 1
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_endpoint: str | None = None

    @property
    def needed(self) -> bool:
        """True when ranks have to be started and this process is not one of them."""
        return (self.nproc > 1 or self.nnodes != "1") and "TORCHELASTIC_RUN_ID" not in os.environ

    def torchrun(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``loongforge ARGUMENTS`` on every rank."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.nproc}"]
        if self.nnodes == "1":
            command.append("--standalone")
        else:
            command.append(f"--nnodes={self.nnodes}")
            command += [f"--node-rank={self.node_rank}"] if self.node_rank is not None else []
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv_endpoint}"]
        return [*command, "-m", "lf_meta.cli", *arguments]


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _workers(agent: int) -> list[int]:
    """The ranks: torchrun's child processes."""
    try:
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
    except OSError:
        return []
    return [int(p) for p in text.split()]


class _Forwarder:
    """Passes each stop signal of this process on to the ranks."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._old = {s: signal.signal(s, lambda n, _: self.received.append(n)) for s in not_ignored()}

    def restore(self) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def send(self, agent: int, sent: int) -> int:
        """Deliver signals from number ``sent`` on; returns how many have been delivered in all."""
        workers = _workers(agent)
        if not workers:
            return sent  # not started yet: kept for the next round
        for signum in self.received[sent:]:
            for pid in workers:
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue
        return len(self.received)


def report_exit(code: int) -> int:
    """What a rank should exit with: ``code`` itself, or 0 after handing it to the launcher."""
    path = os.environ.get(EXIT_FILE)
    if path is None or code == 0:
        return code
    with Path(path).open("a") as f:
        f.write(f"{code}\n")
    return 1 if code == 1 else 0  # after a failure while running, torchrun has to end the other ranks


def run(launch: Launch, arguments: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the whole job."""
    with tempfile.NamedTemporaryFile("r", prefix="loongforge-exit-") as exit_file:
        environment = {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_TIMEOUT_S,
            **os.environ,
            EXIT_FILE: exit_file.name,
        }
        forwarder = _Forwarder()
        try:
            agent = subprocess.Popen(
                launch.torchrun(arguments),
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            _wait(agent, forwarder)
        finally:
            forwarder.restore()
        told = sorted(int(code) for code in exit_file.read().split())
    if told:
        return told[0]  # a failure (1, 2) of one rank counts more than another's orderly stop (128 + signal)
    if forwarder.received:
        return exit_code(forwarder.received[0])
    return 1 if agent.returncode else 0


def _wait(agent: subprocess.Popen[bytes], forwarder: _Forwarder) -> None:
    sent = 0
    while agent.poll() is None:
        if len(forwarder.received) > sent:
            sent = forwarder.send(agent.pid, sent)
        time.sleep(0.05)
