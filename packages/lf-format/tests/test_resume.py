"""A killed preprocess goes on where its last part ends, and its bytes are those of a run that nobody killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_format as lff
from lf_format import _journal, preprocess_cli
from lf_format._documents import Document
from lf_format._journal import FOLDER, Journal
from lf_format._spool import Spool

# Small parts, and a pause that lets the test kill between two of them.
SLOW = """
    import sys, time
    from lf_format import _journal, preprocess_cli
    _journal.PART_BYTES = 2000
    commit = _journal.Journal.commit
    def slow(self):
        commit(self)
        time.sleep(0.05)
    _journal.Journal.commit = slow
    if __name__ == "__main__":
        sys.exit(preprocess_cli.main(sys.argv[1:]))
"""


def jsonl(folder: Path) -> list[str]:
    lines = [json.dumps({"text": f"document {i} " * (i % 9)}) for i in range(300)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return ["--input", str(folder / "a.jsonl")]


def texts(folder: Path) -> list[str]:
    for i in range(120):
        (folder / f"{i:03}.txt").write_text(f"text {i} " * 20)
    return ["--input", str(folder)]


def npz(folder: Path) -> list[str]:
    rows = np.empty(200, object)
    rows[:] = [np.arange(i % 90) for i in range(200)]
    masks = np.empty(200, object)
    masks[:] = [np.arange(i % 90) % 2 for i in range(200)]
    np.savez(folder / "a.npz", input_ids=rows, loss_mask=masks)
    return ["--input", str(folder / "a.npz"), "--vocab-size", "300"]


def parquet(folder: Path) -> list[str]:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [f"row {i} " * 20 for i in range(200)]}), folder / "a.parquet")
    return ["--input", str(folder / "a.parquet")]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def parts_in(folder: Path) -> int:
    path = folder / FOLDER / "parts"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def kill_after(parts: int, command: list[str], out: Path) -> None:
    """Starts the slow preprocess and ends it with SIGKILL when it has so many parts."""
    script = out.parent / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    process = subprocess.Popen(
        [sys.executable, script, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while parts_in(out) < parts and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert parts_in(out) >= parts


@pytest.mark.parametrize("make", [jsonl, texts, npz, parquet])
def test_a_killed_run_continues_and_ends_with_the_same_bytes(
    make: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    common = [*make(tmp_path / "in"), "--max-len", "64", "--eval-fraction", "0.2", "--codec", "zstd"]
    assert preprocess_cli.main([*common, "--output", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    out = tmp_path / "out"
    command = [*common, "--output", str(out)]
    kill_after(1, command, out)
    kill_after(3, command, out)
    read: list[str] = []
    monkeypatch.setattr("lf_format._encode._encode", _recording(read))
    assert preprocess_cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    note = next(n for n in report["notes"] if "continued an interrupted run" in n)
    done = int(note.rsplit(" ", 2)[1])
    assert 0 < done < report["documents"] + len(report["empty"])
    assert len(read) == report["documents"] + len(report["empty"]) - done  # nothing is tokenized twice
    assert sorted(p.name for p in out.iterdir()) == ["eval.loongbin", "train.loongbin"]


def _recording(read: list[str]) -> Callable[..., Any]:
    from lf_format._encode import _encode

    def call(document: Document, tokenizer: lff.Tokenizer) -> Any:
        read.append(document.name)
        return _encode(document, tokenizer)

    return call


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a run that was interrupted after some parts."""
    monkeypatch.setattr(_journal, "PART_BYTES", 2000)
    (tmp_path / "in").mkdir()
    command = [*jsonl(tmp_path / "in"), "--output", str(tmp_path / "out"), "--max-len", "64"]

    def stop(advance: lff.Advance) -> None:
        if advance.documents == 150:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lff.preprocess(tmp_path / "in/a.jsonl", tmp_path / "out", max_len=64, progress=stop)
    assert parts_in(tmp_path / "out") > 2
    return command


