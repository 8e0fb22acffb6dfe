"""Operators of the simulated device: a few of its own, and one logged fallback onto the host's kernels for the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import _host
from ._log import ContractError
from ._memory import Memory
from ._streams import Streams

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Kernels of the host that only make another view of their input, whatever device it names.
VIEWS = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Tensor",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
)
# The host has kernels for these, and torch would compose them for a device out of others, with other roundings.
COMPOSED = ("native_layer_norm", "silu_backward")
# Here a device takes small tensors of the host among its own, as CUDA does.
_HOST_ARGUMENTS = ("aten::index", "aten::_index_put_impl_", "aten::index_put_")


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class Operators:
    """Everything registered for PrivateUse1."""

    def __init__(self, name: str, memory: Memory, streams: Streams) -> None:
        self.name, self.memory, self.streams, self.log = name, memory, streams, streams.log
        self.generator = torch.Generator()
        self._aten = torch.library.Library("aten", "IMPL")
        self._all = torch.library.Library("_", "IMPL")

    def register(self) -> None:
        """Once per process."""
        for name in VIEWS:
            self._aten.impl(name, self._view(_op(name)), "PrivateUse1")
        self._aten.impl("empty.memory_format", self._empty, "PrivateUse1")
        self._aten.impl("empty_strided", self._empty_strided, "PrivateUse1")
        self._aten.impl("resize_", self._resize, "PrivateUse1")
        self._aten.impl("_copy_from", self._copy_from, "PrivateUse1")
        self._aten.impl("_copy_from_and_resize", self._copy_from, "PrivateUse1")
        self._aten.impl("record_stream", self._record_stream, "PrivateUse1")
        for name in COMPOSED:
            self._aten.impl(name, functools.partial(self._fallback, _op(name)), "PrivateUse1")
        self._all.fallback(self._fallback, "PrivateUse1")

    def is_ours(self, value: object) -> bool:
        """Whether it is a tensor of this device."""
        return isinstance(value, Tensor) and value.device.type == self.name

    def _view(self, op: Any) -> Any:
        def view(*args: Any) -> Any:
            return op.redispatch(_ON_CPU, *args)

        return view

    def _empty(
        self,
        size: list[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: Any = None,
    ) -> Tensor:
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
        return self.memory.strided(like.shape, like.stride(), like.dtype)

    def _empty_strided(
        self,
        size: list[int],
        stride: list[int],
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        return self.memory.strided(size, stride, dtype or torch.get_default_dtype())

    def _resize(self, tensor: Tensor, size: list[int], memory_format: Any = None) -> Tensor:
        if tensor.numel() != torch.Size(size).numel():
            fresh = self._empty(size, tensor.dtype)
            kept = min(fresh.numel(), tensor.numel())
            _host.on_host(fresh).view(-1)[:kept] = _host.on_host(tensor).reshape(-1)[:kept]
            tensor.set_(fresh)
        elif tensor.shape != torch.Size(size):
            tensor.set_(tensor.view(size))
        return tensor

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.log.add("op", "aten::record_stream", stream.stream_id)

    def _copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        at = self.streams.current()
        self.streams.read_host(at)
        if self.is_ours(source) and self.is_ours(target):
            self.log.work("op", "aten::copy_", at, [_storage(source)], [_storage(target)])
            _host.on_host(target).copy_(_host.on_host(source))
        elif self.is_ours(source):
            self._to_host(source, target, non_blocking, at)
        else:
            self._to_device(source, target, non_blocking, at)
        return target

    def _to_host(self, source: Tensor, target: Tensor, non_blocking: bool, at: int) -> None:
        self.log.work("copy", "device to host", at, [_storage(source)], [])
        if non_blocking:
            found = _host.on_host(source).clone()
            target = target.detach()
            self.streams.later(at, lambda: _write(target, found), arrives=True)
        else:
            target.copy_(_host.on_host(source))
            self._host_waits(at)

    def _to_device(self, source: Tensor, target: Tensor, non_blocking: bool, at: int) -> None:
        self.log.work("copy", "host to device", at, [], [_storage(target)])
        memory, source = _host.on_host(target), source.detach()
        if non_blocking:
            self.streams.later(at, lambda: _write(memory, source), arrives=False)
        else:
            memory.copy_(source)

    def _host_waits(self, stream: int) -> None:
        self.streams.catch_up(stream)
        self.log.host_learns(self.log.snapshot(stream))

    def _fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator by the host's kernel on the device's memory."""
        name, at = op._schema.name, self.streams.current()
        self.streams.read_host(at)
        inputs = _Inputs(self, name)
        args, kwargs = inputs.bind(op, args, kwargs)
        self.log.work("fallback", name, at, inputs.reads, inputs.writes)
        drawing = torch.Tag.nondeterministic_seeded in op.tags and "generator" not in kwargs
        with _Drawing(self.generator) if drawing else nullcontext():
            result = op(*args, **kwargs)
        inputs.keep_resized()
        if any(not isinstance(r.type, torch.TensorType | torch.ListType) for r in op._schema.returns):
            self._host_waits(at)  # a value, such as that of item()
        return _each(inputs.back, result)


