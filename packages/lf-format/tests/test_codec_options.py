"""CodecOptions: what Writer and preprocess measure, keep, drop and report; same bytes again, nothing left over."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lf_format as lff
from lf_format import preprocess_cli
from lf_format._codecs import PACKED, RAW, REMAP_ZSTD, ZSTD

Write = Callable[..., Path]
MEASURED = lff.CodecOptions("zstd", dictionary="auto", rank_table="auto")


def tokens_of(path: Path) -> list[list[int]]:
    with lff.Reader(path) as reader:
        return [reader.record(i).tokens.tolist() for i in range(len(reader))]


def codecs_of(path: Path) -> dict[int, set[int]]:
    """Codecs in use by bucket edge."""
    with lff.Reader(path) as reader:
        index = reader.opened.index
        pairs = zip(index.block_bucket.tolist(), index.block_codec.tolist(), strict=True)
        found: dict[int, set[int]] = {}
        for bucket, codec in pairs:
            found.setdefault(reader.buckets[bucket], set()).add(codec)
    return found


@pytest.fixture(scope="module")
def phrases() -> list[np.ndarray[Any, Any]]:
    """Common phrases of a vocabulary of 60,000: a dictionary knows them, a block does not repeat them."""
    dice = np.random.default_rng(1)
    known = [dice.integers(0, 60_000, 24) for _ in range(400)]
    return [np.concatenate([known[k] for k in dice.integers(0, 400, 4)])[:90] for _ in range(4000)]


def test_a_writer_keeps_dictionaries_that_pay_and_says_so(
    write: Write, phrases: list[Any], tmp_path: Path
) -> None:
    chosen = {"vocab_size": 60_000, "buckets": (64, 128), "block_bytes": 8192}
    plain = write(phrases, "plain.loongbin", codec="zstd", **chosen)
    with lff.Writer(
        tmp_path / "m.loongbin", tokenizer=lff.TokenizerInfo("t", ""), codec=MEASURED, **chosen
    ) as writer:
        for record in phrases:
            writer.append(record)
    report = writer.close()
    again = write(phrases, "again.loongbin", codec=MEASURED, **chosen)
    assert report.bytes == again.stat().st_size < 0.95 * plain.stat().st_size
    kept = [d for d in report.decisions if d.kept]
    assert {d.kind for d in report.decisions} == {"dictionary", "rank table"}
    assert kept
    assert all(d.saved >= 0.02 * d.without for d in kept)
    assert all("saves" in d.reason for d in report.decisions)
    assert tokens_of(again) == tokens_of(plain)
    assert lff.verify(again).problems == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.loongbin", "m.loongbin", "plain.loongbin"]


def test_equal_records_give_equal_bytes(write: Write, phrases: list[Any]) -> None:
    chosen = {"vocab_size": 60_000, "buckets": (64, 128), "block_bytes": 8192, "codec": MEASURED}
    files = [write(phrases, name, **chosen).read_bytes() for name in ("a.loongbin", "b.loongbin")]
    assert files[0] == files[1]


def test_writing_measured_equals_converting(write: Write, phrases: list[Any], tmp_path: Path) -> None:
    chosen = {"vocab_size": 60_000, "buckets": (64, 128), "block_bytes": 8192}
    options = lff.CodecOptions("auto", 1, "auto", "auto")
    raw, direct = write(phrases, "r.loongbin", **chosen), write(phrases, codec=options, **chosen)
    report = lff.convert(raw, tmp_path / "c.loongbin", codec=options)
    assert direct.read_bytes() == (tmp_path / "c.loongbin").read_bytes()
    assert report.fingerprint == lff.Reader(direct).fingerprint


def test_auto_takes_for_each_bucket_what_pays(write: Write) -> None:
    dice = np.random.default_rng(3)
    noise = [dice.integers(0, 65_536, 8) for _ in range(300)]  # fills its width
    narrow = [np.r_[dice.integers(0, 1 << 16, 16)] for _ in range(300)]
    runs = [np.repeat(dice.integers(0, 1 << 16, 4), 16) for _ in range(300)]
    path = write(noise + narrow + runs, vocab_size=65_536, block_bytes=2048, codec="auto")
    assert codecs_of(path) == {8: {RAW}, 16: {RAW}, 64: {ZSTD}}
    wide = write([dice.integers(0, 1000, 60) for _ in range(300)], vocab_size=1000, codec="auto")
    assert codecs_of(wide) == {64: {PACKED}}
    assert lff.verify(path).ok
    assert lff.verify(wide).ok


def test_auto_reports_what_each_codec_would_save(write: Write, tmp_path: Path) -> None:
    path = write([[1, 2, 3] * 20] * 200, vocab_size=1000, block_bytes=1024)
    report = lff.convert(path, tmp_path / "b.loongbin", codec="auto")
    assert [d.kind for d in report.decisions] == ["codec zstd"]
    assert "packed saves 37" in report.decisions[0].reason
    assert str(report.decisions[0]).startswith("bucket 64: codec zstd kept: packed saves 37")


def test_a_writer_packs_ids_without_a_second_pass(write: Write, tmp_path: Path) -> None:
    records = [[n % 1000] * (1 + n % 60) for n in range(200)]
    path = write(records, vocab_size=1000, codec="packed", loss_mask=True, block_bytes=1024)
    raw = write(records, "raw.loongbin", vocab_size=1000, loss_mask=True, block_bytes=1024)
    lff.convert(raw, tmp_path / "c.loongbin", codec="packed")
    assert path.read_bytes() == (tmp_path / "c.loongbin").read_bytes()
    assert tokens_of(path) == tokens_of(raw)


@pytest.mark.parametrize("codec", ["zstd", "packed", "auto"])
def test_short_records_stay_raw_when_asked(write: Write, codec: Any) -> None:
    options = lff.CodecOptions(codec, raw_up_to=8)
    path = write([[1] * 8] * 100 + [[2] * 60] * 100, vocab_size=1000, codec=options)
    found = codecs_of(path)
    assert found[8] == {RAW}
    assert RAW not in found[64]


def test_samples_take_raw_or_zstd(tmp_path: Path) -> None:
    fields = [lff.Field.tokens(), lff.Field.tensor("x", "float32", (-1, 8))]
    for name, codec in (("a", "auto"), ("z", "zstd")):
        dice = np.random.default_rng(4)
        with lff.Writer(
            tmp_path / f"{name}.lfg",
            fields=fields,
            vocab_size=9,
            buckets=(4, 8),
            codec=codec,
            block_bytes=4096,
        ) as writer:
            for i in range(100):
                writer.append({"input_ids": [1] * 4, "x": np.zeros((i % 5, 8))})
                writer.append({"input_ids": [1] * 8, "x": dice.random((64, 8))})
        assert lff.verify(tmp_path / f"{name}.lfg").ok
    kinds = [d.kind for d in lff.convert(tmp_path / "z.lfg", tmp_path / "c.lfg", codec="auto").decisions]
    assert kinds == ["codec zstd", "codec zstd"]
    assert (tmp_path / "c.lfg").read_bytes() == (tmp_path / "a.lfg").read_bytes()


@pytest.mark.parametrize(
    "codec",
    ["packed", lff.CodecOptions("zstd", dictionary="auto"), lff.CodecOptions("auto", rank_table="auto")],
    ids=["packed", "dictionary", "ranks"],
)
def test_samples_refuse_what_they_cannot_have(tmp_path: Path, codec: Any) -> None:
    fields = [lff.Field.bytes("b")]
    with pytest.raises(lff.FormatError, match="codec of a"):
        lff.Writer(tmp_path / "a.lfg", fields=fields, codec=codec)
    with lff.Writer(tmp_path / "b.lfg", fields=fields) as writer:
        writer.append({"b": b"1"})
    with pytest.raises(lff.FormatError, match="codec of a"):
        lff.convert(tmp_path / "b.lfg", tmp_path / "c.lfg", codec=codec)
    assert [p.name for p in tmp_path.iterdir()] == ["b.lfg"]


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "lz4"},
        {"codec": "zstd", "level": 0},
        {"codec": "zstd", "level": 23},
        {"codec": "zstd", "dictionary": "yes"},
        {"codec": "raw", "dictionary": "auto"},
        {"codec": "packed", "rank_table": "auto"},
    ],
    ids=repr,
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(lff.FormatError, match=r"codec|level|dictionary"):
        lff.CodecOptions(**options)


def test_an_error_while_measuring_leaves_nothing(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lf_format._writer.recode", full)
    gc.collect()  # what other tests left may close its descriptors at any time
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no space"):
        write([[1, 2, 3]], codec="auto")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def _text(folder: Path) -> Path:
    lines = [f"the quick brown fox number {i} jumps over the lazy dog {i % 7}" for i in range(4000)]
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in [*lines, "hi", "ho"]))
    return folder / "a.jsonl"


def _run(*arguments: str) -> int:
    return preprocess_cli.main([str(a) for a in arguments])


def test_preprocess_measures_by_default_and_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--input", _text(tmp_path), "--max-len", "128", "--bucket-size", "64")
    assert _run(*common, "--output", tmp_path / "a", "--zstd-level", "12") == 0
    said = capsys.readouterr().out
    assert "bucket 64: dictionary" in said
    assert "all buckets: rank table" in said
    off = ("--codec", "zstd", "--dictionary", "off", "--rank-table", "off")
    assert _run(*common, "--output", tmp_path / "b", *off) == 0
    assert "dictionary" not in capsys.readouterr().out
    assert sorted(tokens_of(tmp_path / "a/train.loongbin")) == sorted(
        tokens_of(tmp_path / "b/train.loongbin")
    )


def test_preprocess_keeps_records_below_min_len_raw(tmp_path: Path) -> None:
    source = _text(tmp_path)
    arguments = ("--input", source, "--output", tmp_path / "a", "--min-len", "32", "--max-len", "64")
    assert _run(*arguments, "--codec", "auto") == 0
    found = codecs_of(tmp_path / "a/train.loongbin")
    assert found[32] == {RAW}
    assert found[64] <= {ZSTD, REMAP_ZSTD}


def test_preprocess_refuses_codec_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _text(tmp_path)
    arguments = ("--input", source, "--output", tmp_path / "a", "--codec", "packed", "--dictionary", "auto")
    assert _run(*arguments) == 2
    assert "codec for dictionary auto" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_measuring_holds_a_bounded_part_of_the_records(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from lf_format import _train

    monkeypatch.setattr(_train, "SAMPLE_BYTES", 40_000)
    monkeypatch.setattr(_train, "ALL_SAMPLE_BYTES", 60_000)
    path = write([[1] * n for n in (8, 60) * 4000], block_bytes=4096)
    with lff.Reader(path) as reader:
        samples = _train._samples(reader, [0, 2])
    held = [sum(len(payload) for payload, _ in s.train + s.judge) for s in samples.values()]
    assert all(20_000 < size <= 30_000 for size in held)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_records_under_any_options_come_back(write: Write, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([2, 256, 1000, 65_536, 70_000]))
    codec = data.draw(st.sampled_from(["raw", "zstd", "packed", "auto"]))
    tried = st.sampled_from(["auto", "off"]) if codec in ("zstd", "auto") else st.just("off")
    level, short = data.draw(st.sampled_from([1, 3, 9])), data.draw(st.sampled_from([0, 8, 64]))
    options = lff.CodecOptions(codec, level, data.draw(tried), data.draw(tried), short)
    dice = np.random.default_rng(data.draw(st.integers(0, 9)))
    top = data.draw(st.sampled_from([2, vocab_size]))
    count = data.draw(st.sampled_from([0, 1, 40, 300]))
    records = [dice.integers(0, top, dice.integers(1, 65)) for _ in range(count)]
    chosen = {"vocab_size": vocab_size, "loss_mask": data.draw(st.booleans()), "block_bytes": 600}
    found, plain = (
        write(records, "a.loongbin", codec=options, **chosen),
        write(records, "b.loongbin", **chosen),
    )
    assert lff.verify(found).problems == []
    with lff.Reader(found) as one, lff.Reader(plain) as other:
        assert len(one) == len(other) == count
        for i in range(count):
            a, b = one.record(i), other.record(i)
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.flags == b.flags
            assert np.array_equal(a.loss_mask, b.loss_mask)
