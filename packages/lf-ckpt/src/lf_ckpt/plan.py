"""What a save will write, decided before any byte is copied. Pure over tensor metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .boxes import Box, whole
from .dtypes import ITEM_SIZE, PLANE_WIDTH, name_of
from .errors import UnsupportedError
from .format import EXTENT_BYTES, align
from .jsonio import Json, canonical, checked_text, decode_item, encode_item
from .local import window_of
from .manifest import StreamKey, item_key, shard_key

CHUNK_BYTES = 16 << 20  # staged and written at a time: long enough to hide call overheads


@dataclass(frozen=True)
class Stream:
    """Bytes to store under one name. `source` is a tensor, or bytes for an item; `shape` is () for bytes.

    A shard of a larger tensor has its own `shape`, the tensor's as `full_shape` and its place in it as `offsets`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: torch.Tensor | bytes
    full_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None

    @property
    def full(self) -> tuple[int, ...]:
        """Shape of the tensor that this is a shard of."""
        return self.shape if self.full_shape is None else self.full_shape

    @property
    def box(self) -> Box:
        """The elements of that tensor that are here."""
        return whole(self.shape) if self.offsets is None else Box(self.offsets, self.shape)

    @property
    def width(self) -> int:
        """Byte planes per number."""
        return PLANE_WIDTH[self.dtype]

    @property
    def key(self) -> StreamKey:
        """What the stream holds, as in `StoredStream.key`."""
        if self.is_item:
            return item_key(self.name)
        return shard_key(self.name, self.dtype, self.full, self.box)

    @property
    def is_item(self) -> bool:
        """Whether this is a bytes item and not a tensor."""
        return isinstance(self.source, bytes)

    @property
    def on_device(self) -> bool:
        """Whether this is a tensor on an accelerator."""
        return isinstance(self.source, torch.Tensor) and self.source.device.type != "cpu"


class Chunk(NamedTuple):
    """A run of one stream's bytes, at most `chunk_bytes`, beginning at an extent edge."""

    stream: int
    start: int
    length: int


@dataclass(frozen=True)
class Plan:
    """Streams by number (tensors first), tied names -> stored name, JSON items (a private copy) and metrics.

    tied: the streams that the aliases would be; they are not written. of_all_ranks: in a group, the items of every rank
    count, not only those of rank 0. profile: that of the manifest.
    """

    streams: tuple[Stream, ...]
    aliases: dict[str, str]
    items: dict[str, Json]
    metrics: dict[str, float] = field(default_factory=dict)
    tied: tuple[Stream, ...] = ()
    of_all_ranks: bool = False
    profile: str = ""

    @property
    def raw_bytes(self) -> int:
        """Bytes of all streams."""
        return sum(stream.nbytes for stream in self.streams)

    @property
    def slab_bytes(self) -> int:
        """Slab that holds everything at once: each stream begins at a 4 KiB edge."""
        return sum(align(stream.nbytes) for stream in self.streams)

    @property
    def on_device(self) -> bool:
        """Whether a tensor lives on an accelerator."""
        return any(stream.on_device for stream in self.streams)


def make_plan(
    tensors: Mapping[str, torch.Tensor],
    items: Mapping[str, Json],
    metrics: Mapping[str, float] | None = None,
    stored_name: Callable[[str], str] = str,
) -> Plan:
    """Check and order everything; UnsupportedError names the first tensor or item that cannot be stored.

    stored_name: the name in the store of a tensor or item (values that every rank keeps of its own). A DTensor gives
    its local shard.
    """
    _check_mapping(tensors)
    streams, tied = untie(stream_of(name, tensor, stored_name) for name, tensor in tensors.items())
    aliases = {stream.name: first for first, stream in tied}
    blobs, plain = _split_items(items)
    streams += [Stream(stored_name(name), "U8", (), len(data), data) for name, data in blobs.items()]
    plain = {stored_name(name): value for name, value in plain.items()}
    metrics = _checked_metrics(metrics or {})
    return Plan(tuple(streams), aliases, plain, metrics, tuple(stream for _, stream in tied))


def untie(
    streams: Iterable[Stream], names: Mapping[object, str] | None = None
) -> tuple[list[Stream], list[tuple[str, Stream]]]:
    """Streams to write, and with the name that has the same memory those that are other names of it.

    names: by `identity`, the first name of memory that has a name already.
    """
    first = dict(names or {})
    alone, tied = [], []
    for stream in streams:
        key = identity(stream)
        name = stream.name if key is None else first.setdefault(key, stream.name)
        if name == stream.name:
            alone.append(stream)
        else:
            tied.append((name, stream))
    return alone, tied


