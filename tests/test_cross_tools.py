"""The apt source that nox -s cross adds is the machine's own with another suite."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import cross_tools

OWN = """Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/own.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""


def test_the_backports_suite_keeps_mirror_and_key() -> None:
    made = cross_tools.backports_source([OWN], "bookworm")
    assert made.splitlines() == [
        "Types: deb",
        "URIs: http://mirror.example/debian",
        "Suites: bookworm-backports",
        "Components: main",
        "Signed-By: /usr/share/keyrings/own.gpg",
    ]


def test_a_one_line_source_serves_as_well() -> None:
    line = "deb-src http://other.example/x bookworm main\n"
    line += "deb [arch=amd64 signed-by=/own.gpg] http://m.example/d bookworm main\n"
    made = cross_tools.backports_source([line], "bookworm")
    assert "URIs: http://m.example/d\n" in made
    assert "Signed-By: /own.gpg\n" in made


def test_without_a_source_of_the_release_nothing_is_made_up() -> None:
    with pytest.raises(ValueError, match="'trixie'"):
        cross_tools.backports_source([OWN], "trixie")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("qemu-loongarch64 version 10.0.2 (Debian 1:10.0.2+ds-2)", (10, 0)),
        ("7.2+dfsg-7", (7, 2)),
        ("", (0,)),
    ],
)
def test_versions_are_read_from_what_programs_say(text: str, version: tuple[int, ...]) -> None:
    assert cross_tools.version_of(text) == version
