"""A run without a start of its own is what it would be with one: output, exit code, folder, and its end in time."""

import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["nonsense"], 2), (["train", "optim.lrr=1"], 2)]
)
def test_output_and_exit_code_are_those_of_a_start(cli: Any, arguments: list[str], code: int) -> None:
    outputs = [cli.run(*arguments, code=code, cold=cold) for cold in (False, True)]
    assert outputs[0]
    assert outputs[0].replace("cli.py", "loongforge") == outputs[1].replace("cli.py", "loongforge")


def test_a_run_sees_its_folder_and_nothing_of_the_one_before(cli: Any, make_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_cli(tmp_path / "other")
    for at in (cli, other):
        at.train("same", "run.steps=2")
        assert sorted(at.losses("same")) == [1, 2]
    assert other.digest("same") == cli.digest("same")


def test_a_run_that_does_not_end_is_killed_with_all_that_it_started(cli: Any, small: list[str]) -> None:
    arguments = ["train", "run.name=long", *small, "run.steps=1000000", "--nproc", "2"]
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(arguments, cli.folder, cli.environment, cli.folder / "out", timeout=5)
    server = psutil.Process(warm._server().process.pid)
    assert not [p for p in server.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
