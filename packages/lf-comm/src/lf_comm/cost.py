"""What each way of summing sparse rows costs on this group: rates measured once, and a prediction from them.

    rates = lf_comm.measure_rates()          # all ranks; about a second
    rates.predict(Load.of(known, row_bytes))  # seconds by path

A prediction is alpha-beta for the collectives, plus passes over memory for finding, packing and adding rows.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lf_comm._channel import Channel
from lf_comm._paths import Known
from lf_comm._scan import live_rows

_PROBE_BYTES = 4 << 20
_ROW = 1024  # float32 of a probe's row
_REPEAT = 5
_LOCAL = 4  # probes of passes over memory are so many times as large as those of collectives


@dataclass(frozen=True)
class Load:
    """What a sum has to move; the same on every rank. Bytes are those of the rank that sends most, of payload."""

    rows: int
    row_bytes: int
    ranks: int
    most: int  # rows of the rank that has most
    union: int  # rows that any rank has
    owned: int  # rows of the union of the owner that has most

    @classmethod
    def of(cls, known: Known, row_bytes: int) -> Load:
        """From every rank's rows."""
        ranks, rows = known.lives.shape
        return cls(rows, row_bytes, ranks, max(known.counts), len(known.union), max(known.owned))

    def bytes_sent(self, path: str) -> int:
        """Payload that a rank sends, without the bits that say which rows are set."""
        p, w = self.ranks, self.row_bytes
        if path == "dense":
            return 2 * (p - 1) * self.rows * w // p
        if path == "gather":
            return (p - 1) * self.most * w
        if path == "union":
            return 2 * (p - 1) * self.union * w // p
        return (p - 1) * (self.most * w // p + self.owned * w)

    @property
    def ask_bytes(self) -> int:
        """Bytes that a rank sends to let all know its rows."""
        return (self.ranks - 1) * (-(-self.rows // 8) + 8)


@dataclass(frozen=True)
class Rates:
    """Seconds: of a collective that moves nothing, and by byte sent, scanned, packed and added."""

    latency: float
    all_reduce: float
    all_gather: float
    all_to_all: float
    scan: float
    pack: float
    add: float

    def predict(self, load: Load, *, scanned: bool = True) -> dict[str, float]:
        """Seconds of each path; sparse ones include asking which rows are set, and finding them if scanned."""
        w = load.row_bytes
        ask = self.latency + load.ask_bytes * self.all_gather + scanned * load.rows * w * self.scan
        own, union, owned = load.most * w, load.union * w, load.owned * w
        others = load.ranks - 1
        return {
            "dense": self.latency + load.bytes_sent("dense") * self.all_reduce,
            "gather": ask
            + self.latency
            + others * own * self.all_gather
            + own * self.pack
            + (union + load.ranks * own) * self.add,
            "union": ask + self.latency + load.bytes_sent("union") * self.all_reduce + 2 * union * self.pack,
            "split": ask
            + 2 * self.latency
            + others * own / load.ranks * self.all_to_all
            + others * owned * self.all_gather
            + (own + union) * self.pack
            + (owned + own) * self.add,
        }

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({"version": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Rates:
        """What :meth:`save` wrote. ValueError for anything else."""
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: no JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or found.pop("version", None) != 1 or set(found) != names:
            raise ValueError(f"{path}: no rates of lf-comm")
        if not all(isinstance(v, float | int) and 0 <= v < 60 for v in found.values()):
            raise ValueError(f"{path}: a rate is no number of seconds")
        return cls(**{name: float(value) for name, value in found.items()})


def measure_rates(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu", nbytes: int = _PROBE_BYTES
) -> Rates:
    """Measure a group; all its ranks call it and get the same rates, those of the slowest rank.

    nbytes: size of the probes, enough that a collective's latency is small beside them.
    """
    channel, place = Channel(group), torch.device(device)
    # Each probe sends about as much: a network may carry a small burst at a higher rate.
    count = max(nbytes // (4 * _ROW) // channel.size, 1) * channel.size
    rows = torch.zeros(count, _ROW, device=place)
    part = rows[: -(-2 * count // channel.size)]
    exchanged = torch.zeros(2 * count, _ROW, device=place)
    even = [2 * count // channel.size] * channel.size
    tiny = torch.zeros(1, device=place)
    latency = _seconds(lambda: channel.all_reduce(tiny), channel, place)

    def rate(work: Callable[[], object]) -> float:
        channel.sent = 0
        seconds = _seconds(work, channel, place)
        return max(seconds - latency, 0.0) / max(channel.sent / (_REPEAT + 1), 1)

    reduce = rate(lambda: channel.all_reduce(rows))
    collect = rate(lambda: channel.all_gather(part))
    exchange = rate(lambda: channel.all_to_all(exchanged, even, even))
    # Passes over memory that no cache holds, as gradients are.
    large = torch.zeros(_LOCAL * len(rows), _ROW, device=place)
    ids, room = torch.arange(len(large), device=place), torch.zeros_like(large)
    passes = (
        lambda: live_rows(large),
        lambda: torch.index_select(large, 0, ids, out=room),
        lambda: room.index_add_(0, ids, large),
    )
    local = [_seconds(work, channel, place) / large.nbytes for work in passes]
    found = torch.tensor([latency, reduce, collect, exchange, *local], dtype=torch.float64, device=place)
    if channel.size > 1:
        channel.all_reduce(found, dist.ReduceOp.MAX)
    return Rates(*found.tolist())


def _seconds(work: Callable[[], object], channel: Channel, device: torch.device) -> float:
    """Median of a few runs, all ranks beginning together."""
    found = []
    for _ in range(_REPEAT + 1):
        _together(channel, device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _together(channel: Channel, device: torch.device) -> None:
    token: Tensor = torch.zeros(1, device=device)
    dist.all_reduce(token, group=channel.group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
