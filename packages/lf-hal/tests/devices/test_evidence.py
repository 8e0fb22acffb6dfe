"""Every claim of the package has a level, and the command line prints it."""

import json
import subprocess
import sys

import pytest

from lf_hal import CAPABILITIES, Evidence
from lf_hal.cli import COMMANDS, main
from lf_hal.evidence import MEANING, capability


def test_every_level_says_what_it_means() -> None:
    assert set(MEANING) == set(Evidence)


def test_names_are_unique_and_found_by_name() -> None:
    names = [row.name for row in CAPABILITIES]
    assert len(set(names)) == len(names)
    assert capability(names[0]) is CAPABILITIES[0]
    with pytest.raises(KeyError, match=names[0]):
        capability("no such thing")


def test_the_command_prints_the_level_of_every_capability(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evidence", "--json"]) == 0
    printed = {row["name"]: row["evidence"] for row in json.loads(capsys.readouterr().out)["capabilities"]}
    assert printed == {row.name: str(row.evidence) for row in CAPABILITIES}
    assert main(["evidence"]) == 0
    text = capsys.readouterr().out
    assert all(row.name in text for row in CAPABILITIES)


def test_every_command_has_options_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for row in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([row.name, "--help"])
        assert stopped.value.code == 0
        assert row.help[:30] in " ".join(capsys.readouterr().out.split())


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["frobnicate"])
    assert stopped.value.code == 2
    assert "evidence" in capsys.readouterr().err


def test_the_package_and_its_command_line_import_no_torch() -> None:
    code = "import sys, lf_hal, lf_hal.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
