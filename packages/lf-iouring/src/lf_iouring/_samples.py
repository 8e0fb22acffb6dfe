"""Batches of samples: any fields, cut from one slot when they are asked for."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_memory import Lease

from ._batch import Batch, Convert
from ._layout import Array, Joined, Slot, SlotLayout, Value
from ._permute import Ids


class SampleBatch(Batch):
    """One rank's rows of a global batch of .lfg samples, as a mapping from field names to tensors or arrays.

    A field of a fixed shape is [rows, *shape], with deltas [rows, deltas, *shape]; bits are bool. The token ids
    that give a sample its length are padded with zeros to [rows, edge], and so is their loss mask, uint8 of 0 and
    1. Every other ragged field is a `Joined`. `len`, `in` and iteration are those of the names.

    Attributes, beyond those of Batch:
        tokens, loss_mask: the fields of those roles, None where there are none.
        edge: length that token ids are padded to.
    """

    __slots__ = ("_arrays", "_layout", "_offsets", "_slot", "_starts", "_used", "edge")

    def __init__(
        self, layout: SlotLayout, slot: Slot, starts: list[int], offsets: dict[str, Any], edge: int,
        used: int, lengths: Ids, ids: Ids, step: int, epoch: int, lease: Lease | None, convert: Convert,
    ) -> None:  # fmt: skip
        super().__init__(None, None, lengths, ids, step, epoch, lease, convert)
        self.edge, self._used = edge, used
        self._layout, self._starts, self._offsets = layout, starts, offsets
        self._slot: Slot | None = slot
        self._arrays: dict[str, Any] = {}
        self.tokens = self[layout.token_field] if layout.token_field else None
        self.loss_mask = self[layout.mask_field] if layout.mask_field else None

    def __getitem__(self, name: str) -> Any:
        """The values of a field; KeyError for one the batch does not have, or after `release`."""
        found = self._arrays.get(name)
        if found is None:
            value = self._layout.by_name.get(name)
            if value is None or self._slot is None:
                raise KeyError(f"{name!r}: " + ("released" if value else f"the batch has {list(self)}"))
            found = self._arrays[name] = self._cut(value, self._slot)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.by_name

    def __len__(self) -> int:
        return len(self._layout.by_name)

    def keys(self) -> list[str]:
        """Names of the fields."""
        return list(self._layout.by_name)

    def release(self) -> None:
        """See Batch; no field can be had afterwards."""
        self._arrays.clear()
        self._slot = None
        super().release()

    def parts(self) -> tuple[list[Array], list[Array]]:
        """Arrays of a numpy batch that go to a device: the used part of the slot, then the others."""
        assert self._slot is not None, "a batch on its way to a device has its slot"
        return [self._slot.view((self._used,), np.uint8)], [
            np.asarray(self._lengths),
            *self._offsets.values(),
        ]

    def moved(self, arrays: list[Any], convert: Convert) -> "SampleBatch":
        """The same batch over what `parts` named, on the device; `ids` stay on the host."""

        def place(array: Any) -> Any:
            return convert(array) if isinstance(array, np.ndarray) else array

        memory, lengths, *offsets = arrays
        return SampleBatch(
            self._layout, DeviceSlot(memory), self._starts, dict(zip(self._offsets, offsets, strict=True)),
            self.edge, self._used, lengths, self._ids, self.step, self.epoch, None, place,
        )  # fmt: skip

    def _cut(self, value: Value, slot: Slot) -> Any:
        start = self._starts[self._layout.number[value.name]]
        if value.form != "joined":
            shape = value.array_shape(len(self._ids), self.edge)
            return self._convert(slot.view(shape, value.dtype, start))
        offsets = self._offsets[value.name]
        values = slot.view((int(offsets[-1]), *value.shape), value.dtype, start)
        return Joined(self._convert(values), self._convert(offsets))

    def __repr__(self) -> str:
        return (
            f"SampleBatch(step={self.step}, epoch={self.epoch}, rows={len(self._ids)}, fields={list(self)})"
        )


class DeviceSlot:
    """A Slot whose bytes were copied to a device: uint8[n] there, a torch tensor or what a Backend returns."""

    address = 0  # native code does not read it

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> Any:
        """See Slot."""
        wanted = np.dtype(dtype)
        part = self._memory[offset : offset + math.prod(shape) * wanted.itemsize]
        if isinstance(part, np.ndarray):
            return part.view(wanted).reshape(shape)
        import torch

        return part.view(getattr(torch, wanted.name)).reshape(shape)
