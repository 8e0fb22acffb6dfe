"""One call that joins the process group and says what it enabled, and why.

    job = lf_comm.init_loong_dist("loongnccl")     # under torchrun, every rank
    print(job)                                     # what is on, what is off, what travels how, what looks slow
    reducer = job.attach(ddp)                      # row-sparse sums with the rates measured here
    with job.watch.step(ddp, number): ...
    job.close()

Backends are those of torch, by their own names; "loong" before one adds what this package has for a whole job. No
library is preloaded or replaced, and no variable is set or changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lf_comm._ask import DisagreementError
from lf_comm._errors import CommError
from lf_comm.cost import Rates, measure_rates
from lf_comm.ddp import SparseGradReducer
from lf_comm.faults import PeerWatch
from lf_comm.topo import Setting, TopologyAwareRingBuilder, Transport, effective_settings

PREFIX: Final = "loong"
# backend -> (device, package that registers it with torch)
_BACKENDS = {
    "nccl": ("cuda", None),
    "gloo": ("cpu", None),
    "hccl": ("npu", "torch_npu"),
    "cncl": ("mlu", "torch_mlu"),
}


class BackendMissingError(CommError, RuntimeError):
    """A backend that was asked for by name is not here. backend; missing: what of it; remedy."""

    def __init__(self, backend: str, missing: str, remedy: str) -> None:
        self.backend, self.missing, self.remedy = backend, missing, remedy
        super().__init__(f"backend {backend!r}: {missing}; {remedy}")

    def __reduce__(self) -> tuple[type[BackendMissingError], tuple[str, str, str]]:
        return BackendMissingError, (self.backend, self.missing, self.remedy)


@dataclass(frozen=True)
class Feature:
    """Something that was looked at: whether it is on, and why."""

    name: str
    on: bool
    why: str


@dataclass
class LoongJob:
    """What :func:`init_loong_dist` made. peers: over what each other rank is reached, where that was read; watch,
    ring and rates are None where they are off."""

    backend: str
    rank: int
    world_size: int
    device: torch.device
    features: tuple[Feature, ...]
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    peers: tuple[Transport, ...] = field(default=(), repr=False)
    watch: PeerWatch | None = field(default=None, repr=False)
    ring: TopologyAwareRingBuilder | None = field(default=None, repr=False)
    rates: Rates | None = field(default=None, repr=False)

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.world_size}, backend {self.backend}, device {self.device}"]
        lines += [f"  {'on ' if each.on else 'off'} {each.name}: {each.why}" for each in self.features]
        ways = Counter(f"{each.via} ({each.distance})" for each in self.peers)
        lines += [f"  {count} peer{'s' * (count > 1)} by {way}" for way, count in ways.items()]
        said = [each for each in self.settings if each.origin != "default"]
        lines += [f"  set {each.name}={each.value} ({each.origin})" for each in said]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])

    def attach(self, ddp: DistributedDataParallel, **options: Any) -> SparseGradReducer:
        """:meth:`SparseGradReducer.attach` with the rates measured at the start; all ranks."""
        return SparseGradReducer.attach(ddp, **{"rates": self.rates, **options})

    def close(self) -> None:
        """Stop the watch and leave the group; all ranks, when all have ended."""
        if self.watch is not None:
            # A rank that closes is gone for the others, so none closes before all have come here.
            dist.barrier()
            self.watch.close()
        dist.destroy_process_group()


def init_loong_dist(
    backend: str = "loongnccl",
    *,
    watch: bool | None = None,
    topology: bool | None = None,
    rates: bool | Rates | None = None,
    timeout: timedelta | None = None,
    **options: Any,
) -> LoongJob:
    """torch.distributed.init_process_group, and for names with "loong" what this package adds; all ranks alike.

    backend: "nccl", "gloo", "hccl" (torch_npu) or "cncl" (torch_mlu), or one of them with "loong" before it, which
    turns on what the next three leave at None. watch: a PeerWatch; topology: read what connects the ranks, and warn;
    rates: of the group, measured (about a second), or those given. timeout, options: of init_process_group
    (init_method, rank, world_size, store, device_id...); without them the variables of torchrun count.

    Raises BackendMissingError before anything is joined, ValueError for an unknown name, DisagreementError on all ranks
    when they were called differently. After an error there is no process group.
    """
    plain = backend.removeprefix(PREFIX)
    if plain not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ValueError(
            f"backend={backend!r}: one of {known} is wanted, or one of them with {PREFIX!r} before it"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "there is a process group already: call init_loong_dist instead of init_process_group"
        )
    ours = backend != plain
    device, found = _device(plain)
    dist.init_process_group(plain, timeout=timeout, **options)
    try:
        return _furnish(plain, ours, device, found, watch, topology, rates)
    except BaseException:
        dist.destroy_process_group()
        raise


def _furnish(
    plain: str,
    ours: bool,
    device: torch.device,
    found: list[Feature],
    watch: bool | None,
    topology: bool | None,
    rates: bool | Rates | None,
) -> LoongJob:
    _agree((plain, ours, watch, topology, rates))
    features = [Feature("process group", True, f"torch.distributed on {plain}"), *found]
    said = f"backend {PREFIX}{plain}" if ours else f"backend {plain}, without {PREFIX!r}"

    def wanted(name: str, choice: object) -> bool:
        on = ours if choice is None else choice is not False
        why = said if choice is None else f"{name}={choice is not False}"
        features.append(Feature(name, on, why))
        return on

    measured = _rates(rates, device) if wanted("rates", rates) else None
    ring = TopologyAwareRingBuilder.from_group() if wanted("topology", topology) else None
    watching = PeerWatch() if wanted("watch", watch) else None
    settings = effective_settings() if plain == "nccl" else ()
    warnings: tuple[str, ...] = ()
    peers: tuple[Transport, ...] = ()
    if ring is not None:
        speed = 1 / measured.all_reduce if measured is not None and measured.all_reduce > 0 else None
        warnings, peers = ring.warnings(speed), ring.transports(dist.get_rank())
        features.append(_ring_feature(ring))
    hook = "for each model: job.attach(ddp), a hook is nothing to turn on unasked"
    features.append(Feature("row-sparse sums", False, hook))
    rank, size = dist.get_rank(), dist.get_world_size()
    return LoongJob(
        plain, rank, size, device, tuple(features), settings, warnings, peers, watching, ring, measured
    )


def _ring_feature(ring: TopologyAwareRingBuilder) -> Feature:
    order = ring.order
    if order.ranks == tuple(range(len(order.ranks))):
        return Feature("order of ranks", False, "the order of now is kept, nothing predicted to be quicker")
    how = "job.ring.new_group() makes a group in that order, the default one keeps its own"
    return Feature("order of ranks", False, f"{order.gain:.2f}x predicted; {how}")


def _rates(rates: bool | Rates | None, device: torch.device) -> Rates | None:
    if isinstance(rates, Rates):
        return rates
    return measure_rates(device=device)


def _agree(options: tuple[object, ...]) -> None:
    """All ranks were called alike, or DisagreementError on all."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, repr(options))
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise DisagreementError(
            f"init_loong_dist was called with {told[0]} on rank 0 and {told[others[0]]} on rank {others[0]}"
        )


