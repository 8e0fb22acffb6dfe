"""What was not sent yet, by the name of its parameter: kept in the width of float32 or more, saved and loaded.

A residual is in units of the averaged gradient, so the sum over ranks is what the weights have still to get, however
many ranks there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lf_comm._blocks import at_least_float32
from lf_comm._errors import CommError

VERSION = 1


class ResidualError(CommError, ValueError):
    """A state that does not fit the module or is not whole. parameter: whose residual, None when it is none's."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        self.parameter = parameter
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ResidualError], tuple[object, ...]]:
        return ResidualError, (str(self), self.parameter)


class Residuals:
    """Of one rank: flat tensors in the order in which the gradient lies in memory."""

    def __init__(self, module: nn.Module, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._like = {name: _layout(p) for name, p in module.named_parameters()}
        self.held: dict[str, Tensor] = {}

    def is_shard(self, name: str) -> bool:
        """Whether the module's parameter of this name is one that FSDP2 has sharded."""
        return name in self._like and self._like[name] is None

    def of(self, name: str, gradient: Tensor) -> Tensor | None:
        """That of a flat gradient, on its device; None when nothing is left of it.

        Raises ResidualError when a loaded one has another length.
        """
        residual = self.held.get(name)
        if residual is None:
            return None
        if residual.numel() != gradient.numel():
            raise ResidualError(
                f"{name}: a residual of {residual.numel()} elements was loaded for a gradient of {gradient.numel()}; "
                "load it with the sharding it was saved with",
                name,
            )
        wanted = at_least_float32(gradient)
        if residual.device != gradient.device or residual.dtype != wanted:
            residual = self.held[name] = residual.to(gradient.device, wanted)
        return residual

    def state_dict(self) -> dict[str, Any]:
        """{"version", "rank", "ranks", "residuals": name -> tensor in the shape of the parameter}; copies.

        Of a complex parameter the shape is that of ``view_as_real``, of an FSDP2 one [numel of this rank's shard].
        """
        residuals = {name: self._shaped(name, flat).clone() for name, flat in self.held.items()}
        return {"version": VERSION, "rank": self._rank, "ranks": self._ranks, "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`lf_comm.SparseGradientReducer.load_state_dict`."""
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            self._check(one)
        self.held = {}
        for one in self._mine(states):
            for name, shaped in one["residuals"].items():
                flat = self._flat(name, shaped)
                self.held[name] = self.held[name] + flat if name in self.held else flat

    def _mine(self, states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those whose sum this rank goes on with, in the order of ranks."""
        by_rank = {int(one["rank"]): one for one in states}
        ranks = {int(one["ranks"]) for one in states}
        if ranks == {self._ranks} and self._rank in by_rank:
            return [by_rank[self._rank]]
        if len(ranks) == 1 and sorted(by_rank) == list(range(*ranks)):
            return [by_rank[rank] for rank in sorted(by_rank) if rank % self._ranks == self._rank]
        if len(states) > 1:
            raise ResidualError(
                f"states of the ranks {sorted(by_rank)} of {sorted(ranks)}; those of all ranks of one run are wanted"
            )
        warnings.warn(
            f"residuals of rank {states[0]['rank']} of {states[0]['ranks']} cannot be those of rank {self._rank} of "
            f"{self._ranks}; they begin at zero. load_state_dict([state of every rank]) would keep their sum",
            stacklevel=4,
        )
        return []

    def _check(self, state: Mapping[str, Any]) -> None:
        if not {"version", "rank", "ranks", "residuals"} <= set(state) or state["version"] != VERSION:
            raise ResidualError(f"no state of SparseGradientReducer of version {VERSION}")
        for name, residual in state["residuals"].items():
            if name not in self._like:
                raise ResidualError(f"{name}: the module has no parameter of this name", name)
            like = self._like[name]
            if like is not None and residual.shape != like.shape:
                raise ResidualError(
                    f"{name}: a residual of shape {tuple(residual.shape)}, wanted {tuple(like.shape)}", name
                )
            if not bool(torch.isfinite(residual).all()):
                raise ResidualError(f"{name}: the residual has NaN or infinity", name)

    def _shaped(self, name: str, flat: Tensor) -> Tensor:
        like = self._like[name]
        return flat if like is None else flat.as_strided(like.shape, like.stride()).contiguous()

    def _flat(self, name: str, shaped: Tensor) -> Tensor:
        flat, like = torch.empty(shaped.numel(), dtype=shaped.dtype, device=shaped.device), self._like[name]
        (flat if like is None else flat.as_strided(like.shape, like.stride())).copy_(shaped)
        return flat


def _layout(parameter: Tensor) -> Tensor | None:
    """Shape and strides of its gradient in a bucket, on no device; None for a shard, which is flat."""
    from torch.distributed.tensor import DTensor  # half of the time of importing torch, for those who need it

    if isinstance(parameter, DTensor):
        return None
    plain = parameter.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return torch.empty_like(real, device="meta")
