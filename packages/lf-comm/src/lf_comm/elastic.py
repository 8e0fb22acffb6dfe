"""Going on with fewer ranks: the same global batch, shared out anew, and arguments with which torchrun restarts soon.

    share = lf_comm.share_batch(global_batch=96, micro_batch=8)       # this rank's part of any step's batch
    for number, places in enumerate(share.micro_batches):
        with contextlib.nullcontext() if number + 1 == len(share.micro_batches) else ddp.no_sync():
            ids = [step * 96 + place for place in places]
            (loss(ddp, ids) * share.weight(places)).backward()        # loss: the mean over its samples

Which samples make a step, and how they are cut into micro-batches, depends on neither rank nor world size: after a
restart on fewer ranks (torchrun; nobody here keeps a membership) step k has the samples it had, each once, in tensors
of the shapes they had. The gradient is the mean over the global batch, up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch.distributed as dist

# For torchrun itself, beside torchrun_arguments. By default (torch 2.13) all restarts of a job share one store: ranks
# that count restarts differently miss each other in it, stale addresses stay, and it dies with the first rank 0.
TORCHRUN_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch. micro_batches: places in the batch, 0 to global_batch - 1, of each."""

    rank: int
    ranks: int
    global_batch: int
    micro_batches: tuple[range, ...]

    def weight(self, places: range) -> float:
        """What the mean loss of a micro-batch counts under DDP, which then divides by the number of ranks."""
        return len(places) * self.ranks / self.global_batch


def share_batch(
    global_batch: int, micro_batch: int, *, ranks: int | None = None, rank: int | None = None
) -> Share:
    """Micro-batches of `micro_batch` samples (the last may have fewer), in a row, as evenly as their number allows.

    ranks, rank: those of the default group when None. ValueError when there are fewer micro-batches than ranks.
    """
    size = dist.get_world_size() if ranks is None else ranks
    me = dist.get_rank() if rank is None else rank
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("ranks", size)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is wanted")
    if not 0 <= me < size:
        raise ValueError(f"rank={me}: one below {size} is wanted")
    count = -(-global_batch // micro_batch)
    if count < size:
        raise ValueError(
            f"{global_batch} samples make {count} micro-batches of {micro_batch}, for {size} ranks: one has none. "
            f"At most {global_batch // size} samples in a micro-batch are wanted, or fewer ranks"
        )
    first, last = (count * place // size for place in (me, me + 1))
    cut = tuple(range(i * micro_batch, min((i + 1) * micro_batch, global_batch)) for i in range(first, last))
    return Share(me, size, global_batch, cut)


def throughput_kept(micro_batches: int, before: int, after: int) -> float:
    """Samples per second on `after` ranks over those on `before`, where micro-batches take equally long on each rank.

    A step lasts as long as the rank with most of them: 12 on 4 and on 3 ranks keep 0.75, 16 only 0.67.
    """
    if not 1 <= after <= micro_batches or not 1 <= before <= micro_batches:
        raise ValueError(
            f"{micro_batches} micro-batches on {before} and {after} ranks: at least one for each is wanted"
        )
    return -(-micro_batches // before) / -(-micro_batches // after)


def torchrun_arguments(
    nodes: tuple[int, int],
    endpoint: str,
    job: str,
    *,
    per_node: int = 1,
    restarts: int = 100,
    patience_s: int = 3,
    standing_store: bool = False,
) -> tuple[str, ...]:
    """For torchrun on each host, so that a lost host costs few seconds: by default it waits 15 for its heartbeat, and
    30 more for others to join. Set TORCHRUN_ENVIRONMENT for it as well.

    nodes: fewest and most hosts; endpoint: "host:port" of the rendezvous; patience_s: seconds without heartbeat until a
    host is gone, at least 2. standing_store: the endpoint is a TCPStore that some other process holds, so that the job
    survives the loss of any of its hosts; else the host of that name holds it, and must live.
    """
    fewest, most = nodes
    if not 1 <= fewest <= most or per_node < 1 or restarts < 0:
        raise ValueError(
            f"nodes={nodes}, per_node={per_node}, restarts={restarts}: 1 <= fewest <= most are wanted"
        )
    if patience_s < 2:
        raise ValueError(f"patience_s={patience_s}: at least 2 are wanted, heartbeats are seconds apart")
    conf = f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt={patience_s}"
    return (
        f"--nnodes={fewest}:{most}",
        f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={job}",
        f"--rdzv-conf={conf},is_host=0" if standing_store else f"--rdzv-conf={conf}",
        f"--max-restarts={restarts}",
    )
