"""``gr00t_n16_moe``: the language model of gr00t_lm.py with a mixture of experts in every block.

32 experts, 2 for each token, SwiGLU experts (Mixtral's layout, arXiv 2401.04088). Sizes, with vocabulary 50257:

| size | layers x hidden, heads | experts x ffn | parameters | active for a token |
|---|---|---|---|---|
| base | 12 x 2048, 32 | 32 x 1024 | 2.824 B | 0.559 B |
| 13b | 24 x 4096, 32 | 32 x 1152 | 12.90 B | 2.705 B |

While training, ``loss_sum`` also holds count * (balance_weight * balance loss + z_weight * z-loss), each a mean over
real tokens and summed over the layers, so that loss_sum / count is cross entropy + weighted losses. The weights 0.01
and 0.001 are those of Switch Transformer (arXiv 2101.03961, section 2.2) and ST-MoE (arXiv 2202.08906, section 3.3),
which add the losses of each layer alike. In ``eval()`` the loss is the cross entropy alone, so perplexities compare.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from torch import Tensor, nn

from lf_graph import BlockSparse, DynamicMaskBuffer, MoE
from lf_meta.config_load import first_problem
from lf_meta.errors import ConfigError
from lf_meta.models.gr00t_lm import (
    Attention,
    Dimension,
    LMConfig,
    head_loss,
    next_token_labels,
    positions_of,
    read_packed,
    require_one_kind,
    view_of,
)
from lf_meta.models.packed import PackedRow

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MoEConfig(LMConfig):
    """Dimensions of one model; ``ffn`` is the width of one expert."""

    experts: Dimension
    top_k: Dimension = 2
    balance_weight: Weight = 0.01
    z_weight: Weight = 0.001
    attention: Literal["causal", "block_sparse"] = "causal"
    sparse_block: Dimension = 64
    sparse_window: Dimension = 4
    sparse_global: Annotated[int, Field(ge=0, strict=True)] = 1

    @field_validator("top_k")
    @classmethod
    def _some_experts(cls, top_k: int, info: ValidationInfo) -> int:
        if top_k > info.data.get("experts", top_k):
            raise ValueError(f"top_k {top_k} is more than the {info.data['experts']} experts")
        return top_k


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "ffn": 96, "experts": 8},
    "small": {"hidden": 512, "layers": 8, "heads": 8, "ffn": 256, "experts": 32},
    "base": {"hidden": 2048, "layers": 12, "heads": 32, "ffn": 1024, "experts": 32},
    "13b": {"hidden": 4096, "layers": 24, "heads": 32, "ffn": 1152, "experts": 32},
}


class MoEBlock(nn.Module):
    """One pre-norm transformer block with experts."""

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.ffn = MoE(
            c.hidden, c.ffn, c.experts, c.top_k, balance_weight=c.balance_weight, z_weight=c.z_weight
        )
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keep: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden], keep bool [B, T]; returns (x, weighted auxiliary losses []).

        ``mask`` and ``cu_seqlens`` are those of :class:`~lf_meta.models.gr00t_lm.Attention`.
        """
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask, cu_seqlens))
        routed = self.ffn(self.ffn_norm(x), keep)
        return x + self.dropout(routed.y), routed.aux


