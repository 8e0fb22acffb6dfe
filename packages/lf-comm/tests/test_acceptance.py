"""The table of acceptance cases in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_table_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (HERE / "README.md").read_text(encoding="utf-8"))
    assert len(named) >= 25
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text("utf-8")
    ]
    assert missing == []
