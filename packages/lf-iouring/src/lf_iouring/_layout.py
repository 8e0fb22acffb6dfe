"""Which fields a batch delivers, and where their values lie in its slot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ._episodes import Episodes
from ._errors import LoaderError
from ._permute import Ids

ALIGN = 64  # bytes; a cache line, and what vector loads like
COPY, BITS, JOIN = 0, 1, 2  # as in csrc/lf_native.cdef
Form = Literal["fixed", "padded", "joined"]
Array = npt.NDArray[Any]


class Slot(Protocol):
    """Memory of one batch: a lease of the pool, memory of its own, or a copy on a device."""

    @property
    def address(self) -> int:
        """Of the first byte, for native code."""

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> Any:
        """The bytes from `offset` on as an array that keeps the memory."""


class HeapSlot:
    """A Slot of its own: `memory` is uint8[n], or a number of bytes."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: Array | int) -> None:
        self.memory = np.empty(memory, np.uint8) if isinstance(memory, int) else memory
        self.address = int(self.memory.ctypes.data)

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> Array:
        """See Slot."""
        return np.ndarray(shape, dtype, self.memory.data, offset)


@dataclass(frozen=True)
class Value:
    """One field as a batch delivers it.

    Attributes:
        name: of the field.
        stored: its number among the fields of the data set.
        form: "fixed" values have one shape; "padded" ones are filled up with zeros to the batch's edge; "joined"
            ones follow each other.
        dtype: as delivered; a bit is a byte of 0 or 1.
        shape: of one value, or of one step of its first axis unless the form is "fixed".
        bits: stored eight to a byte.
        deltas: steps in time, for an axis after the rows; None without that axis.
        longest: most steps of a joined value.
    """

    name: str
    stored: int
    form: Form
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bits: bool
    deltas: tuple[int, ...] | None
    longest: int

    @property
    def times(self) -> tuple[int, ...]:
        """`deltas`, or that of the record itself."""
        return self.deltas or (0,)

    @property
    def step_bytes(self) -> int:
        """Delivered bytes of a fixed value, or of one step of another."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array_shape(self, rows: int, edge: int) -> tuple[int, ...]:
        """Of the array of a batch, for forms other than "joined"."""
        times = () if self.deltas is None else (len(self.deltas),)
        return (rows, *times, *((edge,) if self.form == "padded" else ()), *self.shape)


class Joined(NamedTuple):
    """Values of different lengths: row i holds values[offsets[i]:offsets[i + 1]]; offsets are int64[rows + 1].

    With deltas every row has one value for each of them, and offsets are int64[rows * deltas + 1].
    """

    values: Any
    offsets: Any


class Places(NamedTuple):
    """Where the values of k batches of r rows go; d records are read for a row.

    Attributes:
        start: int64[values, k] first byte of each value's array in the slot.
        used: uint64[k] bytes of the slot in use.
        place: uint64[fields, k * r * d] byte of each stored field, or NOWHERE.
        room: uint64[fields, k] bytes of one value.
        offsets: int64[k, rows + 1] of every joined value, by name; see Joined.
    """

    start: Ids
    used: npt.NDArray[np.uint64]
    place: npt.NDArray[np.uint64]
    room: npt.NDArray[np.uint64]
    offsets: dict[str, Ids]


_FAR = 1 << 32  # steps in time; sums with record numbers stay inside 64 bits
NOWHERE = np.uint64(0xFFFFFFFFFFFFFFFF)


class SlotLayout:
    """The slot of a batch: its values one after the other, each at a multiple of 64 bytes, joined ones last.

    Args:
        dataset: of lf-format, or several joined.
        fields: names to deliver, None for all.
        deltas: steps in time by field name; such a value has an axis for them after the rows.

    Attributes:
        values: what is delivered, in the order of the slot.
        by_name, number: the same by name, and the place of each in `values`.
        token_field, mask_field: names of the main token ids and of the loss mask, None where not delivered.
        token_rows: whether all there is are the padded tokens, and perhaps the loss mask, of a .loongbin.
        times: all steps in time, ascending: a row reads one record for each.
        kinds: uint8[fields] COPY, or BITS and JOIN.
        first_coding: by descriptor of a file, number of its first coding among those of all files in order.

    Raises LoaderError for names and deltas that do not fit the data set.
    """

    def __init__(
        self,
        dataset: Any,
        fields: Sequence[str] | None = None,
        deltas: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        names = [field.name for field in dataset.fields]
        chosen = _chosen(names, fields)
        if deltas is not None and not isinstance(deltas, Mapping):
            raise LoaderError(f"deltas={deltas!r}: a mapping from names of fields to steps in time")
        steps = {name: _steps(name, chosen, given) for name, given in (deltas or {}).items()}
        main = next((f.name for f in dataset.fields if f.kind == "tokens"), None)
        values = [
            _value(dataset, number, field, main, steps.get(field.name))
            for number, field in enumerate(dataset.fields)
            if field.name in chosen
        ]
        self.values = tuple(sorted(values, key=lambda value: value.form == "joined"))
        self.by_name = {value.name: value for value in self.values}
        self.number = {value.name: number for number, value in enumerate(self.values)}
        self.token_field = main if main in chosen else None
        self.mask_field = next(
            (f.name for f in dataset.fields if f.role == "loss_mask" and f.name in chosen), None
        )
        delivered = [value.name for value in self.values]
        self.token_rows = delivered in (["tokens"], ["tokens", "loss_mask"]) and all(
            value.form == "padded" for value in self.values
        )
        self.times = tuple(sorted({step for value in self.values for step in value.times}))
        self.episodes = Episodes(dataset) if self.times != (0,) else None
        self.kinds = np.array([BITS if f.kind == "bits" else COPY for f in dataset.fields], np.uint8)
        self.kinds[[value.stored for value in self.values if value.form == "joined"]] |= JOIN
        self.first_coding = _first_codings(dataset)
        self._ragged = np.array([[field.ragged] for field in dataset.fields])
        # values of one step of a field, or of a whole value where that has no steps
        self._step_items = np.array(
            [[math.prod(f.shape[1:] if f.ragged else f.shape)] for f in dataset.fields], np.uint32
        )
        self._fields = len(names)

    def slot_bytes(self, rows: int, edge: int) -> int:
        """Most bytes that `rows` rows of this edge can take."""
        total = 0
        for value in self.values:
            steps = {"fixed": 1, "padded": edge, "joined": value.longest}[value.form]
            total = _aligned(total) + rows * len(value.times) * steps * value.step_bytes
        return total

    def outlier(self) -> str:
        """Which joined field makes slots large, to be appended to an error; "" without one."""
        joined = [value for value in self.values if value.form == "joined"]
        if not joined:
            return ""
        worst = max(joined, key=lambda value: value.longest * value.step_bytes)
        return (
            f"; every row has room for the longest value of {worst.name!r}, {worst.longest * worst.step_bytes} "
            "bytes: leave the field out by fields=, shorten its outliers, or take a smaller global_batch"
        )

    def records(self, ids: Ids) -> Ids:
        """The records to read for rows `ids` int64[k, r]: int64[k, r * d], row by row."""
        if self.episodes is None:
            return ids
        return self.episodes.neighbours(ids, self.times).reshape(len(ids), -1)

    def items(self, counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Values of every field, from its steps: uint32[fields, n] both."""
        return np.where(self._ragged, counts, np.uint32(1)) * self._step_items

    def places(self, edges: Ids, rows: int, counts: npt.NDArray[np.uint32]) -> Places:
        """Where everything goes.

        Args:
            edges: int64[k] padded length of each batch.
            rows: of a batch.
            counts: uint32[fields, k * rows * d] steps of each record, 0 for an empty row.
        """
        k, d = len(edges), len(self.times)
        place = np.full((self._fields, k, rows, d), NOWHERE, np.uint64)
        room = np.zeros((self._fields, k), np.uint64)
        start = np.empty((len(self.values), k), np.int64)
        offsets: dict[str, Ids] = {}
        at = np.zeros(k, np.int64)
        for number, value in enumerate(self.values):
            start[number] = at = _aligned(at)
            columns = np.searchsorted(self.times, value.times)
            if value.form == "joined":
                steps = counts[value.stored].reshape(k, rows, d)[:, :, columns].reshape(k, -1)
                ends = np.zeros((k, steps.shape[1] + 1), np.int64)
                np.cumsum(steps, axis=1, out=ends[:, 1:])
                offsets[value.name] = ends
                inside, size = ends[:, :-1] * value.step_bytes, ends[:, -1] * value.step_bytes
            else:
                each = edges * value.step_bytes if value.form == "padded" else np.full(k, value.step_bytes)
                count = rows * len(value.times)
                room[value.stored] = each
                inside, size = np.arange(count) * each[:, None], count * each
            place[value.stored][:, :, columns] = (at[:, None] + inside).reshape(k, rows, len(columns))
            at = at + size
        return Places(start, at.astype(np.uint64), place.reshape(self._fields, -1), room, offsets)


