"""What every rank tells all others before its sums: which rows it has, how its last sums went, and what it believes.

One message of bytes: 8 of a digest over all that must be the same on every rank, 1 whether this rank failed, then for
each tensor 8 of seconds and 1 whether its rows had to be searched, and the rows as bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lf_comm._channel import Channel
from lf_comm._errors import CommError
from lf_comm._paths import Known
from lf_comm._scan import pack_bits, unpack_bits

_DIGEST = 8


class DisagreementError(CommError, RuntimeError):
    """Ranks have different options, rates or pasts, or one failed; raised on all of them, with nothing summed."""


class Told(NamedTuple):
    """Of one tensor: every rank's rows; seconds of its last sum on the slowest rank, 0.0 when unknown; any search."""

    known: Known
    seconds: float
    scanned: bool


class Own(NamedTuple):
    """Of one tensor, on this rank; rows: bool [N]."""

    rows: Tensor
    seconds: float
    scanned: bool


def ask(own: Sequence[Own], same: object, failed: BaseException | None, channel: Channel) -> list[Told]:
    """Tell and be told, in one collective. same: what all ranks must have alike, by its repr.

    Raises DisagreementError on all ranks; on the one that failed, its own error.
    """
    device = own[0].rows.device
    packed = [pack_bits(one.rows) for one in own]
    facts = torch.tensor([one.seconds for one in own], dtype=torch.float64).view(torch.uint8)
    head = [*hashlib.blake2b(repr(same).encode(), digest_size=_DIGEST).digest(), failed is not None]
    flags = [one.scanned for one in own]
    front = torch.cat([torch.tensor([*head, *flags], dtype=torch.uint8), facts]).to(device)
    got = channel.all_gather(torch.cat([front, *packed]))
    heads = got[:, : front.numel()].cpu()
    _agree(heads, failed)
    scanned = heads[:, _DIGEST + 1 : _DIGEST + 1 + len(own)].any(0).tolist()
    seconds = heads[:, _DIGEST + 1 + len(own) :].contiguous().view(torch.float64).amax(0).tolist()
    told, at = [], front.numel()
    for one, bits, slowest, any_scan in zip(own, packed, seconds, scanned, strict=True):
        lives = unpack_bits(got[:, at : at + bits.numel()], one.rows.numel())
        told.append(Told(Known(lives), slowest if math.isfinite(slowest) else 0.0, bool(any_scan)))
        at += bits.numel()
    return told


def _agree(heads: Tensor, failed: BaseException | None) -> None:
    if failed is not None:
        raise failed
    if bad := heads[:, _DIGEST].nonzero().flatten().tolist():
        raise DisagreementError(f"rank {bad[0]} failed before its sum; nothing was summed")
    if different := (heads[:, :_DIGEST] != heads[:1, :_DIGEST]).any(1).nonzero().flatten().tolist():
        raise DisagreementError(
            f"rank {different[0]} and rank 0 differ in rates, options, names or past sums; nothing was summed. Give "
            "all ranks the same, as those of one measure_rates()"
        )
