"""Which backward passes have begun and not ended."""

from __future__ import annotations

import torch


class BackwardWatch:
    """Told of every gradient, knows whether a backward stopped in the middle.

    Attributes:
        open: backward passes that have delivered a gradient and not ended.
    """

    def __init__(self) -> None:
        self.open: set[int] = set()

    def enter(self) -> None:
        """A gradient came; called within the backward that made it."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task in self.open:  # below 0: called by hand, outside of any backward
            return
        self.open.add(task)
        # The engine calls back at the end of this backward, and not at all if an error ends it.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.open.discard(task))
