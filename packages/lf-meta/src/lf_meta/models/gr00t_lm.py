"""``gr00t_n16_lm``: a causal language model with the blocks of GR00T N1.6's backbone (Qwen3-like).

RMSNorm before each half, rotary positions, SwiGLU, no biases. Sources: RMSNorm arXiv 1910.07467, rotary
embedding arXiv 2104.09864 (half-split layout), SwiGLU arXiv 2002.05202. The 1.6b size (28 layers x 2048,
32 heads, ffn 5632, vocabulary 50257) has 1.645 B parameters.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from torch import Tensor, nn

from lf_meta.config import Section
from lf_meta.config_load import first_problem
from lf_meta.errors import ConfigError
from lf_meta.models.packed import PackedRow, one_row, packed_attention, packed_mask, packed_row

IGNORE = -100  # label of a position that is not predicted; torch's own default


# Bounds far above any model, so that a damaged or hostile description is refused at once: without them a billion
# layers are built until memory ends, and sizes overflow inside torch.
Dimension = Annotated[int, Field(gt=0, le=2**20, strict=True)]
Layers = Annotated[int, Field(gt=0, le=1024, strict=True)]


class LMConfig(Section):
    """Dimensions of one model; every field but the vocabulary can be overridden by ``model.args``.

    ``fused_loss`` computes head and loss together (``lf_graph.kernels.linear_cross_entropy``), without the logits of
    all tokens: the same loss up to rounding, in less memory. ``packed_attention`` is for packed rows: "varlen"
    computes pairs of the same sequence only (``lf_graph.kernels.varlen_attention``, no dropout), "sdpa" all pairs
    under a mask.
    """

    vocab_size: Dimension
    hidden: Dimension
    layers: Layers
    heads: Dimension
    ffn: Dimension
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    init_std: Annotated[float, Field(gt=0)] = 0.02
    fused_loss: bool = False
    packed_attention: Literal["varlen", "sdpa"] = "varlen"

    @field_validator("heads")
    @classmethod
    def _even_heads(cls, heads: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden", heads * 2)
        if hidden % (2 * heads):
            raise ValueError(f"hidden {hidden} does not give each of {heads} heads an even width")
        return heads


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "layers": 4, "heads": 4, "ffn": 352},
    "small": {"hidden": 512, "layers": 8, "heads": 8, "ffn": 1408},
    "1.6b": {"hidden": 2048, "layers": 28, "heads": 32, "ffn": 5632},
}


def rope_tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin tables, float32 [length, head_dim / 2]."""
    return rope_at(torch.arange(length, device=device), head_dim, base)


def rope_at(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of integer positions [T], float32 [T, head_dim / 2]."""
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = torch.outer(positions.float(), inverse)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [..., T, D]; pairs are (i, i + D/2). Keeps the dtype of x."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, [B, T, hidden] to [B, T, hidden].

    Records are padded at their end only, so the causal mask alone keeps padding out of every real position.
    A mask (bool [B, 1, T, T], True = seen) takes the place of the causal one; with ``cu_seqlens`` x is one packed row.
    """

    def __init__(self, c: LMConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden, bias=False)
        self.out = nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cu_seqlens is None:
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=p
            ).transpose(1, 2)
        else:
            self._require_no_dropout()
            y = packed_attention(q, k, v, cu_seqlens)
        out: Tensor = self.out(y.reshape(b, t, d))
        return out

    def _require_no_dropout(self) -> None:
        if self.training and self.dropout:
            raise ConfigError(
                "model.args.packed_attention",
                f"varlen has no dropout, and model.args.dropout is {self.dropout}: set this to sdpa, or dropout to 0",
            )


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., hidden] to [..., hidden]."""

    def __init__(self, c: LMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, c: LMConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.ffn = SwiGLU(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask, cu_seqlens))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class GR00TLM(nn.Module):
    """The language model; ``forward`` returns the summed loss, so that any split of a batch adds up."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        # residual outputs are scaled down so that the variance of the sum does not grow with depth
        residual_std = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_residual = name.endswith(("attention.out", "ffn.down"))
                nn.init.normal_(module.weight, std=residual_std if ends_residual else self.config.init_std)

    def hidden(self, tokens: Tensor, row: PackedRow | None = None) -> Tensor:
        """Normed states [B, T, hidden] for tokens int64 [B, T], padded or, with ``row``, one packed row."""
        cos, sin = positions_of(self.config, tokens, row)
        mask, cu_seqlens = view_of(self.config, row)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask, cu_seqlens)
        out: Tensor = self.norm(x)
        return out

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits [B, T, vocab] for tokens int64 [B, T]."""
        out: Tensor = self.head(self.hidden(tokens))
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
            positions, and their number.

        Raises:
            ValueError: lengths and cu_seqlens, or neither, or packed rows of another shape.
        """
        require_one_kind(lengths, cu_seqlens)
        if cu_seqlens is not None:
            tokens, row, labels = read_packed(tokens, cu_seqlens, loss_mask)
            return head_loss(self.hidden(tokens, row), self.head, labels, self.config.fused_loss)
        assert lengths is not None
        labels = next_token_labels(tokens, lengths, loss_mask)
        return head_loss(self.hidden(tokens[:, :-1]), self.head, labels, self.config.fused_loss)


