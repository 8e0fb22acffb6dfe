"""Which step a load takes, alone or on all ranks of a group: the one asked for, or the newest that verifies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from .catalog import Catalog
from .errors import CorruptError, HalfLoadedError, NoCheckpointError, RankFailedError
from .files import gone
from .loading import Wanted, describe, folder_of, is_damage, load_step
from .local import is_sharded
from .manifest import parse_folder
from .peers import Peers
from .reader import StepReader
from .report import Loaded
from .voting import agree, together

_log = logging.getLogger("lf_ckpt")
_READERS = (
    4  # reads in flight, and as many threads that hash, copy and decode; on few cores, too: they often wait
)
_SCANS = 3  # a writer may retire every step that was listed before a reader opens it


class StepLoader:
    """Loads from one store. Nothing may be saved by the same process meanwhile."""

    def __init__(
        self,
        path: str,
        catalog: Catalog,
        peers: Peers | None,
        damaged: set[str],
        offer: Callable[[StepReader], None],
    ) -> None:
        """path: for messages. damaged: gets the folders that cannot be read. offer: called with a step of which every
        byte that this rank has saved was verified."""
        self._path, self._catalog, self._peers = path, catalog, peers
        self._damaged, self._offer = damaged, offer

    def steps(self) -> tuple[int, ...]:
        """Committed steps, ascending."""
        return tuple(sorted({manifest.step for manifest in self._catalog.summaries()}))

    def newest_attempt(self, step: int, folders: Sequence[str] | None = None) -> str:
        """Folder of a step; NoCheckpointError when it is not committed."""
        known = self._catalog.folders() if folders is None else folders
        attempts = [name for name in known if _step_of(name) == step]
        if not attempts:
            raise NoCheckpointError(self._path, (), f"step {step}; committed steps: {list(self.steps())}")
        return attempts[-1]

    def open(self, step: int) -> StepReader:
        """A committed step."""
        return StepReader(self._catalog.files, self._catalog.steps, self.newest_attempt(step))

    def load(self, step: int | Literal["latest"], options: Callable[[], Wanted]) -> Loaded:
        """See `Store.load`. options: what to load, or the error of an argument, which reaches all ranks of a group."""
        try:
            if step != "latest" and (isinstance(step, bool) or not isinstance(step, int)):
                raise ValueError(f'step {step!r}: a whole number, or "latest"')
            wanted = options()
        except BaseException as error:
            self._folders(step, error)
            raise
        folders = self._folders(step)
        return self._newest(folders, wanted) if step == "latest" else self._exact(step, folders, wanted)

    def _folders(self, step: int | str, problem: BaseException | None = None) -> list[str]:
        """Committed folders, as rank 0 sees them. problem: why this rank cannot load; in a group, then nobody does."""
        if self._peers is None:
            return self._catalog.folders() if problem is None else []
        return list(agree(self._peers, f"load of step {step}", problem, self._catalog.folders))

    def _newest(self, folders: Sequence[str], wanted: Wanted) -> Loaded:
        fallbacks: dict[str, tuple[int, str]] = {}
        for scan in range(_SCANS):
            vanished = False
            for folder in reversed(self._catalog.folders() if scan else folders):
                try:
                    loaded = self._everywhere(folder, wanted)
                except (CorruptError, OSError, HalfLoadedError, RankFailedError) as error:
                    if isinstance(error, HalfLoadedError | RankFailedError) and not error.damage:
                        raise
                    if self._peers is None and self._retired(folder, error):
                        vanished = True
                        continue
                    if not is_damage(error):
                        raise
                    fallbacks[folder] = (_step_of(folder), describe(error))
                    self._note_damage(folder, error)
                else:
                    report = replace(loaded.report, fallbacks=tuple(fallbacks.values()))
                    return replace(loaded, report=report)
            if not vanished:
                break
        raise NoCheckpointError(self._path, list(fallbacks.values()))

    def _exact(self, step: int, folders: Sequence[str], wanted: Wanted) -> Loaded:
        folder = self.newest_attempt(step, folders)
        try:
            return self._everywhere(folder, wanted)
        except (CorruptError, OSError) as error:
            if self._peers is None and self._retired(folder, error):
                what = f"step {step}: a writer removed it while it was read"
                raise NoCheckpointError(self._path, (), what) from error
            raise

    def _retired(self, folder: str, error: Exception) -> bool:
        """Whether a step failed to load because a writer has removed it meanwhile, which is no damage."""
        return gone(error) or folder not in self._catalog.folders()

    def _everywhere(self, folder: str, wanted: Wanted) -> Loaded:
        """Load on every rank or on none."""
        if self._peers is None:
            return self._load(folder, wanted)
        step = _step_of(folder)
        what = f"step {step} was not loaded on any rank"
        done = f"step {step} was not loaded on all ranks (here it was, so that `into` holds it)"
        return together(self._peers, what, lambda ready: self._load(folder, wanted, ready), done)

    def _load(self, folder: str, wanted: Wanted, ready: Callable[[], None] = lambda: None) -> Loaded:
        with StepReader(self._catalog.files, self._catalog.steps, folder) as reader:
            loaded = load_step(reader, wanted, _READERS, ready)
            report = loaded.report
            partly = any(map(is_sharded, (wanted.into or {}).values()))
            complete = not (report.unexpected or report.mismatched or report.left_out or partly)
            own = wanted.rank == (0 if self._peers is None else self._peers.rank)
            if wanted.verify and complete and own:
                self._offer(reader)
            return loaded

    def _note_damage(self, folder: str, error: Exception) -> None:
        """Damaged steps do not count for retention and serve as no base."""
        _log.warning(
            "%s: step %s cannot be used, trying an older one: %s", self._path, folder, describe(error)
        )
        bad = error.__cause__ if isinstance(error, HalfLoadedError) else error
        self._damaged |= {folder, folder_of(bad)} - {""}


def _step_of(folder: str) -> int:
    step, _ = parse_folder(folder) or (-1, 0)
    return step
