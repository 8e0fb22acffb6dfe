"""How a store behaves, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .retention import Rule
from .storage import Mode

OnError: TypeAlias = Literal["raise", "warn"]
Io: TypeAlias = Literal["auto", "buffered"]
Compress: TypeAlias = Literal["auto", "raw", "zstd"]


@dataclass(frozen=True)
class Options:
    """See `lf_ckpt.open` for the meaning of each; ValueError names the first one that is out of range."""

    keep: tuple[Rule, ...] = ()
    on_error: OnError = "raise"
    full_every: int = 8
    slab_bytes: int | None = None
    compress: Compress = "auto"
    io: Io = "auto"
    threads: int = 1
    read_only: bool = False
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("on_error", self.on_error, get_args(OnError)),
            ("compress", self.compress, get_args(Compress)),
            ("io", self.io, get_args(Io)),
            ("mode", self.mode, get_args(Mode)),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r}: choose {' or '.join(choices)}")
        if self.full_every < 0:
            raise ValueError(f"full_every={self.full_every}: 0 for full steps only, or more")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}: at least 1")
