"""Exact all-reduce of tensors of which each rank has set few rows.

    work = lf_comm.all_reduce_rows(gradient)          # in place; any backend
    work.decision                                      # Decision(path="gather", reason=..., bytes=..., seconds=...)

A row is what lies at one index of the first dimension. Every rank first learns which rows each rank has set, as bits,
in one collective; from that all ranks predict the same costs, and take the same path: `dense`, `gather`, `union` or
`split` (see _paths.py). Tensors below 1 MiB go dense at once. Sums in which rows are added by this library are made
in the order of ranks: the same bits on every rank and in every run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lf_comm._ask import Own, ask
from lf_comm._channel import Channel
from lf_comm._errors import CommError
from lf_comm._paths import PATHS, Known, dense
from lf_comm._scan import live_rows
from lf_comm.cost import Load, Rates, measure_rates
from lf_comm.history import History

PathName: TypeAlias = Literal["dense", "gather", "union", "split"]
Plan: TypeAlias = Literal["auto", "dense", "gather", "union", "split"]
Op: TypeAlias = Literal["sum", "avg"]
MIN_BYTES = 1 << 20
_BITS_SHARE = 0.02  # of a dense sum's bytes, at most, may the bits of all ranks cost


class LayoutError(CommError, TypeError):
    """A tensor whose layout this library cannot sum."""


@dataclass(frozen=True)
class Decision:
    """How one sum was made. bytes: payload this rank sent; seconds: on this rank, 0.0 when it was made with others."""

    path: PathName
    reason: str
    bytes: int
    predicted_bytes: int
    seconds: float
    predicted_seconds: float


class RowsWork:
    """A finished sum: what ``torch.distributed`` calls a Work, with the decision behind it."""

    def __init__(self, result: Tensor, decision: Decision) -> None:
        self.result, self.decision = result, decision

    def wait(self) -> bool:
        """The sum is there when the call returns (on a GPU: in the order of the current stream)."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class Item(NamedTuple):
    """One tensor to be summed. key: its name, under which is learned; rows: the only rows that may be set, if known."""

    tensor: Tensor
    key: str | None = None
    rows: Tensor | None = None


@dataclass
class PlannedSum:
    """A sum that has its path and has not been made."""

    item: Item
    rows: Tensor  # [N, C], contiguous
    path: str
    reason: str
    history: History | None
    known: Known | None = None
    load: Load | None = None
    predicted: float = 0.0


