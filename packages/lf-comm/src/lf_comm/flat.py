"""Gradients that lie in flat buffers, such as those that a captured graph writes: tables by rows, the rest densely.

    reduce = lf_comm.BufferReducer()
    step = lf_graph.TrainStep(model, optimizer, loss=loss, reduce=reduce)

Such gradients never pass DDP's hooks. What keeps them calls :meth:`BufferReducer.bind` once with their names, and the
reducer before every update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lf_comm._ask import DisagreementError
from lf_comm.cost import Rates
from lf_comm.ddp import rest_of
from lf_comm.rows import MIN_BYTES, Decision, Item, RowReducer

BUCKET_BYTES = 25 << 20  # as DDP's


class BufferReducer:
    """Sums flat gradient buffers over a group, in place; sparse gradients in them by rows."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        rates: Rates | None = None,
        min_bytes: int = MIN_BYTES,
        only: Iterable[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """group: looked up at the first sum (None: all ranks). rates, min_bytes, only: as of
        :class:`lf_comm.SparseGradReducer`. bucket_bytes: of the largest dense collective.

        Raises ValueError for a bucket of no bytes.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
        self._group, self._rates, self._min_bytes, self._bucket_bytes = group, rates, min_bytes, bucket_bytes
        self._only = None if only is None else frozenset([only] if isinstance(only, str) else only)
        self._rows: RowReducer | None = None
        self._gradients: dict[str, Tensor] = {}
        self._agreed: set[int] = set()
        self._decisions: dict[str, Decision] = {}

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent, questions included."""
        return 0 if self._rows is None else self._rows.channel.sent

    def report(self) -> dict[str, Decision]:
        """How the last gradient of each parameter that was looked at was summed, by name."""
        return dict(self._decisions)

    def bind(self, gradients: Mapping[str, Tensor]) -> None:
        """Tell which gradient lies where: by parameter name, contiguous views of the buffers that will be summed.

        Raises ValueError for a name in `only` that is not among them, TypeError for a view that is not contiguous.
        """
        if unknown := sorted((self._only or frozenset()) - set(gradients)):
            raise ValueError(f"only: there is no gradient of a parameter {unknown[0]}")
        if torn := next((name for name, view in gradients.items() if not view.is_contiguous()), None):
            raise TypeError(f"{torn}: its gradient is not contiguous; a flat buffer holds it in one piece")
        looked = gradients if self._only is None else {n: gradients[n] for n in self._only}
        self._gradients = {n: g for n, g in looked.items() if g.dim() >= 2 or self._only is not None}

    def __call__(self, buffers: Sequence[Tensor], totals: Tensor | None = None) -> None:
        """Sum over ranks in place: buffers [n] of any dtypes, and with them totals (such as loss sum and count).

        Every rank calls it equally often with equal buffers. Raises RuntimeError before :meth:`bind`, ValueError for a
        bound gradient that lies in none of them, and DisagreementError on all ranks where buffers or names differ.
        """
        if not self._gradients and self._only is None and any(b.numel() for b in buffers):
            raise RuntimeError(
                "BufferReducer: call bind(gradients by name) first, as lf_graph.TrainStep does"
            )
        held = {b.untyped_storage().data_ptr() for b in buffers}
        if lost := [n for n, g in self._gradients.items() if g.untyped_storage().data_ptr() not in held]:
            raise ValueError(
                f"{lost[0]}: its gradient lies in none of the buffers, so it would not be summed"
            )
        if self._rows is None:
            self._rows = RowReducer(self._group, rates=self._rates, min_bytes=self._min_bytes)
        rows = self._rows
        if rows.channel.size == 1:
            return
        self._agree(buffers, rows)
        sums = rows.prepare([Item(g, n) for n, g in self._gradients.items()])
        for buffer in buffers:
            base = buffer.untyped_storage().data_ptr()
            apart = [one.item.tensor for one in sums if one.path != "dense"]
            here = [t for t in apart if t.untyped_storage().data_ptr() == base]
            for span in rest_of(buffer, here):
                for part in span.split(max(1, self._bucket_bytes // buffer.itemsize)):
                    rows.channel.all_reduce(part)
        if totals is not None:
            rows.channel.all_reduce(totals)
        for name, one in zip(self._gradients, sums, strict=True):
            if one.path != "dense":
                self._decisions[name] = rows.run(one, "sum").decision
            else:
                self._decisions[name] = Decision("dense", one.reason, 0, 0, 0.0, one.predicted)

    def _agree(self, buffers: Sequence[Tensor], rows: RowReducer) -> None:
        """Once for each set of buffers: others would hang, or sum what does not belong together."""
        places = [(n, tuple(g.shape), g.storage_offset(), str(g.dtype)) for n, g in self._gradients.items()]
        layout = ([(b.numel(), str(b.dtype)) for b in buffers], self._bucket_bytes, self._min_bytes, places)
        mine = int.from_bytes(hashlib.blake2b(repr(layout).encode(), digest_size=7).digest(), "big")
        if mine in self._agreed:
            return
        extremes = torch.tensor([mine, -mine], device=buffers[0].device if buffers else None)
        rows.channel.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.tolist() != [mine, -mine]:
            raise DisagreementError(
                "ranks differ in the gradients they sum; nothing was summed. Build the same model, freeze the same "
                "parameters and give the same options on every rank"
            )
        self._agreed.add(mine)
