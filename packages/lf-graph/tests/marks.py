"""Lines of a test file by a comment at their end, for tests of the line that a message names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def marks_of(source: str) -> Callable[[str], str]:
    """A function of a mark: ``file:line`` of the one line of the file that ends in ``# at: mark``."""
    lines = Path(source).read_text().splitlines()

    def at(mark: str) -> str:
        (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# at: {mark}")]
        return f"{source}:{number}"

    return at
