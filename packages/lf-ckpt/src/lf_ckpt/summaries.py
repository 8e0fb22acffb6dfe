"""What manifests say of their steps but for tensors and items, parsed once.

A MANIFEST is never rewritten in place, so the same bytes say the same. They are read and hashed each time, for a disk
may change them; but parsing takes 0.06 ms of CPU, under the interpreter lock of the training, for every tensor of every
step that is kept, and retention looks at all of them after every save.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

import xxhash

from .manifest import Manifest
from .reader import MANIFEST, manifest_bytes, parse_manifest
from .storage import Storage


class Summaries:
    """Manifests without tensors, bytes items and items, by folder. Threads may share one."""

    def __init__(self, files: Storage, steps: str) -> None:
        self._files, self._steps = files, steps
        self._known: dict[str, tuple[bytes, Manifest]] = {}

    def read(self, folder: str) -> Manifest:
        """As `read_manifest`, with the same errors."""
        data = manifest_bytes(self._files, self._steps, folder)
        digest = xxhash.xxh3_128_digest(data)
        known = self._known.get(folder)
        if known is None or known[0] != digest:
            manifest = parse_manifest(data, os.path.join(self._steps, folder, MANIFEST), folder)
            known = self._known[folder] = digest, _summary(manifest)
        return known[1]

    def learn(self, manifest: Manifest, data: bytes) -> None:
        """Remember a step that has just been committed with these bytes; `manifest` has its root."""
        self._known[manifest.folder] = xxhash.xxh3_128_digest(data), _summary(manifest)

    def keep(self, folders: Collection[str]) -> None:
        """Forget all others: they have been removed."""
        for folder in set(self._known).difference(folders):
            self._known.pop(folder, None)


def _summary(manifest: Manifest) -> Manifest:
    return replace(manifest, tensors=(), aliases={}, blobs=(), items={})
