"""Optional heads of ``gr00t_n16_vla``: prediction of the next states, and of actions as bins.

Neither is part of the published model. Both are left out (no parameters) unless their loss has a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_meta.models.gr00t_vla_config import VLAConfig


class StatePredictor(nn.Module):
    """States after each of the next actions, as changes from the current state.

    Reads the mean of the context, which says what is seen and asked, and the action tokens of the transformer, which
    say what is done; both through one linear layer each.
    """

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.from_context = nn.Linear(c.text_hidden, c.extra_hidden)
        self.from_action = nn.Linear(c.dit_output, c.extra_hidden)
        self.norm = nn.LayerNorm(c.extra_hidden)
        self.change = nn.Linear(c.extra_hidden, c.state_dim)

    def forward(self, context: Tensor, is_real: Tensor, actions: Tensor, state: Tensor) -> Tensor:
        """Predicted states [B, T, state_dim].

        Args:
            context: [B, S, text_hidden]; is_real: bool [B, S], False on padding.
            actions: action tokens [B, T, dit_output].
            state: the current state [B, 1, state_dim].
        """
        real = is_real[..., None].to(context.dtype)
        mean = (context * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        hidden = self.norm(self.from_context(mean) + self.from_action(actions))
        out: Tensor = state + self.change(F.gelu(hidden))
        return out


class WorldModel(nn.Module):
    """What the model believes about the world's reaction; holds ``state_predictor``."""

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.state_predictor = StatePredictor(c)


class BinnedActions(nn.Module):
    """Actions in -1..1 as one of ``action_bins`` equal bins each, predicted at once from context and state.

    It never sees a noisy action, so it is a policy of its own: one attention of a learned query per step to the
    context, and a linear layer to the bins.
    """

    def __init__(self, c: VLAConfig) -> None:
        super().__init__()
        self.bins, self.actions = c.action_bins, c.action_dim
        self.queries = nn.Parameter(torch.randn(c.horizon, c.extra_hidden) * c.extra_hidden**-0.5)
        self.from_state = nn.Linear(c.dit_hidden, c.extra_hidden)
        self.key_value = nn.Linear(c.text_hidden, 2 * c.extra_hidden)
        self.norm = nn.LayerNorm(c.extra_hidden)
        self.logits = nn.Linear(c.extra_hidden, c.action_dim * c.action_bins)

    def forward(self, context: Tensor, mask: Tensor, state_token: Tensor) -> Tensor:
        """Logits [B, horizon, action_dim, bins].

        Args:
            context: [B, S, text_hidden]; mask: bool [B, 1, 1, S], with a True in every row.
            state_token: [B, 1, dit_hidden].
        """
        query = self.queries + self.from_state(state_token)
        key, value = self.key_value(context)[:, None].chunk(2, dim=-1)
        seen = F.scaled_dot_product_attention(query[:, None].to(key.dtype), key, value, attn_mask=mask)[:, 0]
        logits: Tensor = self.logits(F.gelu(self.norm(query + seen)))
        return logits.view(*logits.shape[:-1], self.actions, self.bins)

    def bin_of(self, actions: Tensor) -> Tensor:
        """int64 bins of actions of any shape; what lies outside -1..1 goes to the outer bins."""
        return ((actions + 1) * (self.bins / 2)).floor().long().clamp(0, self.bins - 1)

    def centre_of(self, bins: Tensor) -> Tensor:
        """Actions in the middle of the given bins, float32."""
        return (bins.float() + 0.5) * (2 / self.bins) - 1
