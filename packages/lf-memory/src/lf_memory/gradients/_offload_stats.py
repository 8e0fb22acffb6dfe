"""What one `offload` block reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot of one `offload` block.

    Attributes:
        stored: storages copied to the pool.
        stored_bytes: bytes of them.
        shared: saved tensors that were found in a storage copied already.
        fetched: copies back to the device.
        fetched_bytes: bytes of them.
        ahead: those of them that were begun before they were needed.
        kept: saved tensors that stayed on the device, by reason: "small" (under min_bytes), "parameter" (a
            parameter, a view of one, or of `keep`), "part" (a small part of a storage, which would stay), "kind"
            (sparse, sharded or otherwise no plain tensor), "pool" (no room).
        kept_bytes: bytes of them by reason; views of one storage count each.
        version: of this record.
    """

    stored: int = 0
    stored_bytes: int = 0
    shared: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    ahead: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    kept_bytes: dict[str, int] = field(default_factory=dict)
    version: int = 1

    def to_json(self) -> str:
        """The record as one JSON object."""
        return json.dumps(asdict(self))
