"""Python transforms of batches: what the function gets, what it may give back, and what the loader makes of it."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lf_memory import Lease

from ._batch import Batch, Convert, PackedBatch
from ._errors import LoaderError, TransformError
from ._layout import Joined
from ._permute import Ids, round_keys
from ._samples import SampleBatch

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Transform = Callable[[Arrays, "TransformContext"], Mapping[str, Array] | None]

# Apart from every stream of the plans, see plan.py and pack_window.py.
_STEP_STREAM = 1 << 35
_RECORD_STREAM = 1 << 36
_ALIGN = 64
_DESCRIBING = ("lengths", "cu_seqlens", "position_ids", "segment_ids")


@dataclass(frozen=True)
class TransformContext:
    """Which batch a transform works on, and random numbers that depend on nothing else.

    Attributes:
        seed: of the loader.
        step, epoch: of the batch.
        ids: int64 record of each row, of each segment in packed batches; -1 for an empty row.
    """

    seed: int
    step: int
    epoch: int
    ids: Ids

    def rng(self) -> np.random.Generator:
        """Random numbers of (seed, step): every rank draws the same."""
        return _generator(self.seed, self.step, _STEP_STREAM)

    def rng_of(self, row: int) -> np.random.Generator:
        """Random numbers of (seed, epoch, record `ids[row]`), whatever batch, rank or worker it is in."""
        return _generator(self.seed, self.epoch, _RECORD_STREAM + int(self.ids[row]))


class Field(NamedTuple):
    """One output array: `shape` holds the largest extent of every axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int  # in the output slot


