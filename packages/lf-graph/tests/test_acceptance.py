"""The table of acceptance cases in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_table_exists() -> None:
    named = re.findall(r"`([\w./-]+\.py)::(test_\w+)`", (HERE / "README.md").read_text(encoding="utf-8"))
    assert len(named) >= 60
    missing = [
        f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text("utf-8")
    ]
    assert missing == []


def test_every_case_of_the_issue_has_a_row() -> None:
    rows = re.findall(r"^\| (\w*) \|", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    cases = ["A1", "A2", "A4", "A5", "A7", "A8", *map(str, [*range(11, 17), *range(18, 21)])]
    assert [case for case in cases if case not in rows] == []
