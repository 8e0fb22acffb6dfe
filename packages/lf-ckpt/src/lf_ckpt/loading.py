"""From an open step to tensors: fresh ones, or in place into given ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .boxes import whole
from .dtypes import dtype_of
from .errors import CorruptError, HalfLoadedError, RankFailedError, UnsupportedError
from .fetch import ReadIo, empty
from .files import exhausted
from .filling import Filler
from .format import SAME
from .local import Window, batches, is_sharded, require_memory, window_of
from .manifest import Manifest, TensorEntry, data_file_name
from .naming import Fitting, Kind, MapNames, Match, match, rename, select
from .ranked import seen_by
from .reader import StepReader, new_scratch
from .report import Loaded, LoadReport
from .writer import Base


@dataclass(frozen=True)
class Wanted:
    """What to load and how; see `Store.load`."""

    into: Mapping[str, torch.Tensor] | None = None
    only: str | Sequence[str] | None = None
    map_names: MapNames | None = None
    reshape: bool = False
    cast: bool = False
    device: torch.device | None = None
    strict: bool = True
    verify: bool = True
    rank: int = 0  # whose values that are kept per rank
    io: ReadIo = "auto"
    precheck: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(
                f"rank={self.rank!r}: the number of the rank whose own values to take, 0 or more"
            )
        if self.into is not None and not isinstance(self.into, Mapping):
            raise ValueError(
                f"into: {type(self.into).__name__} is no mapping; lf_ckpt.restore fills a module"
            )
        if not (self.precheck or self.strict):
            raise ValueError(
                "precheck=False needs strict=True: a fallback must overwrite all that was filled"
            )

    @classmethod
    def of(cls, device: str | torch.device | None, **options: object) -> Wanted:
        """With `device` tried out: UnsupportedError when it cannot be used, ValueError with `into`."""
        if device is None:
            return cls(**options)  # type: ignore[arg-type]
        if options.get("into") is not None:
            raise ValueError("device= is for fresh tensors; those of `into` stay where they are")
        try:
            place = torch.empty(0, device=device).device
        except Exception as error:  # torch raises several kinds for a device that is not there
            raise UnsupportedError(f"device {device}: {error}") from error
        if place.type == "meta":
            raise UnsupportedError("device meta: keeps no values, so nothing can be loaded there")
        return cls(device=place, **options)  # type: ignore[arg-type]


def entries_by_name(manifest: Manifest) -> dict[str, TensorEntry]:
    """Every tensor name, tied ones included."""
    entries = {entry.name: entry for entry in manifest.tensors}
    return entries | {alias: entries[name] for alias, name in manifest.aliases.items()}


def load_step(
    reader: StepReader, wanted: Wanted, threads: int, ready: Callable[[], None] = lambda: None
) -> Loaded:
    """Read one step. With `into` and `precheck`, nothing is written before everything needed has passed its hashes.

    ready: called once, before the first byte of `into` changes; what it raises ends the load.
    Raises CorruptError, HalfLoadedError, MismatchError, CkptError (names that collide) and UnsupportedError (a dtype
    that this torch lacks).
    """
    began = time.perf_counter()
    manifest = seen_by(reader.manifest, wanted.rank)
    entries = entries_by_name(manifest)
    names = rename(entries, wanted.map_names)
    chosen = select(entries, wanted.only)
    plan = _fresh_plan if wanted.into is None else _plan_into
    found = plan(entries, names, chosen, wanted)
    if wanted.strict:
        found.require()
    with Filler(reader, threads, wanted.verify, wanted.io) as filler:
        if wanted.into is None:
            with filler.together():
                tensors = _load_fresh(filler, entries, found, wanted.device)
        else:
            targets = [_target(name, wanted.into[name], entries[old]) for name, old in found.source.items()]
            if wanted.verify and wanted.precheck:
                _check(filler, targets)
        blobs = {entry.name: filler.blob(entry) for entry in manifest.blobs}
        ready()
        if wanted.into is not None:
            _fill(filler, targets, manifest.folder, wanted)
            tensors = {name: wanted.into[name] for name in found.source}
    report = LoadReport(
        folder=manifest.folder,
        kind=reader.kind,
        bytes_read=filler.bytes_read,
        seconds=time.perf_counter() - began,
        verified=wanted.verify,
        missing=found.missing,
        unexpected=found.unexpected,
        mismatched=found.mismatched,
        taken=tuple(found.source),
        renamed=found.renamed,
        reshaped=found.reshaped,
        cast=found.cast,
        left_out=len(entries) - len(chosen),
        devices=filler.devices,
        io=filler.io,
    )
    return Loaded(manifest.step, tensors, {**manifest.items, **blobs}, report)


Entries = Mapping[str, TensorEntry]


def _fresh_plan(entries: Entries, names: Mapping[str, str], chosen: Sequence[str], wanted: Wanted) -> Match:
    """Everything chosen, by its present name."""
    source = {names[old]: old for old in chosen}
    return Match(source, renamed=tuple((old, new) for new, old in source.items() if old != new))


def _plan_into(entries: Entries, names: Mapping[str, str], chosen: Sequence[str], wanted: Wanted) -> Match:
    """Tensors of `into` whose saved ones were not chosen are left alone: they are not missing."""
    into, kept = wanted.into or {}, set(chosen)
    left_alone = {new for old, new in names.items() if old not in kept}
    live = {name: _kind(name, tensor) for name, tensor in into.items() if name not in left_alone}
    saved = {name: Kind(dtype_of(entries[name].dtype), entries[name].shape) for name in chosen}
    how = Fitting(wanted.reshape, wanted.cast)
    found = match(saved, live, {old: names[old] for old in chosen}, how)
    sharded = [name for name in found.source if is_sharded(into[name])]
    reshaped = {text.rpartition(": ")[0] for text in found.reshaped}
    if bad := [name for name in sharded if name in reshaped]:
        raise UnsupportedError(f"{bad[0]}: a DTensor cannot be loaded with another shape; load it whole")
    return found


def _load_fresh(
    filler: Filler, entries: Entries, found: Match, device: torch.device | None
) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}  # by stored name: tied names give one tensor
    for old in found.source.values():
        entry = entries[old]
        if entry.name not in made:
            dtype = dtype_of(entry.dtype)
            on_host = device is None or device.type == "cpu"
            tensor = (
                empty(entry.shape, dtype) if on_host else torch.empty(entry.shape, dtype=dtype, device=device)
            )
            filler.fill_window(entry, Window(tensor, whole(entry.shape)))
            made[entry.name] = tensor
    return {new: made[entries[old].name] for new, old in found.source.items()}


class _Target(NamedTuple):
    """Where a saved tensor goes: its name in `into`, the local elements there, the window to fill, and what to do when
    that is full (None: nothing)."""

    name: str
    place: torch.Tensor
    entry: TensorEntry
    window: Window
    settle: Callable[[], object] | None


def _target(name: str, tensor: torch.Tensor, entry: TensorEntry) -> _Target:
    """A tensor of another shape is filled through a view of the saved shape, or a copy where it has no such view."""
    if tuple(tensor.shape) == entry.shape:
        window = window_of(name, tensor)
        require_memory(name, window.local)
        return _Target(name, window.local, entry, window, None)
    require_memory(name, tensor)
    live, full = tensor.detach(), whole(entry.shape)
    try:
        return _Target(name, live, entry, Window(live.view(entry.shape), full), None)
    except RuntimeError:
        copy = torch.empty(entry.shape, dtype=live.dtype, device="cpu")
        return _Target(name, live, entry, Window(copy, full), lambda: live.copy_(copy.view(live.shape)))


def _check(filler: Filler, targets: Sequence[_Target]) -> None:
    """Hash what is needed."""
    with filler.together():
        for (_, box), entry in {(t.entry.name, t.window.box): t.entry for t in targets}.items():
            filler.check_window(entry, box)


def _fill(filler: Filler, targets: Sequence[_Target], folder: str, wanted: Wanted) -> None:
    """Fill all targets. HalfLoadedError where the caller was promised that a bad step leaves them alone."""
    touched: list[str] = []
    try:
        for batch in batches([target.place for target in targets]):
            _fill_batch(filler, [targets[number] for number in batch], touched)
    except (CorruptError, OSError) as error:
        if not (wanted.precheck and touched):
            raise
        # An older step need not have all that this one has touched, unless names must agree.
        raise HalfLoadedError(folder, touched, error, wanted.strict and is_damage(error)) from error


def _fill_batch(filler: Filler, targets: Sequence[_Target], touched: list[str]) -> None:
    """Fill targets that share no memory, at the same time; `touched` gets the names of those that change."""
    with filler.together():
        for target in targets:
            touched += [target.name] if target.settle is None else []
            filler.fill_window(target.entry, target.window)
    for target in targets:
        if target.settle is not None:
            touched.append(target.name)
            target.settle()


def _kind(name: str, tensor: object) -> Kind:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name}: {type(tensor).__name__} is not a tensor, and cannot be filled")
    return Kind(tensor.dtype, tuple(tensor.shape))


def verify_step(reader: StepReader) -> int:
    """Decode and hash every byte of a step and check its padding; returns raw bytes checked. CorruptError if bad."""
    scratch, out = new_scratch(), new_scratch()
    total = 0
    for stream in reader.manifest.streams():
        for file, number, extent in reader.extents_of(stream.placed):
            reader.read(file, number, out[: extent.raw_bytes], scratch, stream.name, verify=True)
            total += extent.raw_bytes
    reader.check_unused()
    return total


def is_damage(error: BaseException | None) -> bool:
    """Whether an older step may be tried: the files of this one are bad or lost, and no caller's tensors with them."""
    if isinstance(error, HalfLoadedError | RankFailedError):
        return error.damage
    # Want of descriptors or memory says nothing about the files: no reason to go back to an older step.
    return isinstance(error, CorruptError | OSError) and not exhausted(error)


def folder_of(error: BaseException | None) -> str:
    """Step folder of the file that an error names, a base perhaps; "" when it names none."""
    return os.path.basename(os.path.dirname(error.path)) if isinstance(error, CorruptError) else ""


def describe(error: BaseException) -> str:
    """Reason of a fallback in one line."""
    return str(error) if isinstance(error, CorruptError) else f"{type(error).__name__}: {error}"


def verified_base(reader: StepReader, store_id: str, rank: int = 0) -> Base | None:
    """What of a step that was read and verified in full can serve as base of a rank: the extents of the file of its
    name, or those that file refers to. None when there is no such file, or the step is of another store.
    """
    manifest = reader.manifest
    name = data_file_name(rank)
    at = next((i for i, file in enumerate(manifest.files) if file.name == name), None)
    if manifest.store != store_id or at is None:
        return None
    extents = reader.data[at].extents
    if manifest.parent is None:
        return Base(manifest.folder, manifest.root, {e.raw_hash: number for number, e in enumerate(extents)})
    return Base(
        manifest.parent.folder,
        manifest.parent.root,
        {e.raw_hash: e.place for e in extents if e.codec == SAME},
    )
