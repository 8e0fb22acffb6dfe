"""Several lf-format data sets under one numbering, and the plan over them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._block_order import MIX
from ._errors import LoaderError, PlanError
from ._permute import Ids
from ._runs import BucketRuns
from .mix_plan import MixPlan
from .mixing import Mixture, Weight
from .pack_plan import PackPlan
from .plan import Plan

# Decoded bytes of a chunk; MIX of them at a time, and those that come next, fit the default cache of the engine.
_CHUNK_BYTES = 8 << 20
AnyPlan = Plan | MixPlan | PackPlan


class Joined:
    """What the engines need of a data set, for several: record ids count through them in order.

    Raises LoaderError when they differ in vocabulary, tokenizer, fields or token type.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        first = datasets[0]
        for number, other in enumerate(datasets):
            for name in ("vocab_size", "tokenizer", "fields", "token_dtype"):
                a, b = getattr(first, name), getattr(other, name)
                if a != b:
                    raise LoaderError(f"data sets 0 and {number} differ in {name}: {a!r}, {b!r}")
        self.fields, self.token_dtype = first.fields, first.token_dtype
        self.buckets = tuple(sorted({edge for dataset in datasets for edge in dataset.buckets}))
        self.readers = tuple(reader for dataset in datasets for reader in dataset.readers)
        self.lengths = np.concatenate([reader.lengths for reader in self.readers])
        self._first = np.concatenate(([0], np.cumsum([len(reader) for reader in self.readers])))

    def __len__(self) -> int:
        return len(self.lengths)

    def locate(self, ids: Ids) -> tuple[npt.NDArray[Any], Ids]:
        """Reader of each record, and its id there."""
        shard = np.searchsorted(self._first, ids, "right") - 1
        return shard, ids - self._first[shard]

    def longest(self, field: str) -> int:
        """Most steps of the first axis of a field."""
        return max(int(reader.longest(field)) for reader in self.readers)

    def record(self, number: int) -> Any:
        """One record, as lf-format reads it."""
        shard, local = self.locate(np.array([number]))
        return self.readers[int(shard[0])].record(int(local[0]))


def sources_of(dataset: Any, datasets: Sequence[Any] | None, weights: Sequence[Weight] | None) -> list[Any]:
    """The data sets asked for in either way; LoaderError for both or neither, PlanError for an empty one."""
    if (dataset is None) == (datasets is None):
        raise LoaderError("pass either dataset or datasets=[...]")
    if weights is not None and datasets is None:
        raise LoaderError("weights=[...] belongs to datasets=[...]")
    sources = [dataset] if datasets is None else list(datasets)
    if not sources:
        raise LoaderError("datasets=[]: at least one is needed")
    if not all(len(source) for source in sources):
        raise PlanError("the data set is empty" if datasets is None else "one of the data sets is empty")
    return sources


def make_plan(
    sources: Sequence[Any], weights: Sequence[Weight] | None, *, global_batch: int, seed: int, shuffle: bool,
    block: int | None, pack: int | None, pack_window: int | None,
) -> AnyPlan:  # fmt: skip
    """The plan a loader with these arguments follows; without weights every source has the same."""
    if pack_window is not None and pack is None:
        raise LoaderError("pack_window belongs to pack")
    if len(sources) == 1 and pack is None:
        return plan_of(
            sources[0], global_batch=global_batch, seed=seed, shuffle=shuffle, shuffle_block_size=block
        )
    if weights is not None and len(weights) != len(sources):
        raise PlanError(f"{len(sources)} data sets and {len(weights)} weights")
    mixture = Mixture([1] * len(sources) if weights is None else weights)
    prints = [source.fingerprint for source in sources]
    fingerprint = prints[0] if len(sources) == 1 else _fingerprint(prints, mixture.weights)
    if pack is not None:
        lengths = [source.lengths for source in sources]
        blocks = [_block_size(source, 1, block) for source in sources]
        return PackPlan(lengths, mixture, pack, global_batch, seed, shuffle, fingerprint, pack_window, blocks)
    # each source has an order of its own, also when one data set is given twice
    plans = [
        plan_of(
            source, global_batch=global_batch, seed=seed + number, shuffle=shuffle, shuffle_block_size=block
        )
        for number, source in enumerate(sources)
    ]
    return MixPlan(plans, mixture, fingerprint)


def plan_of(
    dataset: Any,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    shuffle_block_size: int | None = None,
) -> Plan:
    """The plan a LoongDataLoader of one data set with these arguments follows."""
    if len(dataset) == 0:
        raise PlanError("the data set is empty")
    # Opening a file has checked every length against the edge of its bucket.
    runs = BucketRuns.of_blocks(dataset.readers)
    block = _block_size(dataset, global_batch, shuffle_block_size)
    return Plan(
        None,
        runs,
        dataset.buckets,
        global_batch,
        seed,
        shuffle,
        dataset.fingerprint,
        shuffle_block_size=block,
    )


def _block_size(dataset: Any, global_batch: int, asked: int | None) -> int:
    """Records that stay neighbours: what was asked for, else as many as a chunk of coded blocks holds."""
    if asked is not None:
        return asked
    indices = [reader.opened.index for reader in dataset.readers]
    decoded = sum(int(index.block_raw[index.block_codec != 0].sum()) for index in indices)
    if decoded <= 2 * MIX * _CHUNK_BYTES:
        return 0
    whole = sum(int(index.block_raw.sum()) for index in indices)
    return max(global_batch, int(_CHUNK_BYTES * len(dataset) / whole))


def _fingerprint(prints: Sequence[str], weights: Sequence[int]) -> str:
    text = repr((list(prints), list(weights)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
