"""Commands: output, exit codes, names of what is wrong."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lf_format as lff
from lf_format import cli, preprocess_cli

Write = Callable[..., Path]


def test_inspect_json_says_what_is_in_a_file(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--json", str(sample)]) == 0
    info = json.loads(capsys.readouterr().out)["files"][0]
    assert (info["records"], info["tokens"], info["documents"]) == (64, 64 * 65 // 2, 64)
    assert [f["name"] for f in info["fields"]] == ["tokens", "loss_mask"]
    assert [b["records"] for b in info["buckets"]] == [8, 8, 48]
    assert info["buckets"][0]["padding"] == pytest.approx(1 - 36 / 64)
    assert info["fingerprint"] == lff.Reader(sample).fingerprint


def test_inspect_text_lists_every_file_of_a_directory(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write([[1]], "a.loongbin")
    folder = write([[2, 3]], "b.loongbin").parent
    assert cli.main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "a.loongbin" in out
    assert "1 documents, 1 records, 2 tokens" in out


def test_inspect_counts_codecs_and_dictionaries(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parent / "golden" / "dictionaries.loongbin")
    assert cli.main(["inspect", "--json", path]) == 0
    info = json.loads(capsys.readouterr().out)["files"][0]
    assert info["codecs"] == {"raw": 0, "zstd": 1, "packed": 0, "ranks and zstd": 2}
    assert [d["kind"] for d in info["dictionaries"]] == ["rank table", "dictionary", "dictionary"]
    assert cli.main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "blocks: 1 zstd, 2 ranks and zstd" in text
    assert f"dictionary of {info['dictionaries'][1]['bytes']} bytes" in text


def test_verify_reports_each_damaged_file_and_exits_1(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write([[1]], "good.loongbin")
    bad = write([[2]], "bad.loongbin")
    bad.write_bytes(bad.read_bytes()[:-1])
    assert cli.main(["verify", "--deep", str(good), str(bad)]) == 1
    output = capsys.readouterr()
    assert f"{good}: ok (1 records, 1 tokens, deep)" in output.out
    assert "bad.loongbin: byte" in output.err


def test_verify_takes_a_directory_with_train_and_eval(write: Write) -> None:
    write([[1]], "train.loongbin")
    folder = write([[2]], "eval.loongbin").parent
    assert cli.main(["verify", "--deep", str(folder)]) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "absent.loongbin"],
        ["inspect", "absent.loongbin"],
        ["verify"],
        ["frob"],
        [],
        ["head", "a", "-n", "0"],
        ["overlap", "a", "b", "--ngram", "0"],
    ],
    ids=repr,
)
def test_usage_errors_exit_2(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", "lf_format.cli", *command], capture_output=True, text=True)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_inspect_of_a_damaged_file_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.loongbin").write_bytes(b"junk")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "a.loongbin" in capsys.readouterr().err


def test_preprocess_takes_the_flags_of_the_articles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [3, 600, 2048, 5000]
    rows = np.array([np.arange(n) % 777 for n in lengths], object)
    np.savez_compressed(tmp_path / "tokenized.npz", input_ids=rows)
    command = f"--input {tmp_path}/tokenized.npz --output {tmp_path}/data --bucket-size 128 --min-len 512"
    command += " --max-len 2048 --num-workers 2 --zstd-level 12 --json"
    assert preprocess_cli.main(command.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["buckets"] == list(range(512, 2049, 128))
    assert (report["documents"], report["split_documents"], report["tokens"]) == (4, 1, sum(lengths))
    with lff.Reader(tmp_path / "data" / "train.loongbin") as reader:
        assert sorted(reader.lengths.tolist()) == [3, 600, 904, 2048, 2048, 2048]
        assert not reader.codecs_raw


def test_preprocess_says_what_it_skipped_and_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("")
    assert (
        preprocess_cli.main(
            ["--input", str(tmp_path), "--output", f"{tmp_path}/out", "--eval-fraction", "0.5"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"skipped {tmp_path}/b.txt: no tokens" in out
    assert "note: there is one document" in out


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--max-len", "8", "--min-len", "9"], 2),
        (["--tokenizer", "absent.json"], 2),
        (["--zstd-level", "99"], 2),
        (["--vocab-size", "70"], 2),
        (["--input", "absent.txt"], 1),
    ],
    ids=repr,
)
def test_preprocess_exit_codes(
    tmp_path: Path, flags: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert (
        preprocess_cli.main(["--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/out", *flags]) == code
    )
    assert capsys.readouterr().err.startswith("loongforge-preprocess: ")


def test_preprocess_shows_a_bar_on_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 500)
    command = [sys.executable, "-m", "lf_format.preprocess_cli", "--input", f"{tmp_path}/a.jsonl", "--output"]
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    subprocess.run([*command, f"{tmp_path}/out"], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
    os.close(terminal)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "500 documents, 5,000 tokens" in shown
    assert "100%" in shown
    quiet = subprocess.run([*command, f"{tmp_path}/out"], capture_output=True, check=True)
    assert quiet.stderr == b""


@pytest.mark.parametrize("module", ["lf_format.cli", "lf_format.preprocess_cli"])
def test_a_reader_that_has_enough_ends_a_command_in_silence(
    sample: Path, tmp_path: Path, module: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    flags = {"lf_format.cli": ["inspect", str(sample)]}
    command = flags.get(module, ["--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/out"])
    end, pipe = os.pipe()
    os.close(end)
    run = subprocess.run([sys.executable, "-m", module, *command], stdout=pipe, stderr=subprocess.PIPE)
    os.close(pipe)
    assert (run.returncode, run.stderr) == (141, b"")


def test_a_full_disk_exits_1(sample: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "lf_format.cli", "inspect", str(sample)]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 1
    assert "No space left" in run.stderr


def test_a_name_that_is_not_utf8_is_printed_with_escapes(sample: Path) -> None:
    odd = sample.with_name(os.fsdecode(b"\xff.loongbin"))
    sample.rename(odd)
    command = [sys.executable, "-m", "lf_format.cli", "inspect", str(odd)]
    run = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"})
    assert run.returncode == 0
    assert rb"\udcff.loongbin: format" in run.stdout


def test_an_interrupt_exits_130(
    sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "verify", interrupted)
    assert cli.main(["verify", str(sample)]) == 130
    assert capsys.readouterr().err == "lf-format: interrupted\n"
