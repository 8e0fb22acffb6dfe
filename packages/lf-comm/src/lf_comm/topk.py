"""A lossy sum: the blocks of a gradient that hold most energy, the same on every rank, and the rest in a later step.

    reducer = lf_comm.SparseGradientReducer.attach(ddp, sparsity_threshold=0.0)
    ...train as before; save reducer.state_dict() with the optimizer...

Each rank adds to its gradient what it has not sent yet. The energies (sums of squares) of aligned blocks of 256
elements are summed over ranks, 1/256 of the gradient; every rank then picks the same blocks, and those are summed
densely. No indices travel, and nothing fills in as ranks grow: with compression_ratio=4 a float32 gradient sends 0.254
of its bytes at any number of ranks, and a 16-bit one 0.258. What was left out is kept in float32 (error feedback).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm._blocks import BLOCK, Choice, Cut, at_least_float32, choose, energies
from lf_comm._channel import Channel
from lf_comm._residuals import Residuals
from lf_comm._shards import ShardError, ShardView, shards_of
from lf_comm._worker import Behind, own_group, register
from lf_comm.rows import LayoutError


@dataclass(frozen=True)
class BlockDecision:
    """How one gradient was summed last. path: "blocks", or "dense" (all of it); elements: sent, of `of` elements;
    concentration: the share of its energy in the blocks that could be sent, NaN when it was not looked at."""

    path: Literal["blocks", "dense"]
    reason: str
    elements: int
    of: int
    concentration: float


_UNKNOWN = Choice(None, float("nan"))


@dataclass
class _Piece:
    """One gradient in a bucket. flat: its memory there; sum: what this rank gives, `flat` or its residual."""

    name: str
    flat: Tensor
    cut: Cut
    sum: Tensor
    finite: bool = True
    choice: Choice = _UNKNOWN

    @property
    def ids(self) -> Tensor | None:
        return self.choice.ids

    @property
    def tail(self) -> int:
        """Where the elements begin that belong to no whole block."""
        return self.cut.blocks * BLOCK

    @property
    def elements(self) -> int:
        """That are sent."""
        if self.ids is None:
            return self.flat.numel()
        return len(self.ids) * BLOCK + self.flat.numel() - self.tail


class SparseGradientReducer:
    """Averages gradients by their strongest blocks; for DDP, and for FSDP2 across replicas."""

    def __init__(
        self,
        module: nn.Module,
        sparsity_threshold: float = 0.85,
        compression_ratio: float = 4,
        error_feedback: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """module: whose ``named_parameters`` name gradients and residuals.
        sparsity_threshold: 0 .. 1. The blocks that may be sent hold some share of a gradient's energy, summed over
            ranks; below this share all of that gradient is sent in this step, as DDP would. 0 never sends all: the
            bytes are certain. The default seldom leaves anything out but of gradients that are nearly sparse.
        compression_ratio: above 1; one in so many blocks may be sent. Gradients of fewer blocks are always sent whole.
        error_feedback: keep what is left out, and add it to the next gradient. Without it, it is lost.
        group: of the collectives; None: all ranks.

        Raises ValueError for a threshold or ratio out of range.
        """
        if not 0 <= sparsity_threshold <= 1:
            raise ValueError(f"sparsity_threshold={sparsity_threshold}: a share of energy, 0 to 1, is wanted")
        if not 1 < compression_ratio < float("inf"):
            raise ValueError(f"compression_ratio={compression_ratio}: more than 1 is wanted")
        self._threshold, self._ratio, self._feedback = sparsity_threshold, compression_ratio, error_feedback
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._channel = Channel(group)
        self._residuals = Residuals(module, self._channel.rank, self._channel.size)
        self._decisions: dict[str, BlockDecision] = {}
        self._behind = Behind()

    @classmethod
    def attach(
        cls,
        ddp: DistributedDataParallel,
        sparsity_threshold: float = 0.85,
        compression_ratio: float = 4,
        error_feedback: bool = True,
    ) -> SparseGradientReducer:
        """Make one for `ddp` and register its hook; all ranks. Sums get a group of their own, on DDP's backend.

        Raises RuntimeError when `ddp` has a hook already.
        """
        group = own_group(ddp)
        reducer = cls(ddp.module, sparsity_threshold, compression_ratio, error_feedback, group=group)
        register(ddp, reducer, cls.hook)
        return reducer

    @staticmethod
    def hook(state: SparseGradientReducer, bucket):  # type: ignore[no-untyped-def]  # DDP wants none but its own
        """For ``register_comm_hook(reducer, reducer.hook)``; :meth:`attach` does it, with a group of its own."""
        return state.reduce(bucket)

    def apply(self, fsdp: nn.Module) -> None:
        """Average the gradients of FSDP2 shards over this reducer's group: the replicas of each shard; all ranks.

        fsdp: the module of the constructor, given to ``fully_shard`` before that, over the ranks of one replica only (a
        mesh of one dimension); every rank of `group` holds the same shard of another replica. FSDP2's own all-reduce
        of a mesh of two dimensions cannot be replaced. Replicas must begin with the same weights.

        Raises ShardError for other modules, meshes and groups.
        """
        parts = shards_of(fsdp, self._channel.group)
        names = [view.name for _, views in parts for view in views]
        if strange := [name for name in names if not self._residuals.is_shard(name)]:
            raise ShardError(
                f"{strange[0]}: no shard of the module that this reducer was made of; make it of the module "
                "given here, after fully_shard"
            )
        for part, views in parts:
            part.set_all_reduce_hook(partial(self._average_shards, views))

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent, by the formula of a ring, energies included."""
        return self._channel.sent

    @property
    def summing(self) -> int | None:
        """The bucket that is being summed, or whose sum failed last; None when all are done."""
        return self._behind.summing

    def report(self) -> dict[str, BlockDecision]:
        """How the last gradient of each parameter was summed, by name."""
        return dict(self._decisions)

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet; call it between steps, on every rank, and keep all of them."""
        return self._residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with what :meth:`state_dict` gave: this rank's, or a list of every rank's, in any order.

        With as many ranks as before each takes its own, whatever the buckets are. With fewer or more, from a list,
        rank r takes the sum of the old ranks r, r + P, r + 2 P, ...: the sum over ranks stays. From one state of
        another number of ranks, or of another rank, residuals begin at zero, and a UserWarning says so.

        Raises ResidualError, a ValueError, for names and shapes that the module lacks and for lists with ranks missing.
        """
        self._residuals.load_state_dict(state)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket. On the CPU in a thread behind the backward pass, else in the current stream."""
        return self._behind.run(self.work(bucket), bucket.buffer().device, bucket.index())

    def work(self, bucket: Any) -> partial[Tensor]:
        """What averages a bucket when it is called."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        names = [self._names.get(id(parameter), "") for parameter in parameters]
        counts = [p.numel() * (2 if p.is_complex() and not buffer.is_complex() else 1) for p in parameters]
        return partial(self._average, buffer, names, counts)

    def _average_shards(self, views: Sequence[ShardView], flat: Tensor) -> None:
        self._average(flat, [view.name for view in views], [view.elements for view in views])

    def _average(self, buffer: Tensor, names: Sequence[str], counts: Sequence[int]) -> Tensor:
        """Average a flat tensor in place, made of gradients of `counts` elements."""
        if buffer.layout is not torch.strided:
            raise LayoutError(
                f"{names[0] or 'gradient'}: {buffer.layout}; SparseGradReducer sums sparse gradients"
            )
        if sum(counts) != buffer.numel():
            raise LayoutError(
                f"{names[0] or 'gradient'}: a bucket of {buffer.numel()} elements for gradients of {sum(counts)}; "
                "every parameter of it must have a gradient"
            )
        cuts = [
            Cut.of(count, self._ratio) if name else Cut(0, 0)
            for name, count in zip(names, counts, strict=True)
        ]
        flats = buffer.split(list(counts))
        pieces = [_Piece(*one, one[1]) for one in zip(names, flats, cuts, strict=True)]
        if self._channel.size == 1:
            self._flush(pieces)
        else:
            self._choose([piece for piece in pieces if not piece.cut.whole])
            self._send(buffer, pieces)
        self._decisions.update({piece.name: _decision(piece) for piece in pieces if piece.name})
        return buffer

    def _flush(self, pieces: Iterable[_Piece]) -> None:
        """One rank sends nothing and leaves nothing out."""
        for piece in pieces:
            if (residual := self._residuals.of(piece.name, piece.flat)) is not None:
                piece.flat.add_(residual)
                del self._residuals.held[piece.name]

    def _choose(self, pieces: Sequence[_Piece]) -> None:
        """Let all ranks pick the same blocks of gradients that have some."""
        if not pieces:
            return
        for piece, size in zip(pieces, _magnitudes(pieces), strict=True):
            self._add_up(piece, size)
        own = [
            energies(p.sum, p.cut.blocks)
            if p.finite
            else p.sum.new_full((p.cut.blocks,), float("inf")).float()
            for p in pieces
        ]
        all_energies = torch.cat(own)
        self._channel.all_reduce(all_energies)
        split = all_energies.split([piece.cut.blocks for piece in pieces])
        found = choose(split, [piece.cut.kept for piece in pieces], self._threshold)
        for piece, choice in zip(pieces, found, strict=True):
            piece.choice = choice
            if not choice.finite and piece.sum is not piece.flat:
                # The step is lost, as with DDP; the residual is not: it stays behind for the next.
                piece.sum.sub_(piece.flat, alpha=1 / self._channel.size).nan_to_num_(0.0, 0.0, 0.0)
                piece.sum = piece.flat.div_(self._channel.size)

    def _add_up(self, piece: _Piece, size: float) -> None:
        """Make `sum` the gradient and what is left from before, unless the gradient is zero or not finite.

        A rank that has joined (DDP's `join`) is called with zeros, and must not send its residual again and again.
        """
        piece.finite = size < float("inf")
        residual = None
        if piece.finite and size > 0 and self._feedback:
            residual = self._residuals.of(piece.name, piece.flat)
            if residual is None and _narrow(piece.flat):
                residual = torch.zeros(piece.flat.shape, dtype=torch.float32, device=piece.flat.device)
                self._residuals.held[piece.name] = residual
        if residual is None:
            piece.flat.div_(self._channel.size)
        else:
            piece.sum = residual.add_(piece.flat, alpha=1 / self._channel.size)

    def _send(self, buffer: Tensor, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            if piece.cut.whole:
                piece.flat.div_(self._channel.size)
        if all(piece.ids is None for piece in pieces):
            for piece in pieces:
                if piece.sum is not piece.flat:
                    piece.flat.copy_(piece.sum)
                    self._keep(piece, piece.flat)
            self._channel.all_reduce(buffer)
            return
        packed = self._channel.room("packed", (sum(piece.elements for piece in pieces),), buffer)
        spans = packed.split([piece.elements for piece in pieces])
        for piece, span in zip(pieces, spans, strict=True):
            _pack(piece, span)
            self._keep(piece, span)
        if packed.numel():
            self._channel.all_reduce(packed)
        for piece, span in zip(pieces, spans, strict=True):
            _unpack(piece, span)

    def _keep(self, piece: _Piece, sent: Tensor) -> None:
        """Leave in the residual what `sent`, the packed elements in the gradient's dtype, does not have."""
        if not self._feedback or piece.cut.whole:
            return
        fresh = piece.sum is piece.flat
        if fresh and (piece.ids is None or piece.name in self._residuals.held):
            return  # nothing is left, or a gradient of zeros or NaN that left the residual alone
        if piece.ids is None and not _narrow(piece.flat):
            del self._residuals.held[piece.name]
            return
        wide = at_least_float32(piece.flat)
        left = piece.flat.to(wide, copy=True) if fresh else piece.sum
        if not _narrow(piece.flat):
            _fill(left, piece)
        elif piece.ids is None:
            left.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)
        else:
            rows, at = left[: piece.tail].view(-1, BLOCK), len(piece.ids) * BLOCK
            rows[piece.ids] = rows[piece.ids].sub_(sent[:at].view(-1, BLOCK)).nan_to_num_(0.0, 0.0, 0.0)
            left[piece.tail :].sub_(sent[at:]).nan_to_num_(0.0, 0.0, 0.0)
        self._residuals.held[piece.name] = left


