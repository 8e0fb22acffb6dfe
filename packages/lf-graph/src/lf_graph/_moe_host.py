"""The articles' router: the host learns how full each expert is and picks an expert graph of that capacity.

Costs one read-back for each layer and call, which stalls the queue of device work; :class:`~lf_graph._moe.MoE` has
none and is the default. This one exists for devices without a grouped product, and to measure what the read-back costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._backend import backend_for
from lf_graph._capture import Captured, capture
from lf_graph._errors import GraphCaptureError, GraphError
from lf_graph._frames import user_line
from lf_graph._moe import MoE, compute_dtype, row_weights
from lf_graph._moe_experts import Experts, weighted_swiglu
from lf_graph._moe_route import Routing, gather_sum, spread
from lf_graph._pool import GraphPool
from lf_graph.kernels._inputs import no_autocast


@dataclass(frozen=True)
class HostRouting:
    """What a :class:`HostRoutedMoE` did so far.

    Attributes:
        read_backs: copies of the counts to the host that were waited for; one for each call.
        buckets: capacity -> calls that ran with it.
        overflow: calls whose fullest expert was beyond the largest capacity; they ran exactly, expert by expert.
    """

    read_backs: int
    buckets: dict[int, int]
    overflow: int


class CapacityExperts(nn.Module):
    """All experts as batched products over [E, capacity, hidden]: static shapes, nothing read back.

    Exact as long as no expert has more rows than the capacity; whoever calls it has to know that.
    """

    def __init__(self, experts: Experts, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        order: Tensor,
        inverse: Tensor,
        offsets: Tensor,
        keep: Tensor | None = None,
    ) -> Tensor:
        """x [N, hidden] in the dtype of the products and the fields of :class:`Routing`; returns [N, hidden]."""
        count, hidden = self.experts.gate_up.shape[:2]
        starts = torch.cat((offsets.new_zeros(1), offsets[:-1]))
        row = starts[:, None] + torch.arange(self.capacity, device=x.device)
        filled = (row < offsets[:, None]).flatten()
        assignment = order[row.flatten().clamp(max=order.shape[0] - 1)]
        slots = self._slots(inverse, starts, offsets)
        token = assignment // inverse.shape[1]
        # an empty slot holds some token's copy at weight zero: it adds nothing, forward or backward
        weight = row_weights(weights, assignment, slots, keep) * filled
        rows = spread(x, token, slots, keep).view(count, self.capacity, hidden)
        gate_up = torch.bmm(rows, self.experts.gate_up.to(x.dtype)).flatten(0, 1)
        inner = weighted_swiglu(gate_up, weight).view(count, self.capacity, -1)
        return gather_sum(torch.bmm(inner, self.experts.down.to(x.dtype)).flatten(0, 1), token, slots, keep)

    def _slots(self, inverse: Tensor, starts: Tensor, offsets: Tensor) -> Tensor:
        """int64 [N, top_k], the slot of each assignment; tokens that are not kept get some slot that is ignored."""
        expert = torch.searchsorted(offsets, inverse.to(torch.int32), right=True).clamp(
            max=starts.shape[0] - 1
        )
        place = (inverse - starts[expert]).clamp(max=self.capacity - 1)
        return expert * self.capacity + place


class HostRoutedMoE(MoE):
    """:class:`~lf_graph._moe.MoE` with one capacity graph chosen by the host for each call; same results.

    The counts go to page-locked memory by one asynchronous copy, and the smallest capacity that holds the fullest
    expert runs. Beyond the largest capacity the experts run one after the other on exactly their rows. No token is
    ever dropped.

    Args:
        capacities: rows for each expert, ascending.
        others: as :class:`~lf_graph._moe.MoE`, without ``backend``.

    Raises:
        GraphError: capacities that are not positive and ascending.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        capacities: Sequence[int] = (64, 128, 256, 512, 1024),
        **options: Any,
    ) -> None:
        if "backend" in options:
            raise GraphError("HostRoutedMoE runs batched products; it takes no backend")
        super().__init__(hidden, ffn, experts, top_k, **options)
        self.capacities = tuple(capacities)
        if not self.capacities or min(self.capacities) < 1 or sorted(set(capacities)) != list(capacities):
            raise GraphError(f"capacities {self.capacities} must be positive and ascending")
        self._runners: dict[int, Callable[..., Tensor]] = {}
        self._captured: list[Captured] = []
        self._host: Tensor | None = None
        self._read_backs = self._overflow = 0
        self._used: Counter[int] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles come without graphs: call :meth:`capture_buckets` there."""
        return {**self.__dict__, "_runners": {}, "_captured": [], "_host": None}

    def stats(self) -> HostRouting:
        """Read-backs, bucket use and overflow so far."""
        return HostRouting(self._read_backs, dict(sorted(self._used.items())), self._overflow)

    def experts_at(self, capacity: int) -> CapacityExperts:
        """The experts' part at one capacity, a function of static shapes that can be captured."""
        return CapacityExperts(self.experts, capacity)

    def run_with(self, capacity: int, runner: Callable[..., Tensor]) -> None:
        """Let ``runner`` take the place of :meth:`experts_at` for one of the capacities.

        Raises:
            GraphError: not one of the capacities.
        """
        if capacity not in self.capacities:
            raise GraphError(f"{capacity} is not one of the capacities {self.capacities}")
        self._runners[capacity] = runner

    def capture_buckets(self, x: Tensor, keep: Tensor | None = None, **options: Any) -> None:
        """Capture the experts at every capacity for inputs like x and keep, under the caller's autocast.

        The graphs share one pool: a call runs one of them, and its backward comes before the next call. Until
        :meth:`close` every call must have inputs of the same shape and dtype that want gradients alike.

        Args:
            x, keep: as :meth:`forward`.
            options: of :func:`~lf_graph._capture.capture`, such as ``pool``.

        Raises:
            GraphCaptureError, BudgetError: as :func:`~lf_graph._capture.capture`; no bucket is captured then.
        """
        self.close()
        flat, kept = self._flat(x, keep)
        dtype = compute_dtype(self.experts.down, flat)
        options.setdefault("pool", GraphPool(backend_for(flat.device)))
        try:
            with no_autocast(flat.device):
                sample = flat.detach().to(dtype).requires_grad_(x.requires_grad)
                r = self._route(self._logits(flat, dtype), kept)
                weights = r.weights.detach().requires_grad_(r.weights.requires_grad)
                self._capture_each((sample, weights, r.order, r.inverse, r.offsets, kept), options)
        except BaseException:
            self.close()
            raise

    def _capture_each(self, sample: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
        for capacity in self.capacities:
            name = f"experts_at({capacity})"
            self._captured.append(capture(self.experts_at(capacity), *sample, name=name, **options))
            self.run_with(capacity, self._captured[-1])

    def close(self) -> None:
        """Free the captured buckets; calls run eagerly again."""
        for made in self._captured:
            made.close()
        self._captured.clear()
        self._runners.clear()

    def _experts(self, x: Tensor, r: Routing, keep: Tensor | None) -> Tensor:
        counts = self._counts_on_host(r.counts())
        fullest = max(counts)
        capacity = next((c for c in self.capacities if c >= fullest), None)
        if capacity is None or not x.shape[0]:
            self._overflow += capacity is None
            return self._one_by_one(x, r, counts, keep)
        self._used[capacity] += 1
        runner = self._runners.get(capacity) or self.experts_at(capacity)
        return runner(x, r.weights, r.order, r.inverse, r.offsets, keep)

    def _counts_on_host(self, counts: Tensor) -> list[int]:
        if counts.device.type in ("cpu", "cuda") and backend_for(counts.device).is_capturing():
            raise GraphCaptureError(
                "HostRoutedMoE",
                user_line(),
                "the host chooses the capacity, and a graph cannot wait for the device",
                "capture its buckets with capture_buckets(), or use MoE",
            )
        on_cuda = counts.is_cuda
        if self._host is None or self._host.is_pinned() != on_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=on_cuda)
        self._host.copy_(counts, non_blocking=on_cuda)
        if on_cuda:
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
        self._read_backs += 1
        found: list[int] = self._host.tolist()
        return found

    def _one_by_one(self, x: Tensor, r: Routing, counts: list[int], keep: Tensor | None) -> Tensor:
        """Exactly the rows of each expert; shapes depend on the counts, which are on the host already."""
        weight = row_weights(r.weights, r.order, r.inverse, keep)
        pieces = [*counts, r.order.shape[0] - sum(counts)]  # the last one: rows of tokens that are not kept
        rows = spread(x, r.tokens, r.inverse, keep).split(pieces)
        weights = weight.split(pieces)
        gate_up, down = self.experts.gate_up.to(x.dtype), self.experts.down.to(x.dtype)
        done = [weighted_swiglu(rows[e] @ gate_up[e], weights[e]) @ down[e] for e in range(len(counts))]
        return gather_sum(torch.cat((*done, torch.zeros_like(rows[-1]))), r.tokens, r.inverse, keep)
