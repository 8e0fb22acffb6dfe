"""Which operators a graph cannot hold, and what to write instead. Pure functions of an operator and its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lf_graph._collectives import refused_collective
from lf_graph._findings import Finding, Kind, Severity
from lf_graph._schema import op_name


@dataclass(frozen=True)
class Verdict:
    """A finding without its place."""

    kind: Kind
    why: str
    fix: str
    severity: Severity = "error"

    def at(self, op: str, where: str, module: str = "") -> Finding:
        """The finding at a place."""
        return Finding(self.kind, op, where, self.why, self.fix, self.severity, module)


_READS = "Python reads a value from the device, which waits for it and freezes what was read into the graph"
_SHAPE = "the shape of the result depends on values, so the host waits for them and a replay cannot change it"

# How to do without; by the name of the Python call first, then by the operator's.
_FIX_READ = {
    "__bool__": "choose on the device with torch.where(condition, a, b), or put the `if` outside of the graph",
    "__int__": "keep the number in a tensor, or give a capacity as the size and mask what is beyond the length",
    "__index__": "keep the number in a tensor, or give a capacity as the size and mask what is beyond the length",
    "__contains__": "use (x == value).any() as a tensor",
    "__format__": "return the tensor and print it after the replay",
    "__repr__": "return the tensor and print it after the replay",
    "tolist": "keep the values in a tensor (torch.gather, torch.index_select), or read them before the graph",
    "numpy": "compute with torch, or convert after the replay",
    "__array__": "compute with torch, or convert after the replay",
    "equal": "use (a == b).all() as a tensor",
    "allclose": "use torch.isclose(a, b).all() as a tensor",
    "one_hot": "pass num_classes to one_hot",
    "_linalg_check_errors": "use the variant that does not read its info back: inv_ex, solve_ex, cholesky_ex",
}
_READ_DEFAULT = "keep the value in a tensor on the device, or read it after the replay"

_FIX_SHAPE = {
    "where": "use the three-argument torch.where(condition, a, b)",
    "nonzero": "use torch.nonzero_static(x, size=capacity), or compute with the mask: torch.where(mask, x, 0)",
    "argwhere": "use torch.nonzero_static(x, size=capacity), or compute with the mask: torch.where(mask, x, 0)",
    "masked_select": "keep the shape: torch.where(mask, x, 0), and divide sums by mask.sum()",
    "index": "keep the shape: torch.where(mask, x, 0) instead of x[mask]",
    "index_put_": "write torch.where(mask, values, x) instead of x[mask] = values",
    "_index_put_impl_": "write torch.where(mask, values, x) instead of x[mask] = values",
    "bincount": "torch.zeros(n, dtype=torch.long, device=x.device).scatter_add_(0, x, torch.ones_like(x))",
    "repeat_interleave": "pass output_size=, a number that bounds the sum of the repeats",
    "unique": "sort and mark the first of each run: s = x.sort().values; s[1:] != s[:-1]",
}
_SHAPE_DEFAULT = (
    "give the result a fixed capacity and mask what is unused, or run this part outside of the graph"
)
_UNTAGGED_READS = frozenset({"_linalg_check_errors"})
_UNTAGGED_SHAPES = frozenset({"_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_coalesce"})
_ALIASES = {"_unique2": "unique", "_unique": "unique", "unique_dim": "unique", "unique_consecutive": "unique"}

HOST_TO_DEVICE = Verdict(
    "host_to_device",
    "the copy reads pageable host memory, which a capture forbids; a graph would repeat it from an old address",
    "copy into a static device tensor before the replay, or from pinned memory with non_blocking=True",
)
DEVICE_TO_HOST = Verdict(
    "device_to_host",
    "the copy to the host waits for the device, which a capture forbids",
    "return the tensor and copy it after the replay",
)
EARLY_HOST_COPY = Verdict(
    "device_to_host",
    "the copy lands on the host only during a replay, after Python has used what was there before",
    "return the tensor and copy it after the replay",
    "warning",
)
HOST_CONSTANT = Verdict(
    "host_to_device",
    "a tensor is made from Python or NumPy data, which copies from pageable memory and freezes the data",
    "make it once as a buffer (register_buffer), or on the device: torch.full((), value, device=x.device)",
)
CPU_SCALAR = Verdict(
    "cpu_tensor",
    "an operand lies on the host: its value is read when the kernel is launched, so the graph keeps the first one",
    "keep it on the device: register_buffer, or torch.full((), value, device=x.device)",
    "warning",
)
CPU_OPERAND = Verdict(
    "cpu_tensor",
    "an operand lies on the host and is copied to the device inside the operator",
    "move it to the device once, before the graph",
)
CPU_VALUE = Verdict(
    "host_read",
    "Python reads a tensor of the host, and the graph keeps the value it had at the capture",
    "keep the value in a tensor on the device if it changes",
    "warning",
)
GENERATOR = Verdict(
    "generator",
    "the random numbers come from a generator of your own: a graph does not know it, so replays repeat the same ones",
    "drop generator=: the default generator of the device is registered with every graph, and its seeds reproduce",
)


def classify(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: str = "", target: str = "cuda"
) -> Verdict | None:
    """Judge one operator.

    Args:
        func: an operator overload, such as ``torch.ops.aten.nonzero.default``.
        args: its arguments as the dispatcher gives them.
        kwargs: its keyword arguments.
        call: name of the Python function it was called by, such as ``__bool__``; "" when it is not known.
        target: device type the graph is for; "cpu" judges every tensor as if it were on the device.

    Returns:
        What is wrong with it, or None.
    """
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return (
        _reads(func, tensors, call, target)
        or _shapes(func, args, kwargs, call)
        or _copies(func, args, kwargs)
        or _operands(func, tensors)
        or _generators(leaves)
        or _collectives(func)
    )


def _base(func: Any) -> str:
    """``index_put_`` for ``aten.index_put_``."""
    return op_name(func).split(".", 1)[1]


def _reads(func: Any, tensors: Sequence[Tensor], call: str, target: str) -> Verdict | None:
    if torch.Tag.data_dependent_output not in func.tags and _base(func) not in _UNTAGGED_READS:
        return None
    if tensors and target != "cpu" and all(t.device.type == "cpu" for t in tensors):
        return CPU_VALUE
    return read(call if call in _FIX_READ else _base(func))


def read(call: str) -> Verdict:
    """The verdict on a call that hands a value to Python."""
    return Verdict("host_read", _READS, _FIX_READ.get(call, _READ_DEFAULT))


def _shapes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: str) -> Verdict | None:
    name = _base(func)
    if name in ("index", "index_put_", "_index_put_impl_", "index_put"):
        dynamic = _has_mask(args[1]) and not (name != "index" and _fills(args, kwargs))
    elif name == "repeat_interleave":
        dynamic = kwargs.get("output_size") is None
    elif name == "nonzero_static":
        dynamic = False
    else:
        dynamic = torch.Tag.dynamic_output_shape in func.tags or name in _UNTAGGED_SHAPES
    if not dynamic:
        return None
    name = _ALIASES.get(name, name)
    fix = _FIX_SHAPE.get(call if call in _FIX_SHAPE else name, _SHAPE_DEFAULT)
    return Verdict("data_dependent_shape", _SHAPE, fix)


def _masks(indices: Sequence[Tensor | None]) -> list[Tensor]:
    return [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return bool(_masks(indices))


def _fills(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``x[mask] = one value``, which torch turns into masked_fill, without a read."""
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    only_mask = len([i for i in indices if i is not None]) == len(_masks(indices)) == 1
    return only_mask and values.numel() == 1 and not accumulate and values.device == target.device