class _Inputs:
    """The arguments of one operator on the host, and which of them its results are."""

    def __init__(self, owner: Operators, name: str) -> None:
        self._owner, self._name = owner, name
        self.reads: list[int] = []
        self.writes: list[int] = []
        self._pairs: list[tuple[Tensor, Tensor, int]] = []  # device, host, address

    def bind(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments for the host's kernel."""
        declared = op._schema.arguments
        given = [*zip(declared, args, strict=False)]
        named = {a.name: a for a in declared}
        positional = tuple(self._one(a, value) for a, value in given)
        keywords = {key: self._one(named[key], value) for key, value in kwargs.items()}
        if "generator" in named and named["generator"].kwarg_only and keywords.get("generator") is None:
            keywords["generator"] = self._owner.generator
        return positional, keywords

    def _one(self, argument: Any, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == self._owner.name else value
        written = argument.alias_info is not None and argument.alias_info.is_write
        return _each(lambda leaf: self._leaf(leaf, written), value)

    def _leaf(self, value: Tensor, written: bool) -> Tensor:
        if not self._owner.is_ours(value):
            if value.dim() and self._name not in _HOST_ARGUMENTS:
                raise ContractError(
                    f"{self._name}: expected all tensors on {self._owner.name}, found one of {value.device}"
                )
            return value
        for ours, host, _ in self._pairs:
            if ours is value:
                return host
        # The kernel may size an empty output; memory under another device's label cannot be resized.
        host = _host.on_host(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
        self._pairs.append((value, host, host.data_ptr()))
        (self.writes if written else self.reads).append(_storage(value))
        return host

    def keep_resized(self) -> None:
        """Outputs that the kernel gave other memory get it on the device."""
        for ours, host, address in self._pairs:
            if host.data_ptr() != address or host.shape != ours.shape:
                ours.set_(self._owner.memory.take(host))

    def back(self, value: Tensor) -> Tensor:
        """A result on the device: an argument itself, a view of one, or new."""
        if value.device.type != "cpu":
            return value
        for ours, host, _ in self._pairs:
            if value is host:
                return ours
        for ours, host, address in self._pairs:
            if value.numel() and value.data_ptr() == address == host.data_ptr():
                return ours.as_strided(value.shape, value.stride(), ours.storage_offset())
        made = self._owner.memory.take(value)
        self._owner.log.work("result", self._name, self._owner.streams.current(), [], [_storage(made)])
        return made


class _Drawing:
    """Let operators that name no generator, such as native_dropout, draw from the device's."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(self._before)


def _each(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with every tensor in it changed; arguments of operators nest in lists only."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_each(change, item) for item in value])
    return value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _write(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
