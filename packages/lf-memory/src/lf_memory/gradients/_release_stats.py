"""What a released optimizer reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ReleaseStats:
    """A snapshot of a released optimizer, on this rank; buffers in which gradients are reduced are not counted.

    Attributes:
        mode: "fused", "local_clip", "exact" or "two_pass".
        parameters: those whose gradients are released.
        steps: steps taken.
        in_backward: parameters that the last step updated within the backward.
        at_step: parameters that it updated at its end.
        planned_bytes: most bytes of complete gradients that the mode should keep at one time.
        peak_bytes: most bytes of complete gradients seen at one time.
        live_bytes: bytes of them that are alive now.
        version: of this record.
    """

    mode: str
    parameters: int
    steps: int
    in_backward: int
    at_step: int
    planned_bytes: int
    peak_bytes: int
    live_bytes: int
    version: int = 1

    def to_json(self) -> str:
        """The record as one JSON object."""
        return json.dumps(asdict(self))
