"""``gr00t_n16_vla``: the vision-language-action model GR00T N1.6, and its flow-matching loss.

Images and an instruction go through a frozen backbone whose top layers are tuned; a diffusion transformer turns noise
into the next actions, attending to what the backbone saw. Source of architecture and loss: Isaac-GR00T
``gr00t/model/gr00t_n1d6/gr00t_n1d6.py``; flow matching arXiv 2210.02747. Size 3b has 2.961 B parameters, 1.620 B of
them trained.

``forward`` is safe inside a captured graph: no shape depends on data, nothing is read back, and every random number
comes from torch's default generator or is given by the caller. It is the composition of three stages that may be
captured or compiled apart: ``encode_frozen`` (no gradient), ``encode_tuned``, ``head_loss``.

A batch is a mapping of tensors, B rows of fixed shapes:

    pixel_values     uint8 [B, cameras, size, size, 3], or floats [B, cameras, 3, size, size] normalised to -1..1
    input_ids        int64 [B, T], with cameras * tokens_per_image placeholders (``image_token``) in a row
    lengths          int64 [B], real ids of each row, which is padded at its end; 0 for an empty row
    state            [B, 1, state_dim], normalised, padded with zeros
    action           [B, horizon, action_dim], normalised to about -1..1, padded with zeros
    action_mask      bool [B, horizon, action_dim], which entries of action are real
    embodiment_id    int64 [B]
    next_state       [B, K, state_dim], K <= horizon: states after the first K actions (only with state_loss)
    next_state_mask  bool, of the same shape

:func:`~lf_meta.models.gr00t_vla_batch.check_batch` says, on the host, what is wrong with a batch; forward does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from lf_meta.config_load import first_problem
from lf_meta.errors import ConfigError
from lf_meta.models.gr00t_vla_backbone import (
    EMBEDDING_STD,
    Connector,
    Language,
    VisionTower,
    as_channels_last,
    place_images,
)
from lf_meta.models.gr00t_vla_config import SIZES, VLAConfig
from lf_meta.models.gr00t_vla_head import ActionEncoder, Context, DiT, EmbodimentMLP, split_context
from lf_meta.models.world_model import BinnedActions, WorldModel

Batch = Mapping[str, Tensor]
SumAndCount = tuple[Tensor, Tensor]


class GR00TVLA(nn.Module):
    """The model; ``forward`` returns (loss_sum, count), so that any split of a batch adds up."""

    batch_kind = "mapping"

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        c = self.config = config
        self.vision, self.connector, self.language = VisionTower(c), Connector(c), Language(c)
        self.context_norm = nn.LayerNorm(c.text_hidden)
        self.state_encoder = EmbodimentMLP(c, c.state_dim, c.dit_hidden)
        self.action_encoder = ActionEncoder(c)
        self.action_decoder = EmbodimentMLP(c, c.dit_output, c.action_dim)
        self.position = nn.Embedding(c.positions, c.dit_hidden)
        self.dit = DiT(c)
        nn.init.normal_(self.position.weight, std=EMBEDDING_STD)
        self.add_optional_heads()
        for module in (*self.frozen_modules(), self.language.norm):
            module.requires_grad_(False)

    def add_optional_heads(self) -> None:
        """(Re)create what the configuration may leave out, with fresh weights."""
        c = self.config
        token = torch.randn(1, 1, c.dit_hidden) * EMBEDDING_STD
        self.mask_token = nn.Parameter(token) if c.state_dropout else None
        self.world_model = WorldModel(c) if c.state_loss else None
        self.binned_actions = BinnedActions(c) if c.binned_loss else None

    def frozen_modules(self) -> tuple[nn.Module, ...]:
        """What ``encode_frozen`` runs; never trained."""
        return self.vision, self.connector, self.language.embed, self.language.frozen

    def cast_frozen(self, dtype: torch.dtype) -> GR00TVLA:
        """Hold what is never trained in ``dtype`` (bfloat16 in the published model); returns self."""
        for module in self.frozen_modules():
            module.to(dtype)
        return self

    def blocks(self) -> Iterator[nn.Module]:
        """Every repeated block, in the order they run: vision, frozen and tuned language, action head."""
        for group in (self.vision.blocks, self.language.frozen, self.language.tuned, self.dit.blocks):
            yield from group

    # stages

    @torch.no_grad()
    def encode_frozen(self, batch: Batch) -> Tensor:
        """Vision tower, connector, embedding and the frozen layers: hidden states [B, T, text_hidden]."""
        images = as_channels_last(batch["pixel_values"])
        seen = self.connector(self.vision(images.flatten(0, 1)))
        seen = seen.view(images.shape[0], -1, seen.shape[-1])
        is_image, _ = self._token_kinds(batch)
        x = place_images(self.language.embed(batch["input_ids"]), is_image, seen)
        return self.language.run(self.language.frozen, x)

    def encode_tuned(self, hidden: Tensor) -> Tensor:
        """The tuned layers on what ``encode_frozen`` gave: context [B, T, text_hidden]."""
        hidden = hidden.to(self.context_norm.weight.dtype)
        out: Tensor = self.context_norm(self.language.norm(self.language.run(self.language.tuned, hidden)))
        return out

    def head_loss(
        self, context: Tensor, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None
    ) -> SumAndCount:
        """Loss of all heads on a context of ``encode_tuned``; arguments and result as ``forward``."""
        parts = self.losses(context, batch, noise, time)
        total, count = parts["action"]
        if "state" in parts:
            total = total + self.config.state_loss * parts["state"][0]
        if "binned" in parts:
            total = total + self.config.binned_loss * parts["binned"][0]
        return total, count

    def forward(
        self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Flow-matching loss, plus the weighted losses of the optional heads.

        Args:
            batch: as the module's docstring says.
            noise: [B, horizon, action_dim]; drawn from a normal distribution if None.
            time: [B] in 0..1, 1 being the clean action; if None drawn as the published model does:
                time_scale * (1 - Beta(time_alpha, 1)).

        Returns:
            (loss_sum float [], count int64 []): squared error of the velocity summed over the real entries of
            ``action``, and their number. Losses of optional heads are sums over their own real entries, so that
            micro-batches add up exactly; the one division by ``count`` then scales them too.
        """
        return self.head_loss(self.encode_tuned(self.encode_frozen(batch)), batch, noise, time)

    # losses

    def losses(
        self, context: Tensor, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None
    ) -> dict[str, SumAndCount]:
        """Unweighted (sum, count) of every loss: "action", and "state" and "binned" where there is a head."""
        action = batch["action"]
        noise = torch.randn_like(action) if noise is None else noise
        time = self.sample_time(len(action), action.device) if time is None else time
        share = time.to(action.dtype)[:, None, None]
        noisy, velocity = torch.lerp(noise, action, share), action - noise
        view, state_token = self._view(context, batch), self._augmented(self._state_token(batch))
        tokens = self._denoise(view, state_token, noisy, self._bucket(time), batch["embodiment_id"])
        predicted = self.action_decoder(tokens, batch["embodiment_id"])
        found = {"action": squared_error(predicted, velocity, batch["action_mask"])}
        if self.world_model is not None:
            found["state"] = self._state_loss(context, batch, tokens)
        if self.binned_actions is not None:
            found["binned"] = self._binned_loss(context, batch, state_token)
        return found

    def sample_time(self, rows: int, device: torch.device) -> Tensor:
        """float32 [rows]: time_scale * (1 - Beta(alpha, 1)); u ** (1 / alpha) has that Beta distribution."""
        beta = torch.rand(rows, device=device) ** (1 / self.config.time_alpha)
        return (1 - beta) * self.config.time_scale

    def _state_loss(self, context: Tensor, batch: Batch, tokens: Tensor) -> SumAndCount:
        assert self.world_model is not None
        _, is_real = self._token_kinds(batch)
        known = batch["next_state"]
        tokens = tokens[:, : known.shape[1]]
        states = self.world_model.state_predictor(context, is_real, tokens, batch["state"])
        return squared_error(states, known, batch["next_state_mask"])

    def _binned_loss(self, context: Tensor, batch: Batch, state_token: Tensor) -> SumAndCount:
        assert self.binned_actions is not None
        logits = self._bin_logits(context, batch, state_token)
        target = self.binned_actions.bin_of(batch["action"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
        mask = batch["action_mask"].flatten()
        return (loss * mask).sum(), mask.sum()

    def _bin_logits(self, context: Tensor, batch: Batch, state_token: Tensor) -> Tensor:
        assert self.binned_actions is not None
        _, is_real = self._token_kinds(batch)
        first = (
            torch.arange(is_real.shape[1], device=is_real.device) == 0
        )  # an empty row sees its first place
        out: Tensor = self.binned_actions(context, (is_real | first)[:, None, None], state_token)
        return out

    # action head

    def _token_kinds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """bool [B, T]: which ids are image placeholders, and which are no padding."""
        ids = batch["input_ids"]
        is_real = torch.arange(ids.shape[1], device=ids.device) < batch["lengths"][:, None]
        return is_real & (ids == self.config.image_token), is_real

    def _view(self, context: Tensor, batch: Batch) -> Context:
        return split_context(context, *self._token_kinds(batch), self.config.image_tokens)

    def _state_token(self, batch: Batch) -> Tensor:
        out: Tensor = self.state_encoder(batch["state"], batch["embodiment_id"])
        return out

    def _augmented(self, state_token: Tensor) -> Tensor:
        """The encoded state as training sees it: of some samples dropped, with noise on top."""
        c = self.config
        if self.training and self.mask_token is not None:
            drop = torch.rand(len(state_token), 1, 1, device=state_token.device) < c.state_dropout
            state_token = torch.where(drop, self.mask_token.to(state_token.dtype), state_token)
        if self.training and c.state_noise:
            state_token = state_token + c.state_noise * torch.randn_like(state_token)
        return state_token

    def _bucket(self, time: Tensor) -> Tensor:
        return (time * self.config.time_buckets).long()

    def _denoise(
        self, view: Context, state_token: Tensor, noisy: Tensor, bucket: Tensor, embodiment: Tensor
    ) -> Tensor:
        """Tokens of the noisy actions after the transformer, [B, horizon, dit_output]."""
        actions = self.action_encoder(noisy, bucket, embodiment) + self.position.weight[: noisy.shape[1]]
        tokens = torch.cat((state_token.to(actions.dtype), actions), dim=1)
        out: Tensor = self.dit(tokens, bucket, view)[:, state_token.shape[1] :]
        return out

    # inference

    @torch.no_grad()
    def act(self, batch: Batch, steps: int | None = None, noise: Tensor | None = None) -> Tensor:
        """Actions [B, horizon, action_dim], normalised as in training, by Euler steps from noise.

        Args:
            batch: as for ``forward``, without action and action_mask.
            steps: Euler steps; the published model takes 4.
            noise: where to start, [B, horizon, action_dim]; drawn if None.
        """
        c, steps = self.config, steps or self.config.denoise_steps
        context = self.encode_tuned(self.encode_frozen(batch))
        view, state_token, who = self._view(context, batch), self._state_token(batch), batch["embodiment_id"]
        shape, state = (len(who), c.horizon, c.action_dim), batch["state"]
        x = torch.randn(shape, dtype=state.dtype, device=state.device) if noise is None else noise
        for step in range(steps):
            bucket = torch.full_like(who, int(step / steps * c.time_buckets))
            velocity = self.action_decoder(self._denoise(view, state_token, x, bucket, who), who)
            x = x + velocity.to(x.dtype) / steps
        return x

    @torch.no_grad()
    def act_binned(self, batch: Batch) -> Tensor:
        """Actions [B, horizon, action_dim] of the discrete head: the middle of the most probable bins.

        Raises:
            ConfigError: the model was built without that head.
        """
        if self.binned_actions is None:
            raise ConfigError("model.args.binned_loss", "is 0, so the model has no discrete action head")
        context = self.encode_tuned(self.encode_frozen(batch))
        logits = self._bin_logits(context, batch, self._state_token(batch))
        return self.binned_actions.centre_of(logits.argmax(-1))


def squared_error(predicted: Tensor, target: Tensor, mask: Tensor) -> SumAndCount:
    """(sum of squared differences where mask is True, number of those), in the precision of ``target``."""
    error = (predicted.to(target.dtype) - target).square()
    return (error * mask).sum(), mask.sum()


def config_for(
    size: str, vocab_size: int | None = None, args: Mapping[str, int | float | bool | str] | None = None
) -> VLAConfig:
    """A named size, with its vocabulary and single dimensions replaced.

    Raises:
        ConfigError: unknown size or dimension, or dimensions that do not fit together.
    """
    if size not in SIZES:
        raise ConfigError("model.size", f"no size {size!r}; known: {', '.join(SIZES)}")
    vocabulary = {} if vocab_size is None else {"vocab_size": vocab_size}
    try:
        return VLAConfig.model_validate({**SIZES[size], **vocabulary, **(args or {})})
    except ValidationError as e:
        raise first_problem(e, "model.args.") from None


def build(size: str, vocab_size: int | None = None, **args: int | float | bool | str) -> GR00TVLA:
    """Build a named size; ``vocab_size`` None keeps that of the size. Errors as :func:`config_for`."""
    return GR00TVLA(config_for(size, vocab_size, args))
