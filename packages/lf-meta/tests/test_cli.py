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


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "RUN", "--file", "x.lfckpt", "run.steps=9"],
        ["resume", "RUN", "--nproc", "1", "run.steps=9", "--file", "x.lfckpt"],
        ["eval", "RUN", "--step", "3", "run.steps=9"],
    ],
)
def test_settings_may_follow_options(words: list[str]) -> None:
    assert cli._parse(words).overrides == ["run.steps=9"]
    assert cli._parse(["train", "a.yaml", "--nproc", "1", "run.steps=9"]).arguments == [
        "a.yaml",
        "run.steps=9",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "RUN", "--filing"],
        ["resume", "RUN", "--x=1"],
        ["digest", "RUN", "--step", "3", "a=1"],
        ["resume", "RUN", "--nproc", "1", "a=1", "b"],
    ],
)
def test_what_no_command_knows_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli._parse(words)
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {words[-1]}\n")
