"""Text from a trained run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: ``temperature`` 0 takes the most likely one; ``top_k`` 0 keeps all."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One id int64 [1, 1] from logits [1, vocab]."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, sampling: Sampling, context: int) -> list[int]:
    """Continue a prompt.

    Args:
        model: has ``logits(tokens int64 [1, T]) -> [1, T, vocab]``.
        prompt: int64 [T], at least one token.
        context: longest window fed to the model, in tokens (its training length).

    Returns:
        The new ids, without the prompt.
    """
    if not prompt.numel():
        raise ValueError("the prompt is empty: give at least one token")
    generator = torch.Generator(device=prompt.device).manual_seed(sampling.seed)
    model.eval()
    ids = prompt.view(1, -1)
    for _ in range(sampling.tokens):
        logits = model.logits(ids[:, -context:])[:, -1]  # type: ignore[operator]
        ids = torch.cat((ids, sampling.draw(logits, generator)), dim=1)
    out: list[int] = ids[0, prompt.numel() :].tolist()
    return out