class OutputSpec:
    """What a transform returns, so that it can be laid into slots of shared memory.

    Args:
        fields: by name, an example array or (shape, dtype); a batch's array has this dtype, this number of axes
            and no larger extents.

    Attributes:
        fields: in order.
        slot_bytes: of a slot that takes all of them.

    Raises LoaderError for what describes no array.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields: tuple[Field, ...] = ()
        self.slot_bytes = 0
        for name, given in fields.items():
            shape, dtype = _shape_and_dtype(name, given)
            self.fields += (Field(name, shape, dtype, self.slot_bytes),)
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self.slot_bytes += -(-nbytes // _ALIGN) * _ALIGN
        if self.slot_bytes == 0:
            raise LoaderError(f"transform_output={fields!r}: it names no array with a byte in it")

    def checked(self, arrays: Mapping[str, Any]) -> list[Array]:
        """The arrays in the order of the fields; ValueError for one that is missing, unknown or does not fit."""
        names = [field.name for field in self.fields]
        if set(arrays) != set(names):
            raise ValueError(
                f"the transform returned {sorted(arrays)}, transform_output names {sorted(names)}"
            )
        return [_fitting(field, np.asarray(arrays[field.name])) for field in self.fields]


class TransformedBatch(Batch):
    """One rank's rows after a transform: tensors by name, or arrays with return_type "numpy".

    `len`, `in` and iteration are those of the names.

    Attributes, beyond those of Batch:
        tokens, loss_mask: the entries of those names, None where there are none.
        max_seqlen: of a packed batch, else None.
    """

    __slots__ = ("_arrays", "_order", "max_seqlen")

    def __init__(
        self, arrays: Mapping[str, Array], source: Batch, lease: Lease | None, convert: Convert
    ) -> None:
        self._arrays = {name: convert(array) for name, array in arrays.items()}
        self._order: list[str] = []
        self.max_seqlen: int | None = getattr(source, "max_seqlen", None)
        super().__init__(
            self._arrays.get("tokens"), self._arrays.get("loss_mask"), source._lengths, source._ids,
            source.step, source.epoch, lease, convert,
        )  # fmt: skip

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def keys(self) -> list[str]:
        """Names of the arrays."""
        return list(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def release(self) -> None:
        """See Batch; all entries are gone afterwards."""
        self._arrays.clear()
        super().release()

    def parts(self) -> tuple[list[Array], list[Array]]:
        """Arrays of a numpy batch that go to a device: those in its slot, the others."""
        inside: Arrays = {}
        outside: Arrays = {}
        for name, array in self._arrays.items():
            side = inside if self.lease is not None and in_slot(array, self.lease) else outside
            side[name] = array
        self._order = [*inside, *outside]
        return list(inside.values()), list(outside.values())

    def moved(self, arrays: list[Any], convert: Convert) -> "TransformedBatch":
        """The same batch with what `parts` named last on the device; `ids` stay on the host."""
        made = TransformedBatch(dict(zip(self._order, arrays, strict=True)), self, None, _same)
        made._convert = convert
        return made

    def __repr__(self) -> str:
        return f"TransformedBatch(step={self.step}, epoch={self.epoch}, arrays={list(self._arrays)})"


def arrays_of(batch: Batch) -> Arrays:
    """The arrays of a numpy batch by name; a joined field is `name` and `name.offsets`."""
    arrays: Arrays = {"lengths": batch._lengths}
    if isinstance(batch, SampleBatch):
        for name in batch:
            value = batch[name]
            if isinstance(value, Joined):
                arrays |= {name: value.values, f"{name}.offsets": value.offsets}
            else:
                arrays[name] = value
        return arrays
    arrays["tokens"] = batch.tokens
    if batch.loss_mask is not None:
        arrays["loss_mask"] = batch.loss_mask
    if isinstance(batch, PackedBatch):
        for name in ("cu_seqlens", "position_ids", "segment_ids"):
            arrays[name] = getattr(batch._borders, name)
    return arrays


def guarded(arrays: Arrays) -> Arrays:
    """The same for a transform: what describes the rows is read-only."""
    return {
        name: read_only(array) if name in _DESCRIBING or name.endswith(".offsets") else array
        for name, array in arrays.items()
    }


def context_of(batch: Batch, seed: int) -> TransformContext:
    """The context of a batch."""
    return TransformContext(seed, batch.step, batch.epoch, batch._ids)


def apply(
    transform: Transform,
    arrays: Arrays,
    context: TransformContext,
    output: OutputSpec | None,
    *,
    copies: bool,
) -> Arrays | None:
    """Run a transform; its arrays, or None when it worked in place.

    Args:
        copies: whether its arrays have to be laid into declared memory.

    Raises what the transform raises, and ValueError for a result that was not declared.
    """
    before = dict(arrays)
    result = transform(arrays, context)
    if result is None:
        if output is not None:
            raise ValueError("transform_output is declared, but the transform returned None")
        replaced = [name for name in {**before, **arrays} if arrays.get(name) is not before.get(name)]
        if replaced:
            raise ValueError(f"the transform replaced {replaced} and returned None; return a dict instead")
        return None
    if output is not None:
        return dict(zip((field.name for field in output.fields), output.checked(result), strict=True))
    if copies:
        raise ValueError(
            "a transform in workers that returns arrays needs transform_output={name: (shape, dtype)}"
        )
    return {name: np.require(array, requirements="W") for name, array in result.items()}


def failed(step: int) -> TransformError:
    """The TransformError for the exception being handled."""
    return TransformError(step, traceback.format_exc())


def in_slot(array: Array, lease: Lease) -> bool:
    """Whether an array lies in a leased slot."""
    offset = array.ctypes.data - lease.address
    return offset >= 0 and offset + array.nbytes <= lease.array.size


def read_only(array: Array) -> Array:
    """A view that refuses writes, which would be lost."""
    view = array.view()
    view.flags.writeable = False
    return view


def _generator(seed: int, at: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(round_keys(seed, at, stream)[:2], np.uint64)))


def _shape_and_dtype(name: str, given: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(given, np.ndarray):
        return given.shape, given.dtype
    try:
        shape, kind = given
        sizes, dtype = tuple(int(size) for size in shape), np.dtype(kind)
    except (TypeError, ValueError):
        raise LoaderError(f"transform_output[{name!r}]={given!r}: pass an array or (shape, dtype)") from None
    if dtype.hasobject or any(size < 0 for size in sizes):
        raise LoaderError(f"transform_output[{name!r}]={given!r}: no such array fits into shared memory")
    return sizes, dtype


def _fitting(field: Field, array: Array) -> Array:
    same = array.dtype == field.dtype and array.ndim == len(field.shape)
    if not same or any(size > most for size, most in zip(array.shape, field.shape, strict=True)):
        raise ValueError(
            f"{field.name!r} is {array.dtype}{list(array.shape)}, transform_output declares "
            f"{field.dtype} of at most {list(field.shape)}"
        )
    return array


def _same(array: Any) -> Any:
    return array
