"""Options of the command that set up the process before a job starts."""

import os

import pytest

from lf_meta import cli


@pytest.mark.parametrize("command", [["train"], ["resume", "runs/x"]])
@pytest.mark.parametrize(("option", "expected"), [([], "0"), (["--memory-safety-mode"], "1")])
def test_memory_safety_mode_reaches_the_job_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, command: list[str], option: list[str], expected: str
) -> None:
    seen = []

    def job(args: object) -> int:
        seen.append(os.environ["LOONGFORGE_DEBUG_MEMORY"])
        return 0

    monkeypatch.setenv("LOONGFORGE_DEBUG_MEMORY", "0")
    monkeypatch.setattr(cli, f"_{command[0]}", job)
    assert cli.main([*command, *option]) == 0
    assert seen == [expected]
