"""How a store behaves, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from .retention import Rule
from .sizing import MIN_SLAB
from .storage import Mode
from .upload import Upload

OnError: TypeAlias = Literal["raise", "warn"]
Io: TypeAlias = Literal["auto", "direct", "buffered"]
Engine: TypeAlias = Literal["auto", "io_uring", "threads"]
Priority: TypeAlias = Literal["low", "normal"]
Compress: TypeAlias = Literal["auto", "raw", "zstd"]
ParentMode: TypeAlias = Literal["auto", "ram", "disk", "off"]
GROUP_TIMEOUT: Final = 1800.0
"""Seconds until a silent rank of a group counts as lost: torch's own for Gloo."""


@dataclass(frozen=True)
class Options:
    """See `lf_ckpt.open` for the meaning of each; ValueError names the first one that is out of range."""

    keep: tuple[Rule, ...] = ()
    on_error: OnError = "raise"
    full_every: int = 8
    slab_bytes: int | None = None
    compress: Compress = "auto"
    parent: ParentMode = "auto"
    parent_bytes: int | None = None
    io: Io = "auto"
    threads: int = 1
    read_only: bool = False
    mode: Mode = "auto"
    engine: Engine = "auto"
    writers: int = 4
    priority: Priority = "low"
    rate_limit: int | None = None
    expected_bytes: int | None = None
    upload: Upload | None = None
    group_timeout: float = GROUP_TIMEOUT
    chain: bool = False  # each delta on the step before it (Publisher), not on the last full one

    @property
    def deltas(self) -> bool:
        """Whether changed extents may be coded against the base."""
        return self.compress == "auto" and self.parent != "off" and self.full_every > 0

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("on_error", self.on_error, get_args(OnError)),
            ("compress", self.compress, get_args(Compress)),
            ("parent", self.parent, get_args(ParentMode)),
            ("io", self.io, get_args(Io)),
            ("mode", self.mode, get_args(Mode)),
            ("engine", self.engine, get_args(Engine)),
            ("priority", self.priority, get_args(Priority)),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r}: choose {' or '.join(choices)}")
        for rule in self.keep:
            if isinstance(rule, type) or not callable(getattr(rule, "wanted", None)):
                raise ValueError(f"keep: {rule!r} is no rule; give a list, as [lf_ckpt.Last(3)]")
        if self.read_only and self.upload is not None:
            raise ValueError("upload= is for the writer; leave it out with read_only=True")
        if self.full_every < 0:
            raise ValueError(f"full_every={self.full_every}: 0 for full steps only, or more")
        for name, count in (("threads", self.threads), ("writers", self.writers)):
            if count < 1:
                raise ValueError(f"{name}={count}: at least 1")
        if self.slab_bytes is not None and self.slab_bytes < MIN_SLAB:
            raise ValueError(f"slab_bytes={self.slab_bytes}: at least {MIN_SLAB} bytes (4 MiB), or None")
        if self.rate_limit is not None and self.rate_limit < 1:
            raise ValueError(f"rate_limit={self.rate_limit}: bytes per second, at least 1, or None")
        if self.expected_bytes is not None and self.expected_bytes < 0:
            raise ValueError(f"expected_bytes={self.expected_bytes}: the size of the state, or None")
        if not has_patience(self.group_timeout):
            raise ValueError(f"group_timeout={self.group_timeout!r}: seconds, above 0 and at most 10**9")
        if self.parent_bytes is not None and self.parent_bytes < 0:
            raise ValueError(f"parent_bytes={self.parent_bytes}: 0 keeps nothing in memory, or more")
        if self.parent == "ram" and self.compress != "auto":
            raise ValueError(
                f'parent="ram" keeps bytes for deltas, which compress={self.compress!r} never writes'
            )


def has_patience(timeout: object) -> bool:
    """Whether this is a number of seconds to wait; datetime.timedelta takes no infinite ones."""
    return isinstance(timeout, int | float) and 0 < timeout <= 10**9