def _narrow(flat: Tensor) -> bool:
    """Whether what is sent loses bits of a float32 residual."""
    return flat.dtype.itemsize < 4


def _magnitudes(pieces: Sequence[_Piece]) -> list[float]:
    """Of each gradient on this rank: 0 if and only if it is all zero; infinity or NaN if any is, or it overflows."""
    sizes = torch.stack(
        [torch.linalg.vector_norm(p.flat, dtype=at_least_float32(p.flat)).float() for p in pieces]
    )
    found: list[float] = sizes.tolist()
    # The square of a small number may be zero.
    return [size or float(bool(piece.flat.any())) for size, piece in zip(found, pieces, strict=True)]


def _pack(piece: _Piece, span: Tensor) -> None:
    if piece.ids is None:
        span.copy_(piece.sum)
        return
    at, rows = len(piece.ids) * BLOCK, piece.sum[: piece.tail].view(-1, BLOCK)
    span[:at].view(-1, BLOCK).copy_(rows.index_select(0, piece.ids))
    span[at:].copy_(piece.sum[piece.tail :])


def _unpack(piece: _Piece, span: Tensor) -> None:
    if piece.ids is None:
        piece.flat.copy_(span)
        return
    at = len(piece.ids) * BLOCK
    piece.flat[: piece.tail].zero_().view(-1, BLOCK).index_copy_(0, piece.ids, span[:at].view(-1, BLOCK))
    piece.flat[piece.tail :].copy_(span[at:])


def _fill(left: Tensor, piece: _Piece) -> None:
    """Zero what was sent."""
    assert piece.ids is not None
    left[: piece.tail].view(-1, BLOCK).index_fill_(0, piece.ids, 0)
    left[piece.tail :].zero_()


def _decision(piece: _Piece) -> BlockDecision:
    share = piece.choice.concentration
    count = piece.flat.numel()
    if piece.ids is not None:
        return BlockDecision(
            "blocks", f"{len(piece.ids)} of {piece.cut.blocks} blocks", piece.elements, count, share
        )
    if piece.cut.whole:
        reason = "too small to choose from"
    elif share == share:
        reason = f"{share:.3f} of the energy in {piece.cut.kept} of {piece.cut.blocks} blocks"
    else:
        reason = "not finite, or one rank"
    return BlockDecision("dense", reason, count, count, share)