def _notes(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert preprocess_cli.main([*command, "--json"]) == 0
    notes: list[str] = json.loads(capsys.readouterr().out)["notes"]
    return notes


def test_empty_documents_of_the_first_part_are_still_reported(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert preprocess_cli.main([*interrupted, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [name for name, _ in report["empty"]] == [
        f"{tmp_path}/in/a.jsonl:{i + 1}" for i in range(0, 300, 9)
    ]
    assert {reason for _, reason in report["empty"]} == {"no tokens"}
    assert report["documents"] == 300 - len(range(0, 300, 9))


def test_changed_inputs_start_anew_and_the_report_says_so(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "in/a.jsonl").open("a") as file:
        file.write('\n{"text": "one more"}')
    assert _notes(interrupted, capsys) == ["an interrupted run was started anew: inputs changed"]
    lff.preprocess(tmp_path / "in/a.jsonl", tmp_path / "whole", max_len=64)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_changed_tokenizer_or_key_starts_anew(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in/a.jsonl"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"text"', b'"body"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    notes = _notes([*interrupted, "--text-key", "body"], capsys)
    assert notes == ["an interrupted run was started anew: text key changed"]


def test_a_changed_policy_starts_anew_and_judges_every_document(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preprocess_cli.main([*interrupted, "--empty", "raise"]) == 1
    assert "a.jsonl:1: document without a token" in capsys.readouterr().err


def test_options_that_do_not_change_the_ids_go_on(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--eval-fraction", "0.3", "--codec", "packed", "--num-workers", "2"]
    assert "continued" in _notes([*interrupted, *more], capsys)[0]
    options: dict[str, Any] = {"max_len": 64, "eval_fraction": 0.3, "codec": "packed"}
    lff.preprocess(tmp_path / "in/a.jsonl", tmp_path / "whole", **options)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["values", "lengths", "parts"])
@pytest.mark.parametrize("damage", ["cut", "flip", "noise behind"])
def test_a_damaged_part_is_made_again(
    interrupted: list[str], tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / FOLDER / name
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        del raw[len(raw) // 2 :]
    elif damage == "flip":
        raw[len(raw) // 2] ^= 4
    else:
        raw += b"\x00noise without an end"
    path.write_bytes(raw)
    assert "continued" in _notes(interrupted, capsys)[0]
    lff.preprocess(tmp_path / "in/a.jsonl", tmp_path / "whole", max_len=64)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_any_damage_to_the_parts_ends_with_the_same_bytes(interrupted: list[str], tmp_path: Path) -> None:
    source, dice = tmp_path / "in/a.jsonl", random.Random(3)
    lff.preprocess(source, tmp_path / "whole", max_len=64)
    for number in range(20):
        out = Path(shutil.copytree(tmp_path / "out", tmp_path / f"out{number}"))
        for name in dice.sample(["values", "lengths", "parts"], 2):
            path = out / FOLDER / name
            raw = bytearray(path.read_bytes())
            at = dice.randrange(len(raw))
            raw[at : at + dice.choice([0, 1, 50])] = dice.randbytes(dice.choice([0, 1, 3]))
            path.write_bytes(raw[: dice.choice([len(raw), len(raw), at])])
        report = lff.preprocess(source, out, max_len=64)
        assert bytes_of(out) == bytes_of(tmp_path / "whole")
        assert len(report.empty) == len(range(0, 300, 9))


def test_two_runs_into_one_output_are_refused(interrupted: list[str], tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "out", None, lambda folder: Spool(folder, np.dtype(np.uint8), False)),
        pytest.raises(lff.FormatError, match="another run"),
    ):
        lff.preprocess(tmp_path / "in/a.jsonl", tmp_path / "out")


def test_a_refused_document_leaves_no_parts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' * 50 + "{oops")
    with pytest.raises(lff.InputError):
        lff.preprocess(tmp_path / "a.jsonl", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_exits_130_and_says_that_the_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lf_format._preprocess._distribute", stop)
    (tmp_path / "a.txt").write_text("text")
    command = ["--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/out"]
    assert preprocess_cli.main(command) == 130
    assert "the same command continues" in capsys.readouterr().err
    monkeypatch.undo()
    assert preprocess_cli.main(command) == 0
    assert "continued an interrupted run behind its first 1 documents" in capsys.readouterr().out
