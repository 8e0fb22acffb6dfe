"""The directory of a store: which steps are committed, how one is committed, how one is removed.

store/FORMAT                     {"format": "lfckpt-store", "store": id, "sum": checksum, "version": [1, 0]}
store/LOCK                       owner of the writer
store/HEAD                       folder of the newest step; a hint for people, readers do not trust it
store/steps/<step>/rank-<r>.lfckpt  one per rank that wrote the step
store/steps/<step>/MANIFEST      present = committed
store/steps/<step>.<n>/          the same step saved again
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from .commit import TEMPORARY, choose_commit
from .errors import CkptError, CorruptError
from .files import gone, read_all
from .identity import FORMAT_LIMIT, dump_format, parse_format
from .jsonio import canonical
from .manifest import Manifest, folder_name, is_data_file, parse_folder
from .manifest_text import dump
from .reader import MANIFEST, read_manifest
from .retention import Candidate, Rule, doomed
from .storage import Storage
from .summaries import Summaries

_log = logging.getLogger("lf_ckpt")
PIN = "PIN"
_LOOK_AGAIN = (0, 0.1, 0.5, 2.0)  # seconds; NFS forgets a missing name after its directory cache expires


class Follower(Protocol):
    """Something that copies the steps of a store elsewhere (mirror.py)."""

    def taken(self) -> Collection[str]:
        """Folder names that a new step must not get."""

    def held(self) -> Collection[str]:
        """Folders that retention must leave."""

    def committed(self, folder: str) -> None:
        """Called once a step is durable; returns at once and raises nothing."""


class Catalog:
    """The committed steps of one store directory. Every method reads the disk; what has not changed is not parsed
    again (summaries.py).
    """

    def __init__(self, files: Storage, path: str) -> None:
        self.files, self.path = files, path
        self.commits = choose_commit(files)
        self.steps = os.path.join(path, "steps")
        self.store_id = ""
        self.follower: Follower | None = None
        self._summaries = Summaries(files, self.steps)

    def stand_alone(self) -> None:
        """CkptError for a folder inside a store: files in there would keep its steps from ever being retired."""
        around = self._around()
        if around:
            raise CkptError(f"{self.path}: is a folder of the store {around}; open that")

    def create(self, store_id: str | None = None) -> None:
        """Make the directory and FORMAT where they are missing; a new store gets `store_id`, or one of its own."""
        self.make_folder(self.steps)
        if not self.files.exists(os.path.join(self.path, "FORMAT")) or self._format_unfinished():
            self.commits.publish(self.path, "FORMAT", dump_format(store_id or uuid.uuid4().hex))

    def identify(self) -> None:
        """Read FORMAT; CkptError when this is no store, CorruptError when FORMAT is damaged."""
        path = os.path.join(self.path, "FORMAT")
        try:
            data = read_all(self.files, path, FORMAT_LIMIT)
        except (FileNotFoundError, NotADirectoryError) as error:
            around = self._around()
            what = f"a folder of the store {around}; open that" if around else "no FORMAT file"
            raise CkptError(f"{self.path}: not a checkpoint store ({what})") from error
        self.store_id = parse_format(data, path)

    def _around(self) -> str:
        """The store that this is the folder of the steps of, or of a step; "" when it is none."""
        above = os.path.dirname(self.path)
        for steps in (self.path, above):
            store = os.path.dirname(steps)
            if os.path.basename(steps) == "steps" and self.files.exists(os.path.join(store, "FORMAT")):
                return "" if self.files.exists(os.path.join(self.path, "FORMAT")) else store
        return ""

    def folders(self) -> list[str]:
        """Folders of committed steps, oldest first; their MANIFEST may still turn out damaged."""
        found = []
        for name in self._names(self.steps):
            key = parse_folder(name)
            if key and self._committed(name):
                found.append((key, name))
        return [name for _, name in sorted(found)]

    def committed(self) -> list[Manifest]:
        """Manifests that are whole and whose files have their full length, oldest first."""
        found = []
        for summary in self.summaries():
            with contextlib.suppress(CorruptError, OSError):  # a writer has removed it meanwhile
                found.append(read_manifest(self.files, self.steps, summary.folder))
        return found

    def summaries(self) -> list[Manifest]:
        """The same without tensors and items."""
        return [summary for name in self.folders() if (summary := self._whole(name)) is not None]

    def new_folder(self, step: int) -> str:
        """Make the folder for a save of `step`: the step, or the first free attempt of it."""
        names = {*self._names(self.steps), *(self.follower.taken() if self.follower else ())}
        attempts = [key[1] for name in names if (key := parse_folder(name)) and key[0] == step]
        folder = folder_name(step, max(attempts) + 1 if attempts else 0)
        self.files.mkdir(os.path.join(self.steps, folder))
        return folder

    def commit(self, manifest: Manifest) -> str:
        """Publish MANIFEST after the data is durable; the step exists when this returns. Returns the root hash."""
        data, root = dump(manifest)
        self.place(manifest, data)
        self._summaries.learn(replace(manifest, root=root), data)
        if self.follower is not None:
            self.follower.committed(manifest.folder)
        return root

    def place(self, manifest: Manifest, data: bytes) -> None:
        """Publish `data`, the text of `manifest`, in its folder."""
        folder = os.path.join(self.steps, manifest.folder)
        # The folder's own name must be durable before the manifest that makes it a step.
        self.commits.sync_dir(self.steps)
        if self.files.traits.shared:
            self._confirm(manifest)
        self.commits.publish(folder, MANIFEST, data)

    def point_head(self, folder: str) -> None:
        """Write the HEAD hint; failing to is no failure of the save."""
        try:
            self.commits.publish(self.path, "HEAD", canonical({"folder": folder}) + b"\n", durable=False)
        except OSError as error:
            _log.warning("%s: HEAD not written: %s", self.path, error)

    def retain(self, rules: Sequence[Rule], protect: Collection[str], damaged: Collection[str]) -> list[str]:
        """Remove what no rule keeps; returns the folders removed.

        Damaged steps, those whose base is missing or damaged and those of another store are neither counted nor
        removed. Pinned folders, folders with files that are not ours, and their bases stay; so do the bases of damaged
        steps, for a disk that could not be read once may be read again.
        """
        if not rules:
            return []
        protected = {*protect, *self.held(), *self._bases_of(damaged)}
        order = doomed(self.candidates(damaged), rules, protected)
        # A delta goes before its base: dying in between leaves no delta without one.
        return [folder for folder in order if self.remove(folder)]

    def _bases_of(self, folders: Collection[str]) -> list[str]:
        """Folders that these refer to, as far as their manifests can be read."""
        bases = []
        for folder in folders:
            with contextlib.suppress(CorruptError, OSError):
                manifest = self._summaries.read(folder)
                bases += [manifest.parent.folder] if manifest.parent else []
        return bases

    def candidates(self, damaged: Collection[str] = ()) -> list[Candidate]:
        """The steps that retention may count on, oldest first: of this store, whole, and so are their bases.

        OSError when one cannot be read just now: a step whose base is unknown makes every base precious.
        """
        folders = self.folders()
        self._summaries.keep(folders)
        found = (self._whole(name, patient=False) for name in folders if name not in damaged)
        sound = {m.folder: m for m in found if m is not None and m.store == self.store_id}
        while orphans := [
            m.folder
            for m in sound.values()
            if m.parent and (m.parent.folder not in sound or sound[m.parent.folder].root != m.parent.root)
        ]:
            for folder in orphans:
                del sound[folder]
        return [candidate_of(m) for m in sound.values()]

    def held(self) -> list[str]:
        """Folders that are never removed: pinned ones, those with files that are not ours, those not uploaded yet."""
        foreign = [
            name
            for name in self.folders()
            if not self.files.plain_folder(self._at(name))
            or any(not _is_ours(n) for n in self._names(self._at(name)))
        ]
        return [*foreign, *(self.follower.held() if self.follower else ())]

    def pin(self, folder: str) -> None:
        """Keep a committed step whatever the rules say."""
        self.commits.publish(self._at(folder), PIN, b"")

    def unpin(self, folder: str) -> bool:
        """Take a pin away; whether there was one."""
        path = os.path.join(self._at(folder), PIN)
        if not self.files.exists(path):
            return False
        self.files.unlink(path)
        self.commits.sync_dir(self._at(folder))
        return True

    def _at(self, folder: str) -> str:
        return os.path.join(self.steps, folder)

    def remove(self, folder: str) -> bool:
        """Remove a step folder if everything in it is ours; MANIFEST goes first, so a torn removal is no step."""
        path = os.path.join(self.steps, folder)
        if not self.files.plain_folder(path):
            _log.warning("%s: not removed, it is no folder, a link to one, or holds folders", path)
            return False
        names = self._names(path)
        foreign = [name for name in names if not _is_ours(name)]
        if foreign:
            _log.warning("%s: not removed, it holds %s", path, foreign[0])
            return False
        if MANIFEST in names:
            self.files.unlink(os.path.join(path, MANIFEST))
            self.commits.sync_dir(path)
        for name in names:
            if name != MANIFEST and not _is_silly(name):
                self.files.unlink(os.path.join(path, name))
        try:
            self.files.rmdir(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not self.files.traits.shared:
                raise
        self.commits.sync_dir(self.steps)
        return True

    def unfinished(self) -> list[str]:
        """Folders that are no steps: saves that never committed, or one that is being written now."""
        names = [name for name in self._names(self.steps) if parse_folder(name)]
        return [name for name in names if not self._committed(name)]

    def sweep(self) -> list[str]:
        """Remove folders of saves that never committed. Only the holder of the lock may call this."""
        leftovers = self.unfinished()
        for name in self.folders():
            guard = os.path.join(self._at(name), MANIFEST + TEMPORARY)
            if self.files.exists(guard):
                self.files.unlink(guard)
        for name in ("FORMAT.tmp", "HEAD.tmp"):
            if self.files.exists(os.path.join(self.path, name)):
                self.files.unlink(os.path.join(self.path, name))
        return [name for name in leftovers if self.remove(name)]

    def make_folder(self, path: str) -> None:
        """Create a folder and its missing parents, each made durable in the one above."""
        if self.files.traits.whole or self.files.exists(path):
            return
        parent = os.path.dirname(path)
        self.make_folder(parent)
        with contextlib.suppress(FileExistsError):  # another process opens the same new store
            self.files.mkdir(path)
        self.commits.sync_dir(parent)

    def _committed(self, folder: str) -> bool:
        """Whether MANIFEST is there; one that is unfinished (see commit.py) does not count."""
        path = os.path.join(self.steps, folder, MANIFEST)
        if not self.files.exists(path):
            return False
        if self.files.traits.whole or not self.files.exists(path + TEMPORARY):
            return True
        try:
            read_manifest(self.files, self.steps, folder)
        except (CorruptError, FileNotFoundError):
            return False
        return True

    def _format_unfinished(self) -> bool:
        """Whether a marker-last write of FORMAT was cut off."""
        if self.files.traits.whole or not self.files.exists(os.path.join(self.path, "FORMAT" + TEMPORARY)):
            return False
        try:
            self.identify()
        except CorruptError:
            return True
        return False

    def _confirm(self, manifest: Manifest) -> None:
        """Look at the data files once more by name: on a shared store they may come from other hosts.

        A client may have remembered for a while that a file is not there; OSError(EIO) when it stays short or missing.
        """
        for file in manifest.files:
            path = os.path.join(self.steps, manifest.folder, file.name)
            found = self._size_after(path, file.size)
            if found != file.size:
                raise OSError(errno.EIO, f"{found} of {file.size} bytes are visible after fsync", path)

    def _size_after(self, path: str, wanted: int) -> int:
        found = -1
        for pause in _LOOK_AGAIN:
            time.sleep(pause)
            try:
                found = self._size(path)
            except OSError as error:
                if not gone(error):
                    raise
            if found == wanted:
                break
        return found

    def _whole(self, folder: str, *, patient: bool = True) -> Manifest | None:
        """Summary of a step whose files have their length, else None."""
        try:
            manifest = self._summaries.read(folder)
            sizes = [self._size(os.path.join(self.steps, folder, file.name)) for file in manifest.files]
        except CorruptError:
            return None
        except OSError as error:
            if patient or gone(error):
                return None
            raise
        return manifest if sizes == [file.size for file in manifest.files] else None

    def _size(self, path: str) -> int:
        fd = self.files.open(path)
        try:
            return self.files.size(fd)
        finally:
            self.files.close(fd)

    def _names(self, path: str) -> list[str]:
        try:
            return self.files.names(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            raise


def candidate_of(m: Manifest) -> Candidate:
    """What retention knows of a step."""
    attempt = (parse_folder(m.folder) or (m.step, 0))[1]
    parent = m.parent.folder if m.parent else None
    return Candidate(m.folder, m.step, attempt, parent, m.created, m.metrics)


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, MANIFEST + TEMPORARY, PIN + TEMPORARY) or is_data_file(name) or _is_silly(name)


def _is_silly(name: str) -> bool:
    """What an NFS client keeps of a removed file that a process of its host has open; it goes by itself."""
    return name.startswith(".nfs")
