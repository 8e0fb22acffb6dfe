"""JSONL with image paths: pixels equal a plain PIL decode, JPEG files stay as they are, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

image = pytest.importorskip("PIL.Image")

import lf_format as lff  # noqa: E402
from lf_format import preprocess_cli  # noqa: E402

SIZE = (16, 20)


def _write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Six JPEG images of different sizes, one gray, with texts of different lengths; the fourth text is empty."""
    folder = tmp_path / "in"
    (folder / "images").mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = []
    for k in range(6):
        shape = (16 + k, 20 + 2 * k) + ((3,) if k != 2 else ())
        image.fromarray(random.integers(0, 256, shape).astype(np.uint8)).save(folder / f"images/{k}.jpg")
        rows.append({"text": "" if k == 3 else "ab" * (k + 1), "image": f"images/{k}.jpg"})
    return _write(folder, rows)


def _texts(reader: lff.Reader) -> list[bytes]:
    return [bytes(reader.record(i).tokens.tolist()) for i in range(len(reader))]


@pytest.mark.parametrize("workers", [1, 3])
def test_pixels_equal_a_plain_decode(pairs: Path, tmp_path: Path, workers: int) -> None:
    report = lff.preprocess_pairs(pairs, tmp_path / "out", image_size=SIZE, max_len=32, num_workers=workers)
    assert (report.records, report.tokens) == (5, 2 * (1 + 2 + 3 + 5 + 6))
    assert [reason for _, reason in report.empty] == ["no token"]
    assert report.empty[0][0].endswith("pairs.jsonl:4")
    assert report.notes == ("1 images of mode L became RGB",)
    with lff.Reader(report.output.path) as reader:
        assert _texts(reader) == [b"ab" * (k + 1) for k in (0, 1, 2, 4, 5)]
        for i, k in enumerate((0, 1, 2, 4, 5)):
            plain = image.open(pairs.parent / f"images/{k}.jpg").convert("RGB")
            plain = plain.resize((SIZE[1], SIZE[0]), image.Resampling.BILINEAR)
            assert (reader.record(i)["image"] == np.asarray(plain)).all()
    assert lff.verify(report.output.path).ok


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_are_turned_as_exif_says(tmp_path: Path, orientation: int, kind: str) -> None:
    """Corners of four colours, stored turned, come out upright."""
    upright = np.kron(
        np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]]), np.ones((16, 16, 1))
    )
    back = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
    back |= {6: "ROTATE_90", 7: "TRANSVERSE", 8: "ROTATE_270"}
    stored = image.fromarray(upright.astype(np.uint8))
    if orientation > 1:
        stored = stored.transpose(image.Transpose[back[orientation]])
    exif = image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.img", kind, exif=exif)
    lines = _write(tmp_path, [{"text": "a", "image": "a.img"}])
    report = lff.preprocess_pairs(lines, tmp_path / "out", image_size=(32, 32))
    with lff.Reader(report.output.path) as reader:
        found = reader.record(0)["image"][8::16, 8::16].astype(int)
    assert np.abs(found - upright[8::16, 8::16]).max() < 10


def test_a_large_jpeg_is_decoded_at_a_fraction_close_to_the_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    coarse = random.integers(0, 256, (12, 16, 3)).astype(np.uint8)
    picture = image.fromarray(coarse).resize((1280, 960), image.Resampling.BICUBIC)
    picture.save(tmp_path / "large.jpg", quality=95)
    lines = _write(tmp_path, [{"text": "a", "image": "large.jpg"}])
    report = lff.preprocess_pairs(lines, tmp_path / "out", image_size=(96, 128))
    whole = picture.resize((128, 96), image.Resampling.BILINEAR)
    with lff.Reader(report.output.path) as reader:
        error = reader.record(0)["image"].astype(float) - np.asarray(whole)
    assert 10 * np.log10(255**2 / np.mean(error**2)) > 45


def test_without_a_size_files_stay_as_they_are(pairs: Path, tmp_path: Path) -> None:
    report = lff.preprocess_pairs(pairs, tmp_path / "out", image_size=None)
    with lff.Reader(report.output.path) as reader:
        for i, k in enumerate((0, 1, 2, 4, 5)):
            assert reader.record(i)["image"].tobytes() == (pairs.parent / f"images/{k}.jpg").read_bytes()


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": "a", "image": "missing.jpg"}, "cannot be read"),
        ({"text": "a", "image": "pairs.jsonl"}, "cannot be decoded"),
        ({"text": "a", "image": "images"}, "no regular file"),
        ({"text": "a", "image": "/dev/zero"}, "no regular file"),
        ({"text": "a", "image": "images/deep.png"}, "more than 8 bits"),
        ({"text": "a"}, "image path"),
        ({"text": 1, "image": "images/0.jpg"}, "image path"),
        ({"text": "a" * 33, "image": "images/0.jpg"}, "max_len"),
    ],
)
def test_a_line_that_cannot_be_stored_is_named(
    pairs: Path, tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    _write(pairs.parent, [{"text": "ok", "image": "images/1.jpg"}, row])
    image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(pairs.parent / "images/deep.png")
    for workers in (1, 2):
        options: dict[str, Any] = {"image_size": SIZE, "max_len": 32, "num_workers": workers}
        with pytest.raises(lff.InputError, match=what) as caught:
            lff.preprocess_pairs(pairs, tmp_path / "out", **options)
        assert "pairs.jsonl:2" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_writes_the_same_file(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--image-key", "image", "--image-size", "16", "20", "--max-len", "32"]
    for inputs, name in ((pairs, "file"), (pairs.parent, "folder")):
        assert preprocess_cli.main(["--input", str(inputs), "--output", str(tmp_path / name), *options]) == 0
    assert "5 records, 34 tokens" in capsys.readouterr().out
    report = lff.preprocess_pairs(pairs, tmp_path / "api", image_size=SIZE, max_len=32)
    for name in ("file", "folder"):
        assert (tmp_path / name / "train.lfg").read_bytes() == Path(report.output.path).read_bytes()
    assert (
        preprocess_cli.main(["--input", str(pairs), "--output", str(tmp_path), "--image-size", "8", "8"]) == 2
    )
    wrong = ["--image-key", "image", "--eval-fraction", "0.1"]
    assert preprocess_cli.main(["--input", str(pairs), "--output", str(tmp_path), *wrong]) == 2


def test_the_codec_of_the_samples_may_be_chosen(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--input", str(pairs), "--image-key", "image", "--image-size", "16", "20"]
    for codec in ("raw", "auto"):
        assert preprocess_cli.main([*common, "--output", str(tmp_path / codec), "--codec", codec]) == 0
    assert "codec " in capsys.readouterr().out
    with lff.Reader(tmp_path / "raw/train.lfg") as raw, lff.Reader(tmp_path / "auto/train.lfg") as auto:
        assert [raw.record(i)["image"].tobytes() for i in range(5)] == [
            auto.record(i)["image"].tobytes() for i in range(5)
        ]
    assert preprocess_cli.main([*common, "--output", str(tmp_path / "no"), "--codec", "packed"]) == 2
    assert "codec of a .lfg" in capsys.readouterr().err


def test_a_file_that_is_no_jpeg_is_named_by_its_line_when_files_are_kept(pairs: Path, tmp_path: Path) -> None:
    _write(pairs.parent, [{"text": "ok", "image": "images/1.jpg"}, {"text": "a", "image": "pairs.jsonl"}])
    with pytest.raises(lff.InputError, match=r"pairs\.jsonl:2: .*JPEG"):
        lff.preprocess_pairs(pairs, tmp_path / "out", image_size=None)
