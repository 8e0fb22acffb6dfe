"""The loss of somebody's causal language model without its logits, for :class:`lf_graph.TrainStep`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph._errors import GraphError
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._transformers import is_ours
from lf_graph.kernels.linear_cross_entropy import linear_cross_entropy

_IGNORED = -100


@dataclass(frozen=True, eq=False)
class CausalLMLoss:
    """Cross entropy of the next token, from the hidden states of ``decoder`` and the weight of ``head``.

    Made by :func:`loss_of`. Tokens in padding, or without a loss, have the label -100.
    """

    decoder: nn.Module
    head: nn.Linear
    reduction: Literal["mean", "sum"]
    implementation: Implementation

    def __call__(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Any = None, **inputs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of a batch.

        Args:
            input_ids: int64 [batch, tokens].
            labels: int64 [batch, tokens], of the same tokens: they are shifted here, as transformers does.
            attention_mask: for the decoder, as are further inputs.

        Returns:
            The mean over labels (0 without any), or (sum, number of labels): float32 [] and int64 [].
        """
        if attention_mask is None and not inputs and is_ours(self.decoder):
            attention_mask = torch.ones_like(
                input_ids
            )  # else nothing tells a compiled batch from a packed one
        states = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **inputs)
        # The last token gets no label, which costs a row of the product and spares a copy of all states.
        targets = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        loss, count = linear_cross_entropy(
            states[0],
            self.head.weight,
            targets,
            bias=self.head.bias,
            reduction=self.reduction,
            implementation=self.implementation,
        )
        return loss if self.reduction == "mean" else (loss, count)


def loss_of(
    model: Any, *, reduction: Literal["mean", "sum"] = "mean", implementation: Implementation = "auto"
) -> CausalLMLoss:
    """The loss of a causal language model of transformers through :func:`linear_cross_entropy`.

    Both are run here on four random tokens, so a model that does more (soft caps or scales of logits, a loss of the
    router) is refused, not changed. Its own ``labels=`` stays as it is.

    Args:
        model: with ``get_decoder()`` and ``get_output_embeddings()``, on a device; not wrapped, as in
            DistributedDataParallel (TrainStep takes the wrapped model beside this loss).
        reduction: "mean", or "sum" to weight micro-batches by their tokens.
        implementation: of the operator.

    Raises:
        GraphError: the model has no such parts, holds no numbers yet, or has another loss.
        ValueError: an unknown reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss_of: reduction={reduction!r}: mean or sum")
    name = type(model).__name__
    parts = [getattr(model, part, None) for part in ("get_decoder", "get_output_embeddings")]
    decoder, head = (part() if callable(part) else None for part in parts)
    if decoder is None or decoder is model or not isinstance(head, nn.Linear):
        raise GraphError(
            f"loss_of: {name} does not tell its decoder and its head (get_decoder, get_output_embeddings, a Linear): "
            "give the causal language model of transformers itself"
        )
    if head.weight.is_meta:
        raise GraphError(f"loss_of: {name} is on the meta device: load its weights first")
    mean = CausalLMLoss(decoder, head, "mean", implementation)
    _require_same(model, mean)
    return CausalLMLoss(decoder, head, reduction, implementation)


@torch.no_grad()
def _require_same(model: nn.Module, loss: CausalLMLoss) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(0, len(loss.head.weight), (1, 4), generator=generator, device="cpu")
    ids = ids.to(loss.head.weight.device)
    with _evaluating(model):
        expected, found = model(input_ids=ids, labels=ids, use_cache=False).loss, loss(ids, ids)
    tolerance = max(1e-4, 4 * torch.finfo(loss.head.weight.dtype).eps)
    if not torch.allclose(torch.as_tensor(found).float(), expected.float(), rtol=tolerance, atol=tolerance):
        raise GraphError(
            f"loss_of: {type(model).__name__} has a loss of {float(expected):.6g} on four tokens, cross entropy of its "
            f"head {float(torch.as_tensor(found)):.6g}: it does more with its logits or its loss; train it with its own"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards every module in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
