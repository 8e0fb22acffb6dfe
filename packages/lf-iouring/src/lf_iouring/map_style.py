"""The same batches through torch's own DataLoader: a map-style data set, a batch sampler and a collate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._batch import Batch, Convert, Layout, converter
from ._layout import Array, Joined, SlotLayout, Value
from .plan import Plan


@dataclass(frozen=True, eq=False)
class Sample:
    """One record: its id (-1: empty row), tokens [length] and loss_mask uint8[length] or None.

    Attributes:
        fields: all fields by name, of a data set that has others than these two.
        values: how they are put together.
    """

    id: int
    tokens: Any
    loss_mask: Any
    fields: Mapping[str, Array] = field(default_factory=dict)
    values: tuple[Value, ...] = ()


class RowIds(list[int]):
    """Record ids of one rank's rows, with the `edge`, `step` and `epoch` of their batch."""

    def __init__(self, ids: Sequence[int], edge: int, step: int, epoch: int) -> None:
        super().__init__(ids)
        self.edge = edge
        self.step = step
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return RowIds, (list(self), self.edge, self.step, self.epoch)


class Rows(list[Sample]):
    """Samples of one batch, with the ids they came from."""

    def __init__(self, samples: Sequence[Sample], ids: RowIds) -> None:
        super().__init__(samples)
        self.ids = ids

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (list(self), self.ids)


class MapDataset:
    """Map-style view of an lf-format data set for torch.utils.data.DataLoader; pickles with the data set.

    Every record is read and checked by lf-format; FormatError names a record that is not as written.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._empty = np.zeros(0, dataset.token_dtype)
        names = [field.name for field in dataset.fields]
        self._masked = "loss_mask" in names
        plain = names in (["tokens"], ["tokens", "loss_mask"])
        self._values = () if plain else SlotLayout(dataset).values

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        """Record `index`, or an empty sample for -1. IndexError outside -1..len-1."""
        if index == -1:
            nothing = {value.name: _nothing(value) for value in self._values}
            mask = np.zeros(0, np.uint8) if self._masked else None
            return Sample(-1, self._empty, mask, nothing, self._values)
        record = self.dataset.record(int(index))
        mask = record.loss_mask.view(np.uint8) if self._masked else None
        return Sample(int(index), record.tokens, mask, record.fields if self._values else {}, self._values)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several records; given what PlanSampler yields, the result remembers its batch for `collate`."""
        samples = [self[index] for index in indices]
        return Rows(samples, indices) if isinstance(indices, RowIds) else samples


class PlanSampler:
    """Batch sampler: yields one rank's ids of step after step, in the order of LoongDataLoader.

    Args:
        plan: see `plan_of`.
        rank, world: this process among those that train together.
        start_step: first step.
        end_step: step to stop before; None is endless.
    """

    def __init__(
        self, plan: Plan, rank: int = 0, world: int = 1, start_step: int = 0, end_step: int | None = None
    ) -> None:
        self._plan = plan
        self._rows = plan.rank_rows(rank, world)
        self._start = start_step
        self._end = end_step

    def __iter__(self) -> Iterator[RowIds]:
        step = self._start
        while self._end is None or step < self._end:
            spec = self._plan.batch(step)
            yield RowIds(spec.ids[self._rows].tolist(), spec.bucket_edge, spec.step, spec.epoch)
            step += 1


class Collate:
    """Picklable `collate_fn` with a fixed return type; `collate` does the work."""

    def __init__(self, return_type: str = "auto") -> None:
        converter(return_type)
        self._return_type = return_type

    def __call__(self, records: Sequence[Sample]) -> Batch | dict[str, Any]:
        """See `collate`."""
        return collate(records, return_type=self._return_type)


def collate(
    records: Sequence[Sample], edge: int | None = None, return_type: str = "auto"
) -> Batch | dict[str, Any]:
    """Put samples together into the Batch that LoongDataLoader makes of them.

    Those of a data set with other fields become a dict of the arrays that a SampleBatch has, by name, with
    `ids` int64[rows] (unless a field has that name), which torch sends between processes as it is.

    Args:
        records: samples of one batch, at least one.
        edge: tokens to pad to; None takes the batch's own edge if the ids came from PlanSampler, else the
            longest sample.
        return_type: as for LoongDataLoader.
    """
    known = records.ids if isinstance(records, Rows) else None
    if edge is None:
        edge = known.edge if known else max(len(r.tokens) for r in records)
    if records[0].values:
        return _together(records, edge, converter(return_type))
    masked = records[0].loss_mask is not None
    target = Layout(len(records), records[0].tokens.dtype, masked).on_heap(edge)
    for row, record in enumerate(records):
        length = len(record.tokens)
        target.tokens[row, :length] = record.tokens
        target.tokens[row, length:] = 0
        if target.mask is not None:
            target.mask[row, :length] = record.loss_mask
            target.mask[row, length:] = 0
    convert: Convert = converter(return_type)
    return Batch(
        convert(target.tokens),
        None if target.mask is None else convert(target.mask),
        np.array([len(r.tokens) for r in records], np.int64),
        np.array([r.id for r in records], np.int64),
        known.step if known else -1,
        known.epoch if known else -1,
        None,
        convert,
    )


def _nothing(value: Value) -> Array:
    """The value of an empty row."""
    return np.zeros(value.shape if value.form == "fixed" else (0, *value.shape), value.dtype)


def _together(records: Sequence[Sample], edge: int, convert: Convert) -> dict[str, Any]:
    """Arrays of all fields, as a SampleBatch has them."""
    made: dict[str, Any] = {"ids": convert(np.array([record.id for record in records], np.int64))}
    for value in records[0].values:
        parts = [np.asarray(record.fields[value.name]).astype(value.dtype, copy=False) for record in records]
        if value.form == "fixed":
            made[value.name] = convert(np.stack(parts))
        elif value.form == "joined":
            ends = np.cumsum([0, *map(len, parts)])
            made[value.name] = Joined(convert(np.concatenate(parts)), convert(ends))
        else:
            rows = np.zeros((len(parts), edge, *value.shape), value.dtype)
            for row, part in zip(rows, parts, strict=True):
                row[: len(part)] = part
            made[value.name] = convert(rows)
    return made