def _copies(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    name = _base(func)
    if name == "_to_copy":
        source, to = args[0], torch.device(kwargs.get("device") or args[0].device)
        non_blocking = bool(kwargs.get("non_blocking", False))
        pinned_end = True  # to(..., non_blocking=True) makes a pinned result
    elif name == "copy_":
        source, to = args[1], args[0].device
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        pinned_end = to.type == "cpu" and args[0].is_pinned()
    else:
        return None
    return transfer(source.device.type, to.type, non_blocking, _pinned(source), pinned_end)


def _pinned(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.is_pinned()


def transfer(
    source: str, to: str, non_blocking: bool, pinned_source: bool, pinned_end: bool
) -> Verdict | None:
    """Judge a copy between device types; ``pinned_end`` says whether a destination on the host is pinned."""
    if source == to or "cpu" not in (source, to):
        return None
    if source == "cpu":
        return None if pinned_source and non_blocking else HOST_TO_DEVICE
    return EARLY_HOST_COPY if non_blocking and pinned_end else DEVICE_TO_HOST


def _operands(func: Any, tensors: Sequence[Tensor]) -> Verdict | None:
    on_host = [t for t in tensors if t.device.type == "cpu"]
    if not on_host or len(on_host) == len(tensors):
        return None
    # the backward of fused attention takes seed and offset of its dropout as host tensors outside of a capture
    if _base(func) in ("_to_copy", "copy_") or "attention" in _base(func):
        return None
    return CPU_SCALAR if all(t.dim() == 0 for t in on_host) else CPU_OPERAND


def _collectives(func: Any) -> Verdict | None:
    refused = refused_collective(func)
    return None if refused is None else Verdict("synchronize", *refused)


def has_own_generator(leaves: Iterable[Any]) -> bool:
    """Whether a random generator is among arguments that is none of torch's default ones."""
    return any(isinstance(x, torch.Generator) and not _is_default(x) for x in leaves)


def _generators(leaves: Sequence[Any]) -> Verdict | None:
    return GENERATOR if has_own_generator(leaves) else None


def _is_default(generator: torch.Generator) -> bool:
    # the dispatcher hands over another Python object for the same generator
    defaults: tuple[Any, ...] = (torch.default_generator, *torch.cuda.default_generators)
    address = getattr(generator, "_cdata")  # noqa: B009 - the stubs of torch do not have it
    return any(address == g._cdata for g in defaults)


def classify_call(name: str, args: Sequence[Any], result: Any, target: str = "cuda") -> Verdict | None:
    """Judge one call of torch's Python interface that the dispatcher does not see, or sees as something else.

    Args:
        name: ``__name__`` of the function, such as ``tolist``.
        args: its positional arguments.
        result: what it returned.
        target: device type the graph is for.
    """
    if name == "__repr__" and args[0].device.type == "meta":
        return None
    if name in ("tolist", "numpy", "__array__", "__repr__"):
        on_host = target != "cpu" and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
        return CPU_VALUE if on_host else read(name)
    if name == "cpu":
        return DEVICE_TO_HOST if target in ("cpu", args[0].device.type) else None
    if name in ("tensor", "as_tensor", "new_tensor", "asarray"):
        data = args[1] if name == "new_tensor" and len(args) > 1 else next(iter(args), None)
        if isinstance(data, Tensor) or not isinstance(result, Tensor) or not result.numel():
            return None  # from a tensor, or nothing to copy
        return HOST_CONSTANT if result.device.type == target else None
    if name in ("__getitem__", "__setitem__") and isinstance(args[0], Tensor):
        return HOST_CONSTANT if args[0].device.type == target and _indexes_by_data(args[1]) else None
    return None


def _indexes_by_data(index: Any) -> bool:
    """Whether an index holds a list or an array, which becomes a tensor at each call."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, (list, np.ndarray, range)) for p in parts)