def _first_codings(dataset: Any) -> dict[int, int]:
    counts = [len(reader.codings()) for reader in dataset.readers]
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    return {reader.fileno(): start for reader, start in zip(dataset.readers, starts, strict=True)}


def _aligned(at: Any) -> Any:
    return -(-at // ALIGN) * ALIGN


def _chosen(names: list[str], fields: Sequence[str] | None) -> set[str]:
    if fields is None:
        return set(names)
    if isinstance(fields, str) or not fields:
        raise LoaderError(f"fields={fields!r}: a list of names, out of {names}")
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise LoaderError(f"fields {unknown}: the data set has {names}")
    return set(fields)


def _steps(name: str, chosen: set[str], given: Sequence[int]) -> tuple[int, ...]:
    if name not in chosen:
        raise LoaderError(f"deltas of {name!r}: the batch has {sorted(chosen)}")
    steps = tuple(given) if isinstance(given, Sequence) else ()
    whole = all(isinstance(step, int) and not isinstance(step, bool) and abs(step) <= _FAR for step in steps)
    if not steps or not whole or list(steps) != sorted(set(steps)):
        raise LoaderError(
            f"deltas of {name!r}: {given!r} must be a list of ascending integers, 0 for the record itself"
        )
    return steps


def _value(dataset: Any, number: int, field: Any, main: str | None, deltas: tuple[int, ...] | None) -> Value:
    bits = field.kind == "bits"
    mask = bits and field.role == "loss_mask"
    padded = field.ragged and (field.name == main or (mask and main is not None))
    form: Form = "padded" if padded else "joined" if field.ragged else "fixed"
    if deltas is not None and field.name == main:
        raise LoaderError(f"deltas of {field.name!r}: the token ids of a sample have no neighbours in time")
    return Value(
        name=field.name,
        stored=number,
        form=form,
        dtype=np.dtype(np.uint8) if mask else field.numpy_dtype,
        shape=field.shape[1:] if field.ragged else field.shape,
        bits=bits,
        deltas=deltas,
        longest=dataset.longest(field.name) if form == "joined" else 1,
    )