class GR00TMoE(nn.Module):
    """The language model; same contract as :class:`~lf_meta.models.gr00t_lm.GR00TLM`."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._masks: list[DynamicMaskBuffer] = []
        self._init_weights()

    def _init_weights(self) -> None:
        # residual outputs are scaled down so that the variance of the sum does not grow with depth
        residual_std = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                ends_residual = name.endswith(("attention.out.weight", "experts.down"))
                nn.init.normal_(weight, std=residual_std if ends_residual else self.config.init_std)

    @property
    def active_parameters(self) -> int:
        """Parameters one token meets: everything but the experts it is not sent to."""
        experts = sum(p.numel() for name, p in self.named_parameters() if ".experts." in name)
        idle = experts * (self.config.experts - self.config.top_k) // self.config.experts
        return sum(p.numel() for p in self.parameters()) - idle

    def hidden(
        self, tokens: Tensor, lengths: Tensor | None = None, row: PackedRow | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normed states [B, T, hidden] and the sum over the layers of their auxiliary losses, float32 [].

        Positions from ``lengths`` on go through no expert; None means that all are real. With ``row`` tokens are one
        packed row, in which tokens that predict nothing go through no expert.
        """
        cos, sin = positions_of(self.config, tokens, row)
        if row is None:
            keep = None if lengths is None else _before(lengths, tokens)
            mask, cu_seqlens = self._attention_mask(tokens, lengths), None
        else:
            self._require_causal()
            keep = row.follows[None]
            mask, cu_seqlens = view_of(self.config, row)
        x, total = self.embed(tokens), torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, aux = block(x, cos, sin, keep, mask, cu_seqlens)
            total = total + aux
        return self.norm(x), total

    def _require_causal(self) -> None:
        if self.config.attention != "causal":
            raise ConfigError(
                "model.args.attention", f"{self.config.attention} does not take packed rows: set it to causal"
            )

    def _attention_mask(self, tokens: Tensor, lengths: Tensor | None) -> Tensor | None:
        if self.config.attention == "causal":
            return None
        b, t = tokens.shape
        if lengths is None:
            lengths = torch.full((b,), t, device=tokens.device)
        return self._mask_buffer(b, t, tokens.device).write(lengths, t)

    def _mask_buffer(self, batch: int, length: int, device: torch.device) -> DynamicMaskBuffer:
        """The first buffer that is large enough. All are kept: captured graphs know their addresses."""
        for buffer in self._masks:
            if buffer.device == device and batch <= buffer.batch and length <= buffer.max_len:
                return buffer
        c = self.config
        pattern = BlockSparse(c.sparse_block, c.sparse_window, c.sparse_global)
        capacity = 1 << (length - 1).bit_length()  # a length that grows step by step makes few buffers
        self._masks.append(DynamicMaskBuffer(capacity, batch=batch, pattern=pattern, device=device))
        return self._masks[-1]

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits [B, T, vocab] for tokens int64 [B, T]."""
        out: Tensor = self.head(self.hidden(tokens)[0])
        return out

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        loss_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss over next-token predictions, of padded rows with ``lengths`` or of a packed one with ``cu_seqlens``.

        Args:
            tokens: int64 [B, T], padded at the end of each row; or packed, [capacity] or [1, capacity].
            lengths: int64 [B], real tokens in each row; 0 for an empty row.
            loss_mask: bool like tokens; False where a token is context and not a target.
            cu_seqlens: int32 [sequences + 1], see :mod:`lf_meta.models.packed`.

        Returns:
            (loss_sum float [], token_count int64 []): cross entropy in nats summed over the predicted
            positions, while training plus count times the auxiliary losses; and the number of positions.

        Raises:
            ValueError: lengths and cu_seqlens, or neither, or packed rows of another shape.
            ConfigError: packed rows under block-sparse attention.
        """
        # the last token of a record predicts nothing: it is no input, in a full row as in a padded one
        require_one_kind(lengths, cu_seqlens)
        if cu_seqlens is not None:
            tokens, row, labels = read_packed(tokens, cu_seqlens, loss_mask)
            x, aux = self.hidden(tokens, row=row)
        else:
            assert lengths is not None
            labels = next_token_labels(tokens, lengths, loss_mask)
            x, aux = self.hidden(tokens[:, :-1], lengths - 1)
        loss, count = head_loss(x, self.head, labels, self.config.fused_loss)
        return (loss + count * aux, count) if self.training else (loss, count)


def _before(lengths: Tensor, tokens: Tensor) -> Tensor:
    """bool [B, T]: positions of tokens [B, T] before each row's length."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def build(size: str, vocab_size: int, **args: int | float | bool | str) -> GR00TMoE:
    """Build a named size, with single dimensions overridden by ``args``.

    Raises:
        ConfigError: unknown size or dimension.
    """
    if size not in SIZES:
        raise ConfigError("model.size", f"no size {size!r}; known: {', '.join(SIZES)}")
    try:
        config = MoEConfig.model_validate({**SIZES[size], **args, "vocab_size": vocab_size})
    except ValidationError as e:
        raise first_problem(e, "model.args.") from None
    return GR00TMoE(config)
