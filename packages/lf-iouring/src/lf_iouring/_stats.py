"""What a loader reports about itself."""

from dataclasses import dataclass

from .engine import EngineInfo


@dataclass(frozen=True)
class LoaderStats:
    """Counts since the loader was made (in a forked child: since its first batch there).

    Attributes:
        batches, tokens: delivered to the caller; tokens without padding.
        bytes: payload bytes the engine was asked for, prefetched batches included.
        wait_s: seconds the caller waited for a batch that was not ready.
        plan_s: seconds spent computing record ids and extents, in the caller's thread.
        read_s: seconds the engine's threads were busy, hashing included.
        hash_s: the part of it spent in record hashes, estimated from one row a batch.
        mapped_reads, cached_reads, direct_reads, ring_reads, pread_reads: extents by the way they were read; see
            Counters.
        decoded_blocks, decode_s: coded blocks decoded, and seconds spent on them.
        overflow: batches that got memory of their own because every slot was held by the caller; and those that
            were therefore transformed here instead of by a worker.
        engine, reason: which engine works and why.
        pages: pages under the pool.
        slots: slots of the pool.
        copy_s, copied_bytes: seconds the caller spent starting copies to the device, bytes of them.
        prefetch, prefetch_changes: batches read ahead now, and how often that number changed.
        transform_s: seconds the caller spent in the transform, or waiting for the workers that run it.
    """

    batches: int
    tokens: int
    bytes: int
    wait_s: float
    plan_s: float
    read_s: float
    hash_s: float
    mapped_reads: int
    cached_reads: int
    direct_reads: int
    ring_reads: int
    pread_reads: int
    decoded_blocks: int
    decode_s: float
    overflow: int
    engine: str
    reason: str
    pages: str
    slots: int
    copy_s: float = 0.0
    copied_bytes: int = 0
    prefetch: int = 0
    prefetch_changes: int = 0
    transform_s: float = 0.0


@dataclass(frozen=True)
class LoaderInfo:
    """How a loader is set up.

    Attributes:
        engine: see EngineInfo.
        threads_reason: where the number of engine threads comes from.
        cores: those they are bound to, empty when they are not.
        pages, pages_reason: pages under the pool and why these.
        slots, slot_bytes: size of the pool.
        prefetch_bounds, prefetch_reason: least and most batches read ahead of the caller, and why.
        records, steps_per_epoch, fingerprint: of the data set and plan.
        notes: environment variables seen and what they do here.
    """

    engine: EngineInfo
    threads_reason: str
    cores: tuple[int, ...]
    pages: str
    pages_reason: str
    slots: int
    slot_bytes: int
    prefetch_bounds: tuple[int, int]
    prefetch_reason: str
    records: int
    steps_per_epoch: int
    fingerprint: str
    notes: tuple[str, ...]
