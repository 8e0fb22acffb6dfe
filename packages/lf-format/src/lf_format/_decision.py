"""What was measured before something was kept in a file or left out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One candidate, measured on blocks that it was not made from.

    Attributes:
        bucket: bucket edge in tokens; None for the rank table, which serves all buckets.
        kind: "dictionary", "rank table", or "codec NAME", the one that was taken.
        nbytes: bytes of the dictionary or table in the file; 0 for a codec.
        without: bytes that all blocks concerned would take without it (for a codec: raw).
        saved: bytes it saves there, its own size taken off; negative when it costs.
        kept: saved is at least 2 % of without; always true of the codec that was taken.
        reason: in words.
    """

    bucket: int | None
    kind: str
    nbytes: int
    without: int
    saved: int
    kept: bool
    reason: str

    def __str__(self) -> str:
        where = "all buckets" if self.bucket is None else f"bucket {self.bucket}"
        size = f" of {self.nbytes} bytes" if self.nbytes else ""
        return f"{where}: {self.kind}{size} {'kept' if self.kept else 'not kept'}: {self.reason}"
