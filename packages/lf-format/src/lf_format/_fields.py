"""Fields of a record: their bytes, and how they are described (SPEC.md sections 3 and 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError

MAX_FIELD_BYTES = 1 << 30
MAX_FIELDS = 128
MAX_AXES = 8
MAX_RAGGED_NAME = 20  # the column "len.NAME" has 24 bytes
MAX_NAME = 64
VIDEO_PARTS = ("", ".frames", ".base")  # file bytes; (pts, keyframe) a frame; time base as a fraction
_WIDTHS = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in _WIDTHS.items()}
SAMPLE_TOKEN_DTYPES = TOKEN_DTYPES | {"int32": np.dtype("<i4")}
_MORE = {"uint64": "<u8", "int8": "i1", "int16": "<i2", "int64": "<i8", "float16": "<f2", "float32": "<f4"}
TENSOR_DTYPES = (
    SAMPLE_TOKEN_DTYPES | {n: np.dtype(c) for n, c in _MORE.items()} | {"float64": np.dtype("<f8")}
)
_UINT8 = np.dtype("u1")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Field:
    """One field of every record.

    Attributes:
        name: "tokens" or "loss_mask" in a .loongbin; free in a .lfg, at most 64 bytes (20 when ragged).
        kind: "tokens" (ids below the vocabulary size), "bits" (one bit a value, packed per record), and in a
            .lfg also "tensor", "bytes", "image" (raw HWC pixels, or a JPEG file when ragged), "video" (a file).
        dtype: of the stored values; "bit" for bits.
        role: what a trainer does with it, "input" or "loss_mask" for example; free text in a .lfg.
        shape: of one record; a first axis of -1 is ragged. () is a scalar.
    """

    name: str
    kind: str
    dtype: str
    role: str
    shape: tuple[int, ...] = (-1,)

    @classmethod
    def tokens(
        cls, name: str = "input_ids", dtype: str = "int32", length: int = -1, role: str = "input"
    ) -> Field:
        """Token ids, as many as a record has (-1) or always `length`."""
        return cls(name, "tokens", dtype, role, (length,))

    @classmethod
    def tensor(cls, name: str, dtype: str, shape: tuple[int, ...], role: str = "") -> Field:
        """Numbers of a fixed shape, or ragged in the first axis: (-1, 3) is a point cloud."""
        return cls(name, "tensor", dtype, role, tuple(shape))

    @classmethod
    def bits(cls, name: str, shape: tuple[int, ...] = (-1,), role: str = "") -> Field:
        """Booleans, eight to a byte."""
        return cls(name, "bits", "bit", role, tuple(shape))

    @classmethod
    def bytes(cls, name: str, role: str = "") -> Field:
        """Any bytes, for example UTF-8 text."""
        return cls(name, "bytes", "uint8", role)

    @classmethod
    def image(cls, name: str, shape: tuple[int, ...] | None = None, role: str = "pixels") -> Field:
        """Raw uint8 pixels of shape (height, width, channels); None = a JPEG file of any size."""
        return cls(name, "image", "uint8", role, (-1,) if shape is None else tuple(shape))

    @classmethod
    def video(cls, name: str, role: str = "video") -> tuple[Field, Field, Field]:
        """A video file of any size, its frame table and time base (see `video_sample`): three fields."""
        file, table, base = (name + end for end in VIDEO_PARTS)
        return (
            cls(file, "video", "uint8", role),
            cls(table, "tensor", "int64", "frames", (-1, 2)),
            cls(base, "tensor", "int64", "time_base", (2,)),
        )

    @cached_property
    def ragged(self) -> bool:
        """The first axis differs from record to record."""
        return self.shape[:1] == (-1,)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the values as an array; bool for bits."""
        return np.dtype(bool) if self.kind == "bits" else TENSOR_DTYPES[self.dtype]

    @cached_property
    def _row_items(self) -> int:
        """Values of one step of the first axis when ragged, else of a record."""
        return math.prod(self.shape[1:] if self.ragged else self.shape)

    def nbytes(self, counts: Array) -> npt.NDArray[np.int64]:
        """Bytes of records whose first axis has `counts` steps (integers [n], ignored if not ragged): int64[n]."""
        steps = counts.astype(np.int64) if self.ragged else np.ones(len(counts), np.int64)
        items = steps * self._row_items
        return (items + 7) // 8 if self.kind == "bits" else items * self.numpy_dtype.itemsize

    def nbytes_of(self, count: int) -> int:
        """Bytes of one record with `count` steps."""
        items = (count if self.ragged else 1) * self._row_items
        return (items + 7) // 8 if self.kind == "bits" else items * self.numpy_dtype.itemsize

    def max_count(self) -> int:
        """Most steps of the first axis that stay below the size limit of a field."""
        most = MAX_FIELD_BYTES * 8 if self.kind == "bits" else MAX_FIELD_BYTES // self.numpy_dtype.itemsize
        return most // max(self._row_items, 1)

    def spare_bits_zero(self, raw: memoryview, count: int) -> bool:
        """Whether the last byte of packed bits holds nothing beyond the last value."""
        used = (count if self.ragged else 1) * self._row_items % 8
        return not used or not raw[-1] >> used

    def decode(self, raw: npt.NDArray[np.uint8], count: int) -> Array | None:
        """Array of a record from its bytes, a view where possible; None when spare bits are set."""
        shape = (count, *self.shape[1:]) if self.ragged else self.shape
        if self.kind != "bits":
            return raw.view(self.numpy_dtype).reshape(shape)
        items = math.prod(shape)
        bits = np.unpackbits(raw, bitorder="little")
        return None if bits[items:].any() else bits[:items].astype(bool).reshape(shape)


