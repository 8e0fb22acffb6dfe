"""A mixture-of-experts layer that stays on the device: exact, deterministic, nothing dropped, no read-back.

Router (softmax in float32), top-k, stable sort by expert, grouped products, sum over each token's experts. All shapes
are functions of the input's shape, forward and backward, so the layer can be captured as part of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph._errors import GraphError
from lf_graph._moe_experts import ExpertBackend, Experts, check_backend_name, choose_backend
from lf_graph._moe_route import Routing, gather_sum, load_balance_loss, route, router_z_loss, spread
from lf_graph.kernels._inputs import no_autocast


class MoEOutput(NamedTuple):
    """What a MoE layer returns.

    Attributes:
        y: like the input, in the dtype of the experts' products.
        aux: float32 [], ``balance_weight`` * balance loss + ``z_weight`` * z-loss, a mean over tokens; add it to a
            mean loss, or times the token count to a summed one. Zero when both weights are.
        counts: int32 [E], assignments of each expert; on the device.
    """

    y: Tensor
    aux: Tensor
    counts: Tensor


class MoE(nn.Module):
    """Top-k mixture of SwiGLU experts.

    Under autocast the experts run in the autocast dtype, each weight cast once; the router stays in float32, because
    its rounding decides which experts run (selective precision, arXiv 2101.03961, section 2.4).

    Args:
        hidden: width of the input and output.
        ffn: width of each expert.
        experts: number of experts.
        top_k: experts for each token.
        normalize: a token's weights sum to one.
        balance_weight: of the load-balancing loss ``experts * sum(share of assignments * mean probability)``, 1 when
            the load is even (Hugging Face's Mixtral multiplies it by ``top_k``); 0 leaves it out.
        z_weight: of the router's z-loss, the mean squared logsumexp of its logits; 0 leaves it out.
        router_fp32: False runs the router's product in the experts' dtype (its softmax is float32 always).
        backend: grouped product, see :func:`choose_backend`; :meth:`expert_backend` says which one runs and why.

    Raises:
        GraphError: sizes that are no whole numbers above 0, top_k over experts, or an unknown backend.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        balance_weight: float = 0.0,
        z_weight: float = 0.0,
        router_fp32: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        sizes = (hidden, ffn, experts, top_k)
        if not all(isinstance(n, int) and n > 0 for n in sizes) or top_k > experts:
            raise GraphError(
                f"hidden {hidden!r}, ffn {ffn!r}, experts {experts!r} and top_k {top_k!r} must be whole numbers "
                "above 0, top_k <= experts"
            )
        check_backend_name(backend)
        self.hidden, self.ffn, self.top_k, self.normalize = hidden, ffn, top_k, normalize
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.router_fp32, self.requested_backend = router_fp32, backend
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, ffn)

    @classmethod
    def from_linears(
        cls,
        router: Tensor,
        gate: Sequence[Tensor],
        up: Sequence[Tensor],
        down: Sequence[Tensor],
        top_k: int,
        **options: Any,
    ) -> Self:
        """The layer of a model that keeps one linear layer for each expert and part, with copies of its weights.

        Args:
            router: [E, hidden].
            gate, up: of each expert, [ffn, hidden] as ``nn.Linear`` stores them.
            down: of each expert, [hidden, ffn].
            top_k, options: as for the class.
        """
        with torch.device("meta"):
            made = cls(down[0].shape[0], down[0].shape[1], len(down), top_k, **options)
        both = [torch.cat((g.detach(), u.detach())).t() for g, u in zip(gate, up, strict=True)]
        made.router.weight = nn.Parameter(router.detach().clone())
        made.experts.gate_up = nn.Parameter(torch.stack(both).contiguous())
        made.experts.down = nn.Parameter(torch.stack([d.detach().t() for d in down]).contiguous())
        return made

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, experts={self.router.out_features}, top_k={self.top_k}, "
            f"normalize={self.normalize}, balance_weight={self.balance_weight}, z_weight={self.z_weight}"
        )

    def expert_backend(self, device: torch.device, dtype: torch.dtype) -> ExpertBackend:
        """Which grouped product runs for products of ``dtype`` on ``device``, and the reason.

        Raises:
            GraphError: the requested one cannot.
        """
        return choose_backend(device, dtype, (self.hidden, self.ffn), self.requested_backend)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> MoEOutput:
        """Route every token and add its experts' outputs.

        Args:
            x: [..., hidden], float.
            keep: bool [...]; tokens where it is False (padding) go to no expert, give zero, and count in no
                statistic or auxiliary loss.

        Returns:
            y like x in the dtype of the products; aux float32 []; counts int32 [E]. All on x's device.

        Raises:
            GraphError: wrong width, a ``keep`` that does not fit, a dtype other than the weights' outside of
                autocast, or a requested backend that cannot run.
        """
        flat, kept = self._flat(x, keep)
        dtype = compute_dtype(self.experts.down, flat)
        with no_autocast(flat.device):
            logits = self._logits(flat if kept is None else _without(flat, kept), dtype)
            routing = self._route(logits, kept)
            counts = routing.counts()
            y = self._experts(flat.to(dtype), routing, kept)
            return MoEOutput(y.view(x.shape), self._aux(logits, routing, counts, kept), counts)

    def _flat(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.shape[-1] != self.hidden:
            raise GraphError(f"input of width {x.shape[-1]} for a MoE of width {self.hidden}")
        if keep is None:
            return x.reshape(-1, self.hidden), None
        if keep.shape != x.shape[:-1] or keep.dtype != torch.bool:
            raise GraphError(
                f"keep is {keep.dtype} {tuple(keep.shape)}; it must be torch.bool {tuple(x.shape[:-1])}"
            )
        return x.reshape(-1, self.hidden), keep.reshape(-1)

    def _logits(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, E] in at least float32."""
        wide = torch.promote_types(dtype, torch.float32)
        product = wide if self.router_fp32 else dtype
        return F.linear(x.to(product), self.router.weight.to(product)).to(wide)

    def _route(self, logits: Tensor, keep: Tensor | None) -> Routing:
        return route(logits, self.top_k, self.normalize, keep)

    def _experts(self, x: Tensor, r: Routing, keep: Tensor | None) -> Tensor:
        backend = self.expert_backend(x.device, x.dtype)
        weight = row_weights(r.weights, r.order, r.inverse, keep)
        if backend.name == "triton":  # rows of tokens that are not kept lie behind the last expert's: zero
            return self.experts.on_tokens(x, weight, r)
        rows = self.experts(spread(x, r.tokens, r.inverse, keep), weight, r.offsets, backend.product)
        return gather_sum(rows, r.tokens, r.inverse, keep)

    def _aux(self, logits: Tensor, r: Routing, counts: Tensor, keep: Tensor | None) -> Tensor:
        aux = torch.zeros((), dtype=logits.dtype, device=logits.device)
        if self.balance_weight:
            aux = aux + self.balance_weight * load_balance_loss(r.probabilities, counts, keep)
        if self.z_weight:
            aux = aux + self.z_weight * router_z_loss(logits, keep)
        return aux


def _without(x: Tensor, keep: Tensor) -> Tensor:
    """Zeros for tokens that are not kept: NaN times a gradient of zero would still be NaN in the router's weight."""
    return torch.where(keep[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def row_weights(weights: Tensor, assignment: Tensor, rows: Tensor, keep: Tensor | None) -> Tensor:
    """The weight of each row [R] for weights [N, top_k], with the ``assignment`` int64 [R] of each row and
    ``rows`` int64 [N, top_k] as in spread."""
    keep = None if keep is None else keep[:, None].expand(weights.shape).reshape(-1)
    return spread(weights.reshape(-1, 1), assignment, rows.reshape(-1, 1), keep).squeeze(1)


def compute_dtype(weight: Tensor, x: Tensor) -> torch.dtype:
    """Dtype of the experts' products: autocast's where it is on, else that of the weights.

    Raises:
        GraphError: x and the weights differ in dtype outside autocast.
    """
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    if x.dtype != weight.dtype:
        raise GraphError(
            f"input {x.dtype} and weights {weight.dtype} differ; use autocast or cast one of them"
        )
    return x.dtype
