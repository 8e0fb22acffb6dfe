"""What a second store shall hold: options and pure decisions of the copy (mirror.py has the effects)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .retention import Candidate, Rule, doomed
from .storage import Mode, Storage


@dataclass(frozen=True)
class Upload:
    """Where durable steps are copied to.

    url: a path or URL. keep: retention rules of the copy, its own. hold: local retention waits for the upload of a
    step. attempts: tries of a step before its error is reported. pause: seconds before the second try, doubled each
    time. timeout: seconds that closing waits for uploads; None waits until they are done or have failed. mode, files:
    of the copy, as for `lf_ckpt.open`.
    """

    url: str | os.PathLike[str]
    keep: tuple[Rule, ...] = ()
    hold: bool = True
    attempts: int = 5
    pause: float = 1.0
    timeout: float | None = None
    mode: Mode = "auto"
    files: Storage | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.attempts < 1 or self.pause < 0 or (self.timeout is not None and self.timeout < 0):
            raise ValueError(f"{self}: at least one attempt, and no negative seconds")


def to_upload(local: Sequence[Candidate], remote: Sequence[Candidate], rules: Sequence[Rule]) -> list[str]:
    """Folders to copy, oldest first but a base before its deltas. Pure.

    Not those that the rules of the copy would remove again at once.
    """
    there = {c.folder for c in remote}
    new = [c for c in local if c.folder not in there]
    unwanted = set(doomed([*remote, *new], rules))
    wanted = {c.folder: c for c in sorted(new, key=lambda c: (c.step, c.attempt)) if c.folder not in unwanted}
    order: dict[str, None] = {}
    for candidate in wanted.values():
        line = [candidate]
        while (parent := line[-1].parent) in wanted and parent not in order:
            line.append(wanted[parent])
        order |= dict.fromkeys(c.folder for c in reversed(line))
    return list(order)


def needed_bases(local: Sequence[Candidate]) -> set[str]:
    """Folders that deltas to come may refer to: the bases in use and the newest step without one. Pure."""
    full = [c.folder for c in sorted(local, key=lambda c: (c.step, c.attempt)) if c.parent is None]
    return {c.parent for c in local if c.parent is not None} | set(full[-1:])
