"""Everything this package raises on purpose derives from `CkptError` and carries its data as attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CkptError(Exception):
    """Base of all errors of lf-ckpt; the message says what to do."""

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes (multiprocessing, torch.distributed.checkpoint) with message and attributes."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[CkptError], args: tuple[object, ...], state: dict[str, object]) -> CkptError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UnsupportedError(CkptError):
    """A tensor or item that this version cannot store or create (sparse, meta, quantised, not JSON ...)."""


class CorruptError(CkptError):
    """Bytes on disk are not those that were written.

    Attributes:
        path: file that holds the bad bytes.
        reason: what is wrong, in words.
        tensor: name of the tensor or item hit, when it is known.
        extent: number of the extent in its file, when it is known.
        offset: byte offset in the file, when it is known.
        expected, found: the two values that differ, printable.
    """

    def __init__(
        self,
        path: str,
        reason: str,
        *,
        tensor: str | None = None,
        extent: int | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.path, self.reason, self.tensor = path, reason, tensor
        self.extent, self.offset, self.expected, self.found = extent, offset, expected, found
        known = [
            ("tensor", tensor),
            ("extent", extent),
            ("offset", offset),
            ("expected", expected),
            ("found", found),
        ]
        detail = ", ".join(f"{key} {value}" for key, value in known if value is not None)
        super().__init__(f"{path}: {reason}" + (f" ({detail})" if detail else ""))


class HalfLoadedError(CkptError):
    """Reading failed although all had verified before, so tensors of `into` hold a mixture: load a step over them.

    Attributes: `folder` of the step; `touched`, names of `into` that may have changed; `damage`, whether an older step
    overwrites all of them and may be tried. The error of the read is its `__cause__`.
    """

    def __init__(self, folder: str, touched: Sequence[str], cause: Exception, damage: bool) -> None:
        self.folder, self.touched, self.damage = folder, tuple(touched), damage
        names = f"{', '.join(self.touched[:8])}{' ...' if len(self.touched) > 8 else ''}"
        super().__init__(
            f"step {folder}: a read failed while tensors were being filled, so that {len(self.touched)} of them may "
            f"hold a mixture ({names}): {type(cause).__name__}: {cause}"
        )


class DiskFullError(CkptError):
    """The store's file system (or a quota or file-size limit) is full.

    Attributes: `path`; `needed`, bytes of the save at most; `free`, bytes free once its own are gone.
    """

    def __init__(self, path: str, needed: int, free: int) -> None:
        self.path, self.needed, self.free = path, needed, free
        super().__init__(
            f"{path}: no space for the checkpoint: up to {needed} bytes to write, {free} free; "
            "earlier steps are intact, free space or lower `keep`, then save again"
        )


class LockedError(CkptError):
    """Another writer holds the store. Attributes: `path` of the lock file and `owner`, its record."""

    def __init__(self, path: str, owner: str, advice: str) -> None:
        self.path, self.owner = path, owner
        super().__init__(f"{path}: the store has a writer already: {owner}; {advice}")


class UploadError(CkptError):
    """Steps are durable here and not at the place they are copied to. Attributes: `url`, `steps`, `reason`."""

    def __init__(self, url: str, steps: Sequence[int], reason: str) -> None:
        self.url, self.steps, self.reason = url, tuple(steps), reason
        waiting = ", ".join(map(str, self.steps)) or "none"
        super().__init__(f"{url}: {reason} (steps not uploaded: {waiting})")


class RankFailedError(CkptError):
    """Another rank of a group store could not do its part, so no rank has done it.

    Attributes: `reasons`, {rank: text}; `damage`, whether all of them are damaged or unreadable files.
    """

    def __init__(self, what: str, reasons: Mapping[int, str], damage: bool = False) -> None:
        self.reasons, self.damage = dict(reasons), damage
        detail = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.reasons.items()))
        super().__init__(f"{what}: {detail}")


class PeerLostError(CkptError):
    """A rank of a group store does not answer; this store can save no more. `rank`: the one that is lost.

    The step in flight was not committed (a rank that was told so already may have seen it durable); earlier ones are
    intact and what was half written is removed when the store is next opened. Restart the ranks.
    """

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        asked = (
            ", which commits the steps; see its own error for a rank that it waits for" if not rank else ""
        )
        super().__init__(
            f"rank {rank} of the checkpoint group does not answer{asked} ({cause}); committed steps are intact, "
            "restart the ranks and load the latest"
        )


class NoCheckpointError(CkptError):
    """No step can be loaded. `fallbacks` lists (step, reason) of each one that was tried."""

    def __init__(self, path: str, fallbacks: Sequence[tuple[int, str]], wanted: str = "") -> None:
        self.path, self.fallbacks = path, tuple(fallbacks)
        tried = "; ".join(f"step {step}: {reason}" for step, reason in self.fallbacks)
        super().__init__(
            f"{path}: no {wanted or 'loadable checkpoint'}" + (f"; tried {tried}" if tried else "")
        )


class MismatchError(CkptError):
    """The checkpoint and the receiving tensors differ; nothing was written into them.

    Attributes: `missing` (wanted, not saved), `unexpected` (saved, not wanted), `mismatched` ("name: saved -> wanted").
    """

    def __init__(self, missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str]) -> None:
        self.missing, self.unexpected, self.mismatched = tuple(missing), tuple(unexpected), tuple(mismatched)
        parts = [
            f"{title}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for title, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
            if names
        ]
        hint = _prefix_hint(self.missing, self.unexpected)
        super().__init__(f"checkpoint does not fit; {'; '.join(parts)} ({hint}strict=False takes what fits)")


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Words for names that differ in what they begin with alone, as of a wrapper's "module."; "" for others."""
    for begins, longer, shorter in (
        ("the saved names", unexpected, missing),
        ("these names", missing, unexpected),
    ):
        known = set(longer)
        for name in longer if shorter else ():
            prefix = name.removesuffix(shorter[0])
            if prefix and prefix != name and all(prefix + other in known for other in shorter):
                return f"{begins} begin with {prefix!r}: use map_names, or lf_ckpt.restore for a module; "
    return ""