class RowReducer:
    """Sums tensors over one group, and learns by their names what is cheapest.

    Every rank makes the same calls with tensors of the same shapes, dtypes and keys. Where ranks differ in rates, plan
    or past, or one fails before it has told its rows, all raise DisagreementError and nothing is summed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        rates: Rates | None = None,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        """rates: of this group, the same on all ranks; measured at the first sum that needs them when None.
        min_bytes: smaller tensors are summed densely and nobody is asked.
        """
        self.channel = Channel(group)
        self._rates, self._min_bytes = rates, min_bytes
        self._histories: dict[str, History] = {}
        self._last: dict[str, float] = {}  # seconds of the last sum by key, on this rank

    @property
    def rates(self) -> Rates | None:
        """What the choices rest on."""
        return self._rates

    def forget(self) -> None:
        """Free the memory that is kept between sums, as much as the largest of them packed, received and gathered."""
        self.channel.forget()

    def all_reduce(
        self,
        tensor: Tensor,
        key: str | None = None,
        *,
        rows: Tensor | None = None,
        plan: Plan = "auto",
        op: Op = "sum",
    ) -> RowsWork:
        """Sum `tensor` in place; see :func:`all_reduce_rows`."""
        if tensor.layout is not torch.strided:
            _check_words(plan, op)
            return self._sparse(tensor, key, op)
        (work,) = self.all_reduce_many([Item(tensor, key, rows)], plan=plan, op=op)
        return work

    def all_reduce_many(
        self, items: Sequence[Item], *, plan: Plan = "auto", op: Op = "sum"
    ) -> list[RowsWork]:
        """Sum several strided tensors in place; one collective asks for the rows of all."""
        _check_words(plan, op)
        if op == "avg" and (
            whole := [i.key for i in items if not (i.tensor.is_floating_point() or i.tensor.is_complex())]
        ):
            raise TypeError(
                f"{whole[0] or 'tensor'}: op='avg' of whole numbers; sum them, and divide what you mean to"
            )
        return [self.run(one, op) for one in self.prepare(items, plan=plan)]

    def prepare(self, items: Sequence[Item], *, plan: Plan = "auto") -> list[PlannedSum]:
        """Choose how each would be summed, for a caller that sums dense ones together; then `run`."""
        for item in items:
            if item.tensor.layout is not torch.strided:
                raise LayoutError(
                    f"{item.key or 'tensor'}: {item.tensor.layout} among others; all_reduce sums it alone"
                )
        keys = [item.key for item in items if item.key is not None]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(
                f"key {twice!r} stands for two tensors: what is learned of one would be said of the other"
            )
        sums = [self._begin(item, plan) for item in items]
        self._decide(sums, plan)
        return sums

    def _begin(self, item: Item, plan: str) -> PlannedSum:
        tensor = item.tensor
        rows = _as_rows(tensor.detach())
        history = None if item.key is None else self._histories.setdefault(item.key, History())
        dense_bytes = 2 * tensor.nbytes
        if self.channel.size == 1 or tensor.numel() == 0:
            return PlannedSum(item, rows, "dense", "one rank" if self.channel.size == 1 else "empty", history)
        if plan == "dense":
            return PlannedSum(item, rows, "dense", "as asked", history)
        if plan == "auto":
            if tensor.nbytes < self._min_bytes:
                return PlannedSum(item, rows, "dense", f"below {self._min_bytes} bytes", history)
            if self.channel.size * rows.shape[0] / 8 > _BITS_SHARE * dense_bytes:
                return PlannedSum(item, rows, "dense", "rows are too short for so many ranks", history)
            if history is not None and not history.asks():
                return PlannedSum(item, rows, "dense", "has been dense for long", history)
        return PlannedSum(item, rows, "", "", history)

    def _decide(self, sums: Sequence[PlannedSum], plan: str) -> None:
        """Ask for the rows of those that have no path yet, in one collective, and choose theirs."""
        asking = [one for one in sums if not one.path]
        if not asking:
            return
        if self._rates is None and plan == "auto":
            self._rates = measure_rates(self.channel.group, asking[0].rows.device)
        own, failed = [], None
        for one in asking:
            try:
                rows = _own_rows(one.item, one.rows)
            except Exception as error:  # the others must hear of it, or they wait for what will never come
                rows, failed = torch.zeros(len(one.rows), dtype=torch.bool, device=one.rows.device), error
            own.append(Own(rows, self._last.pop(one.item.key or "", 0.0), one.item.rows is None))
        past = [(one.item.key, one.history) for one in asking]
        for one, told in zip(asking, ask(own, (plan, self._rates, past), failed, self.channel), strict=True):
            one.known = told.known
            one.load = Load.of(told.known, one.rows.shape[1] * one.rows.element_size())
            if plan != "auto":
                one.path, one.reason = plan, "as asked"
                continue
            assert self._rates is not None
            predicted = _worth(one.load, self._rates.predict(one.load, scanned=told.scanned))
            history = one.history or History()
            history.learn(told.seconds)
            one.path = history.choose(predicted)
            one.predicted = predicted[one.path]
            cheapest = ", ".join(f"{p} {1e3 * s:.2f} ms" for p, s in predicted.items())
            one.reason = (
                f"{one.load.most} rows at most, {one.load.union} in all of {one.load.rows}: {cheapest}"
            )

    def run(self, one: PlannedSum, op: Op) -> RowsWork:
        """Make one decided sum."""
        channel, began, before = self.channel, time.perf_counter(), self.channel.sent
        divisor = channel.size if op == "avg" else 1
        if channel.size > 1 and one.rows.numel():
            if one.path == "dense":
                dense(one.rows, None, channel, divisor)
            else:
                assert one.known is not None
                PATHS[one.path](one.rows, one.known, channel, divisor)
        if one.rows.data_ptr() != one.item.tensor.data_ptr():
            one.item.tensor.detach().copy_(one.rows.view(one.item.tensor.shape))
        seconds = time.perf_counter() - began
        self._note(one, seconds)
        predicted = one.load.bytes_sent(one.path) if one.load is not None else channel.sent - before
        decision = Decision(
            one.path,  # type: ignore[arg-type]
            one.reason,
            channel.sent - before,
            predicted,
            seconds,
            one.predicted,
        )
        return RowsWork(one.item.tensor, decision)

    def _note(self, one: PlannedSum, seconds: float) -> None:
        """Keep what a sum took, to be told to all at the next one of the same name."""
        # A GPU's queue says nothing of its time; there, predictions stand as they were measured.
        if one.item.key is not None and one.rows.device.type == "cpu":
            self._last[one.item.key] = seconds

    def _sparse(self, tensor: Tensor, key: str | None, op: Op) -> RowsWork:
        """torch's COO tensors with one sparse dimension: all ranks' entries, summed in the order of ranks."""
        if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 1:
            kind = f"{tensor.layout}" + (
                f" with {tensor.sparse_dim()} sparse dimensions" if tensor.layout is torch.sparse_coo else ""
            )
            raise LayoutError(f"{key or 'tensor'}: {kind}; strided, or sparse_coo with rows as entries")
        began, before = time.perf_counter(), self.channel.sent
        mine = tensor.coalesce()
        result = self._gather_entries(mine, self.channel.size if op == "avg" else 1)
        seconds, sent = time.perf_counter() - began, self.channel.sent - before
        return RowsWork(result, Decision("gather", "sparse_coo", sent, sent, seconds, 0.0))

    def _gather_entries(self, mine: Tensor, divisor: int) -> Tensor:
        if self.channel.size == 1:
            return mine
        ids, values = mine.indices()[0], mine.values()
        counts = self.channel.all_gather(torch.tensor([len(ids)], device=ids.device)).flatten().tolist()
        most = max(counts)
        if most == 0:
            return mine
        sent_ids, sent = ids.new_zeros(most), values.new_zeros(most, *values.shape[1:])
        sent_ids[: len(ids)], sent[: len(ids)] = ids, values
        if divisor != 1:
            sent.div_(divisor)
        all_ids = self.channel.all_gather(sent_ids).clone()  # memory of the next gather, if values are int64
        all_values = self.channel.all_gather(sent)
        kept = [(all_ids[r, :n], all_values[r, :n]) for r, n in enumerate(counts)]
        ids = torch.cat([i for i, _ in kept])
        union, place = torch.unique(ids, return_inverse=True)
        sums = values.new_zeros(len(union), *values.shape[1:])
        begin = 0
        for entries, part in kept:
            sums.index_add_(0, place[begin : begin + len(entries)], part)
            begin += len(entries)
        return torch.sparse_coo_tensor(
            union[None], sums, mine.shape, is_coalesced=True, check_invariants=False
        )


_defaults: dict[dist.ProcessGroup, RowReducer] = {}


def all_reduce_rows(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    rows: Tensor | None = None,
    plan: Plan = "auto",
    op: Op = "sum",
    key: str | None = None,
) -> RowsWork:
    """Sum `tensor` over a group in place, by the cheapest way that all ranks agree on.

    tensor: strided, any shape and dtype that the backend sums; or sparse_coo with one sparse dimension, whose sum is
        ``work.result``, a new tensor.
    rows: int64 ids of the only rows that may be set, in any order; spares the search. Other rows must be zero.
    plan: "auto", or the path to take. op: "sum", or "avg", which divides before it sums.
    key: the tensor's name; sums of one name learn from each other, and those that stay dense soon cost nothing more.

    Every rank calls it with the same shape, dtype, plan, op and key. Raises LayoutError, a TypeError, for others.
    """
    whole = group if group is not None else dist.group.WORLD
    if whole is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    reducer = _defaults.get(whole)
    if reducer is None:
        for gone in [held for held in _defaults if not _is_alive(held)]:
            del _defaults[
                gone
            ]  # a group that was destroyed keeps its threads and sockets as long as it is held
        reducer = _defaults[whole] = RowReducer(whole)
    return reducer.all_reduce(tensor, key, rows=rows, plan=plan, op=op)


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _as_rows(tensor: Tensor) -> Tensor:
    """[N, C] of the same memory, or of a contiguous copy."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor.reshape(1, -1)
    return tensor.contiguous().view(tensor.shape[0], -1)


def _own_rows(item: Item, rows: Tensor) -> Tensor:
    """bool [N]: the rows this rank has set."""
    if item.rows is None:
        return live_rows(rows)
    live = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
    live[_checked(item.rows, rows)] = True
    return live


def _worth(load: Load, predicted: dict[str, float]) -> dict[str, float]:
    """Dense, and what sends fewer bytes than it: the others have nothing to win, whatever was measured."""
    dense_bytes = load.bytes_sent("dense")
    return {p: s for p, s in predicted.items() if p == "dense" or load.bytes_sent(p) < dense_bytes}


def _check_words(plan: str, op: str) -> None:
    if plan not in get_args(Plan):
        raise ValueError(f"plan={plan!r}: choose one of {', '.join(get_args(Plan))}")
    if op not in get_args(Op):
        raise ValueError(f"op={op!r}: choose sum or avg")


def _checked(ids: Tensor, rows: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"rows: {ids.dtype}; int64 ids are wanted")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(rows):
        raise IndexError(f"rows: ids {int(ids.min())} to {int(ids.max())} of a tensor of {len(rows)} rows")
    return ids.flatten().to(rows.device, torch.int64)