def check_field(field: Field, vocab_size: int) -> None:
    """FormatError unless `field` may stand in a .lfg schema."""

    def require(ok: bool, what: str, expected: object, found: object) -> None:
        if not ok:
            raise FormatError(f"field {field.name!r}: {what}", expected=expected, found=found)

    strings = (field.name, field.kind, field.dtype, field.role)
    require(all(isinstance(s, str) for s in strings), "texts", "str", strings)
    size = len(field.name.encode(errors="surrogatepass"))
    most = MAX_RAGGED_NAME if field.ragged else MAX_NAME
    require(1 <= size <= most and "\0" not in field.name, "name length in bytes", f"1..{most}", size)
    shape = field.shape
    whole = len(shape) <= MAX_AXES and all(type(d) is int for d in shape)
    require(whole, "shape", f"at most {MAX_AXES} integers", shape)
    sizes = shape[1:] if field.ragged else shape
    require(all(1 <= d <= MAX_FIELD_BYTES for d in sizes), "shape", "axes >= 1, -1 only first", shape)
    _check_kind(field, vocab_size, require)
    require(field.nbytes_of(1) <= MAX_FIELD_BYTES, "bytes", f"<= {MAX_FIELD_BYTES}", field.nbytes_of(1))


def _check_kind(field: Field, vocab_size: int, require: Any) -> None:
    dtypes = {"tokens": list(SAMPLE_TOKEN_DTYPES), "bits": ["bit"], "tensor": list(TENSOR_DTYPES)}
    dtypes |= {"bytes": ["uint8"], "image": ["uint8"], "video": ["uint8"]}
    require(field.kind in dtypes, "kind", " ".join(dtypes), field.kind)
    require(field.dtype in dtypes[field.kind], "dtype", " ".join(dtypes[field.kind]), field.dtype)
    if field.kind == "tokens":
        require(len(field.shape) == 1, "shape of tokens", "(n,) or (-1,)", field.shape)
        holds = int(np.iinfo(field.numpy_dtype).max) + 1
        require(vocab_size <= holds, f"vocabulary for {field.dtype}", f"<= {holds}", vocab_size)
    if field.kind in ("bytes", "video"):
        require(field.shape == (-1,), f"shape of {field.kind}", (-1,), field.shape)
    if field.kind == "image":
        jpeg = field.shape == (-1,)
        require(
            jpeg or (len(field.shape) >= 3 and not field.ragged), "image", "(h, w, c) or (-1,)", field.shape
        )
