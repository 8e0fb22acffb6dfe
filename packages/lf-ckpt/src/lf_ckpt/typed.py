"""Python state as JSON items and named tensors, types kept: what schedulers, scalers and loaders call their state.

JSON knows neither tuples nor keys that are numbers; `pack` writes them as mappings of one key that begins with "$":

    {"$tuple": [...]}  {"$set": [...]}  {"$map": [[key, value], ...]}  {"$counter": [[key, count], ...]}
    {"$tensor": name}  {"$array": name}  {"$scalar": name}     a tensor, numpy array, numpy scalar stored by that name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import CkptError, UnsupportedError
from .jsonio import Json, canonical, encode_item


class Collected(NamedTuple):
    """Named tensors (the live ones, not copies) and JSON items; unpack it into `store.save(step, *collected)`."""

    tensors: dict[str, Tensor]
    items: dict[str, Json]


class State(Protocol):
    """What `restore` reads: a `Loaded`, a `Collected`, or anything with these two mappings."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def items(self) -> Mapping[str, Json]: ...


class Stateful(Protocol):
    """A scheduler, gradient scaler, data loader: anything whose state is data."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def pack(value: Any, where: str) -> tuple[Json, dict[str, Tensor]]:
    """`value` as JSON data, and its tensors under names that begin with `where` (the live ones, not copies).

    None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, torch tensors and numpy arrays, nested.
    UnsupportedError names the place of anything else; no object is ever pickled.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _pack(value, where, tensors), tensors
    except RecursionError:
        raise UnsupportedError(f"item {where}: nested too deeply, or it contains itself") from None


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `pack`; `tensors` may be those of a `Loaded`. Tensors are copies. CkptError for an unknown form."""
    if isinstance(value, list):
        return [unpack(element, tensors) for element in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: unpack(element, tensors) for key, element in value.items()}
    make = _MAKERS.get(tag)
    if make is None or len(value) != 1:
        raise CkptError(f"item with an unknown form {tag!r}; written by a newer lf-ckpt")
    try:
        if tag in _BY_NAME:
            return make(tensors[value[tag]].detach().cpu())
        return make(unpack(value[tag], tensors))
    except (KeyError, TypeError, ValueError) as error:
        raise CkptError(
            f"item {tag} of {str(value[tag])[:80]!r} cannot be restored: {type(error).__name__} {error}"
        ) from error


def references(value: Json) -> Iterator[str]:
    """Names of the tensors that a packed item stands on."""
    if isinstance(value, list):
        for element in value:
            yield from references(element)
    elif isinstance(value, dict):
        for key, element in value.items():
            if key in _BY_NAME and isinstance(element, str):
                yield element
            else:
                yield from references(element)


def _hashable(value: Any) -> Any:
    """A member of a set or a key: sets in there were frozen."""
    if isinstance(value, set):
        return frozenset(value)
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value


def _scalar(tensor: Tensor) -> Any:
    return tensor.numpy()[()]


# The arguments have been unpacked: pairs are lists, tensors are on the host.
_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$tuple": tuple,
    "$set": lambda members: {_hashable(member) for member in members},
    "$map": lambda pairs: {_hashable(key): element for key, element in pairs},
    "$counter": lambda pairs: Counter({_hashable(key): count for key, count in pairs}),
    "$tensor": torch.clone,
    "$array": lambda tensor: tensor.numpy().copy(),
    "$scalar": _scalar,
}
_BY_NAME: Final = frozenset({"$tensor", "$array", "$scalar"})


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Json:
    match value:
        case Tensor():
            return {"$tensor": _keep(value.detach(), where, tensors)}
        case np.ndarray() if not isinstance(value, np.ma.MaskedArray):
            return {"$array": _keep(_from_numpy(value, where), where, tensors)}
        case np.generic() if not isinstance(value, bool | int | float | str | bytes):
            return {"$scalar": _keep(_from_numpy(np.asarray(value), where), where, tensors)}
        case list():
            return [_pack(element, f"{where}.{i}", tensors) for i, element in enumerate(value)]
        case tuple():
            return {"$tuple": [_pack(element, f"{where}.{i}", tensors) for i, element in enumerate(value)]}
        case set() | frozenset():
            members = [_pack(element, f"{where}.{{}}", tensors) for element in value]
            return {"$set": sorted(members, key=lambda member: canonical(encode_item(member, where)))}
        case Counter():
            return {"$counter": _pairs(value, where, tensors)}
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: _pack(element, f"{where}.{key}", tensors) for key, element in value.items()}
            return {"$map": _pairs(value, where, tensors)}
        case bytearray() | memoryview():
            return bytes(value)
        case None | bool() | int() | float() | str() | bytes():
            return value
    raise UnsupportedError(
        f"item {where}: {type(value).__name__} cannot be stored without pickle; give its state as JSON data, bytes, "
        "tensors or arrays"
    )


def _pairs(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> list[Json]:
    for key in value:
        if not isinstance(key, None | bool | int | float | str | bytes | tuple):
            raise UnsupportedError(
                f"item {where}: key {key!r} is {type(key).__name__}, which cannot be stored"
            )
    return [
        [_pack(key, f"{where}.<key>", tensors), _pack(element, f"{where}.{key}", tensors)]
        for key, element in value.items()
    ]


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    """Name of a tensor; two places may read alike ("a.1" and a list's second), so a taken name gets a number."""
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where}#{number}"
    tensors[name] = tensor
    return name


def _from_numpy(array: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"item {where}: a numpy array of {array.dtype} cannot be stored") from error