def require_one_kind(lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raises ValueError unless exactly one of them is given."""
    if (lengths is None) == (cu_seqlens is None):
        raise ValueError("give lengths for padded rows, or cu_seqlens for packed ones: one of the two")


def read_packed(
    tokens: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None
) -> tuple[Tensor, PackedRow, Tensor]:
    """(tokens [1, capacity], their layout, labels int64 [1, capacity]) of a packed row."""
    tokens = one_row(tokens, "tokens")
    row = packed_row(tokens, cu_seqlens)
    keep = row.follows[None]
    if loss_mask is not None:
        keep = keep & one_row(loss_mask, "loss_mask").bool().roll(-1, 1)
    return tokens, row, torch.where(keep, tokens.roll(-1, 1), IGNORE)  # nothing follows the last token


def positions_of(c: LMConfig, tokens: Tensor, row: PackedRow | None) -> tuple[Tensor, Tensor]:
    """Rotary cos and sin of tokens [B, T], float32 [T, head_dim / 2]; positions restart in every sequence of a row."""
    if row is None:
        return rope_tables(tokens.shape[1], c.hidden // c.heads, c.rope_base, tokens.device)
    return rope_at(row.positions, c.hidden // c.heads, c.rope_base)


def view_of(c: LMConfig, row: PackedRow | None) -> tuple[Tensor | None, Tensor | None]:
    """(mask, cu_seqlens) for :class:`Attention`, at most one of them."""
    if row is None:
        return None, None
    return (packed_mask(row), None) if c.packed_attention == "sdpa" else (None, row.cu_seqlens)


def head_loss(x: Tensor, head: nn.Linear, labels: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """``token_loss`` of the head's logits for x [B, T, hidden]; with ``fused``, hooks of the head do not run."""
    if not fused:
        return token_loss(head(x), labels)
    from lf_graph.kernels import linear_cross_entropy  # here: models without it load no lf_graph

    return linear_cross_entropy(x, head.weight, labels, bias=head.bias, ignore_index=IGNORE)


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed cross entropy in nats, number of labels) for logits [B, T, vocab] and labels int64 [B, T]."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, (labels != IGNORE).sum()


def next_token_labels(tokens: Tensor, lengths: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Labels int64 [B, T-1]: token t+1 at position t, IGNORE past each row's length or outside the mask."""
    position = torch.arange(1, tokens.shape[1], device=tokens.device)
    keep = position < lengths[:, None]
    if loss_mask is not None:
        keep &= loss_mask[:, 1:].bool()
    return torch.where(keep, tokens[:, 1:], IGNORE)


def build(size: str, vocab_size: int, **args: int | float | bool | str) -> GR00TLM:
    """Build a named size, with single dimensions overridden by ``args``.

    Raises:
        ConfigError: unknown size or dimension.
    """
    if size not in SIZES:
        raise ConfigError("model.size", f"no size {size!r}; known: {', '.join(SIZES)}")
    try:
        config = LMConfig.model_validate({**SIZES[size], **args, "vocab_size": vocab_size})
    except ValidationError as e:
        raise first_problem(e, "model.args.") from None
    return GR00TLM(config)