def _device(backend: str) -> tuple[torch.device, list[Feature]]:
    """Where this rank computes, bound to it as the backend needs; what was done for that."""
    kind, package = _BACKENDS[backend]
    if kind == "cpu":
        return torch.device("cpu"), []
    if package is not None:
        _import(backend, package)
    if not dist.is_backend_available(backend):
        here = f"torch {torch.__version__} has no {backend}"
        remedy = (
            "install a build of torch with it"
            if package is None
            else f"install the {package} made for this torch"
        )
        raise BackendMissingError(backend, here, remedy)
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if module is not None else 0
    local = os.environ.get("LOCAL_RANK", "0")
    if not local.isdecimal() or int(local) >= count:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") if kind == "cuda" else None
        seen = f"{count} {kind} devices are visible" + (
            f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
        )
        remedy = "start as many ranks on a host as it has devices"
        raise BackendMissingError(backend, f"{seen}, and LOCAL_RANK is {local}", remedy)
    module.set_device(int(local))
    return torch.device(kind, int(local)), [
        Feature("device", True, f"{kind}:{local} made current, by LOCAL_RANK")
    ]


def _import(backend: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BackendMissingError(backend, f"the package {package} is not installed", f"install {package}")
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        missing = f"{package} cannot be imported ({type(error).__name__}: {error})"
        raise BackendMissingError(
            backend, missing, "mend its installation (driver, toolkit, versions)"
        ) from error
