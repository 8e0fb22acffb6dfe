"""Where a benchmark keeps its stores while it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A new folder inside `folder` (the current one when None), which is made if missing; gone at the end."""
    where = folder or Path.cwd()
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as made:
        yield Path(made)
