"""What a captured object did and holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class GraphStats:
    """Counts since construction; bytes are of device memory and 0 on the recorder.

    Attributes:
        name: of the captured object.
        backend: ``cuda`` or ``recorder``.
        graphs: graphs held now.
        operations: kernels and copies in one forward and backward replay; -1 when not known.
        captures: captures made, including those whose graphs are closed again.
        replays: graph launches.
        eager: calls that ran without a graph, because that was asked for.
        copies: input tensors copied to their static places.
        bytes: graph memory taken.
        predicted_bytes: what the warm-up of the last capture said it would need.
        reason: why calls run without a graph; "" when they do not.
    """

    name: str
    backend: str
    graphs: int = 0
    operations: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    copies: int = 0
    bytes: int = 0
    predicted_bytes: int = 0
    reason: str = ""

    def to_json(self) -> str:
        """One JSON object with a format version."""
        return json.dumps({"version": 1, **dataclasses.asdict(self)})
