"""Text from one rank to all others of a group, as bytes of a tensor; nothing is pickled."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lf_comm._channel import Channel


def text_of(owner: int, text: str, channel: Channel, device: torch.device) -> str:
    """What `owner`, a rank of the group, gives as `text`; all ranks call it."""
    mine = (
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )
    source = dist.get_process_group_ranks(channel.group)[owner]
    count = torch.tensor([mine.numel()], device=device)
    dist.broadcast(count, source, group=channel.group)
    held = (
        mine.to(device)
        if channel.rank == owner
        else torch.empty(int(count), dtype=torch.uint8, device=device)
    )
    if held.numel():
        dist.broadcast(held, source, group=channel.group)
    return bytes(held.cpu().tolist()).decode()