def chunks(sizes: Sequence[int], chunk_bytes: int) -> Iterator[Chunk]:
    """Cut streams of these sizes (bytes) into chunks, in order. `chunk_bytes` is a multiple of the extent size."""
    assert chunk_bytes % EXTENT_BYTES == 0
    for number, size in enumerate(sizes):
        for start in range(0, size, chunk_bytes):
            yield Chunk(number, start, min(chunk_bytes, size - start))


def _check_mapping(tensors: object) -> None:
    if not isinstance(tensors, Mapping):
        hint = "lf_ckpt.collect(model, optimizer) makes them of a module"
        raise UnsupportedError(f"tensors: {type(tensors).__name__} is no mapping of names to tensors; {hint}")


def _check_tensor(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise UnsupportedError(f"tensor name {name!r} is not a string")
    checked_text(name, "tensor name")
    if isinstance(tensor, Mapping):
        hint = "lf_ckpt.collect(model, optimizer) names what modules and optimizers hold"
        raise UnsupportedError(f"{name}: {type(tensor).__name__}, but names are flat; {hint}")
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name}: {type(tensor).__name__} is not a tensor; put it in `items`")
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
    ):
        kind = (
            "quantized"
            if tensor.is_quantized
            else "nested"
            if tensor.is_nested
            else f"{tensor.layout} on {tensor.device}"
        )
        raise UnsupportedError(f"{name}: {kind} tensors have no plain bytes; convert it first")
    if math.prod(max(n, 1) for n in tensor.shape) >= 1 << 63:
        raise UnsupportedError(f"{name}: an empty tensor of shape {list(tensor.shape)} cannot be made again")


def stream_of(given: str, tensor: torch.Tensor, stored_name: Callable[[str], str] = str) -> Stream:
    """A tensor, or the local shard of a DTensor, as a stream; UnsupportedError for one that has no plain bytes."""
    _check_tensor(given, tensor)
    name = stored_name(given)
    local, box = window_of(name, tensor)
    dtype, full = name_of(tensor.dtype), tuple(tensor.shape)
    if local.numel() and not _address(local):
        what = f"{type(local).__name__} without memory of its own"
        raise UnsupportedError(
            f"{name}: {what}; save the tensors that it is made of, or convert it to a plain one"
        )
    size = local.numel() * ITEM_SIZE[dtype]
    if box == whole(full):
        return Stream(name, dtype, full, size, local)
    return Stream(name, dtype, box.shape, size, local, full, box.offsets)


def _address(tensor: torch.Tensor) -> int:
    """Where the elements are; 0 for a wrapper of other tensors, for one that is fake, and where storage was freed.

    All of these look alike: they would be taken for names of one tensor.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def identity(stream: Stream) -> object | None:
    """Equal for two names of the same memory seen in the same way; None where sharing has no meaning."""
    tensor = stream.source
    if isinstance(tensor, bytes) or tensor.numel() == 0:
        return None
    lazy = (tensor.is_conj(), tensor.is_neg())
    place = (stream.full, stream.box)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), lazy, place)


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Copy as floats; a tensor is refused, for reading it would wait for the device."""
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedError(f"metric {name!r}: {type(value).__name__} is not a number; give a float")
        checked_text(name, "metric name")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except OverflowError as error:
        raise UnsupportedError(f"metrics: {error}") from error


def _split_items(items: Mapping[str, Json]) -> tuple[dict[str, bytes], dict[str, Json]]:
    """Top-level bytes, which become streams, and the rest as a checked deep copy."""
    blobs: dict[str, bytes] = {}
    plain: dict[str, Json] = {}
    for name, value in items.items():
        if not isinstance(name, str):
            raise UnsupportedError(f"item name {name!r} is not a string")
        checked_text(name, "item name")
        if isinstance(value, bytes | bytearray | memoryview):
            blobs[name] = bytes(value)
            continue
        try:
            encoded = encode_item(value, name)
            canonical(encoded)
            plain[name] = decode_item(encoded)
        except (RecursionError, ValueError) as error:
            raise UnsupportedError(f"item {name}: cannot be written as JSON: {error}") from error
    return blobs, plain
