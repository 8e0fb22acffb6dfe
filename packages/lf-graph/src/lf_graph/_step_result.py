"""What a step reports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lf_graph._backend import Backend


class StepResult:
    """Tensors on the device, for which nothing was waited.

    Reading one lets the current stream wait for the step's backward, not the host. With ``overlap``, a loop that reads
    no result lets the frozen prefix of the next step begin before this one has ended.
    """

    def __init__(self, report: Tensor, backend: Backend, done: Any) -> None:
        self._report, self._backend, self._done = report, backend, done

    @property
    def loss(self) -> Tensor:
        """float32 []: mean loss of the update, sum / count over all micro-batches and ranks."""
        return self._ready()[0]

    @property
    def count(self) -> Tensor:
        """float32 []: what the loss is the mean of."""
        return self._ready()[1]

    def _ready(self) -> Tensor:
        if self._done is not None:
            self._backend.current_stream().wait(self._done)
        return self._report
