"""A device whose copies happen as late as its events allow: what a missing wait would break, breaks here."""

from __future__ import annotations

import contextlib

import torch

from lf_memory.gradients._offload_copies import StreamCopies


class Event:
    """Passes when the work that a stream had when it was recorded has run."""

    def __init__(self, stream, upto):
        self.stream, self.upto = stream, upto

    def query(self):
        return self.stream.done >= self.upto

    def synchronize(self):
        self.stream.run(self.upto)


class Stream:
    """Work that waits in a list until someone waits for it."""

    def __init__(self, device=None):
        self.work, self.done = [], 0

    def add(self, work):
        self.work.append(work)

    def run(self, upto):
        while self.done < upto:
            self.work[self.done]()
            self.done += 1

    def record_event(self):
        return Event(self, len(self.work))

    def wait_stream(self, other):
        """The caller's stream is the host here: what it has queued has run."""

    def wait_event(self, event):
        event.synchronize()


class LateDevice:
    """Stands for torch.cuda: Stream, stream and current_stream."""

    def __init__(self):
        self.host, self.sides, self.held = Stream(), [], []
        self._current = self.host

    def Stream(self, device):  # noqa: N802 (named like torch.cuda's)
        self.sides.append(Stream())
        return self.sides[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, device):
        return self._current

    def copy(self, target, source):
        self._current.add(lambda: target.copy_(source))

    def hold(self, tensor, stream):
        self.held.append((tensor.nbytes, stream))

    def copies(self):
        return StreamCopies(torch.device("cpu"), self, self.copy, self.hold)
