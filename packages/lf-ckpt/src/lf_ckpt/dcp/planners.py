"""DCP's default planners, with values that are no tensors as typed JSON where torch would pickle them."""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from ..jsonio import Json, canonical, decode_item, encode_item, parse_canonical


class LfSavePlanner(DefaultSavePlanner):
    """Writes numbers, text, bytes, lists and mappings as JSON. UnsupportedError names a value that is none of these."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Tensors as they are; other values as a BytesIO of canonical JSON."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(to_json(object, write_item.index.fqn))


class LfLoadPlanner(DefaultLoadPlanner):
    """Reads what `LfSavePlanner` has written. A list comes back as a tuple where the state dict holds a tuple there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict."""
        name = read_item.dest_index.fqn
        found = _like(self.state_dict.get(name), from_json(value.getvalue()))
        self.state_dict[name] = found
        # state_dict is a copy of what the caller gave, also where nothing is flattened.
        path = self.mappings[name] if self.flatten_state_dict else (name,)
        set_element(self.original_state_dict, path, found)

    def load_pickle(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict that a stock planner has pickled; only for trusted files."""
        super().load_bytes(read_item, value)


def _like(live: Any, found: Json) -> Json:
    """`found` with tuples for lists where the live value has tuples."""
    if isinstance(live, dict) and isinstance(found, dict):
        return {key: _like(live.get(key), value) for key, value in found.items()}
    if not (isinstance(live, list | tuple) and isinstance(found, list)):
        return found
    values = [_like(live[i] if i < len(live) else None, value) for i, value in enumerate(found)]
    return tuple(values) if isinstance(live, tuple) else values


def to_json(value: Json, name: str) -> bytes:
    """Canonical JSON of a value; UnsupportedError names what cannot be written."""
    return canonical(encode_item(value, name))


def from_json(data: bytes) -> Json:
    """Inverse of `to_json`; ValueError for other bytes."""
    return decode_item(parse_canonical(data))
