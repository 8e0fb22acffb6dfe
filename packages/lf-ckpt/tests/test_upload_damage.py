"""Steps that an upload finds damaged: named once, never copied, base of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_upload import STATES, check_copy, place, save

import lf_ckpt


def test_a_damaged_step_is_not_uploaded_and_is_named(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "local") as store:
        save(store, 1)
    data = bytearray((tmp_path / "local/steps/1/rank-0.lfckpt").read_bytes())
    data[5000] ^= 1
    (tmp_path / "local/steps/1/rank-0.lfckpt").write_bytes(data)

    store = lf_ckpt.open(tmp_path / "local", upload=place(tmp_path))
    with pytest.raises(lf_ckpt.UploadError, match="differ from their hash"):
        store.close()
    check_copy(tmp_path / "remote", ())


def test_a_damaged_step_holds_up_no_other_and_is_named_once(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "local", full_every=0) as store:
        save(store, 1, 2)
    data = bytearray((tmp_path / "local/steps/1/rank-0.lfckpt").read_bytes())
    data[5000] ^= 1
    (tmp_path / "local/steps/1/rank-0.lfckpt").write_bytes(data)

    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path), full_every=0) as store:
        with pytest.raises(lf_ckpt.UploadError, match=r"step 1: .* differ from their hash") as caught:
            store.wait_uploaded()
        assert caught.value.steps == (1,)
        save(store, 3)
        store.wait_uploaded()
    check_copy(tmp_path / "remote", (2, 3))


def test_a_delta_on_a_damaged_base_is_not_uploaded_and_is_named(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path, hold=False)) as store:
        save(store, 1)
    for folder in (tmp_path / "remote/steps/1").iterdir():
        folder.unlink()
    (tmp_path / "remote/steps/1").rmdir()
    with lf_ckpt.open(tmp_path / "local") as store:
        store.load()
        save(store, 2)
        assert store.wait().kind == "delta"  # type: ignore[union-attr]
    data = bytearray((tmp_path / "local/steps/1/rank-0.lfckpt").read_bytes())
    data[5000] ^= 1
    (tmp_path / "local/steps/1/rank-0.lfckpt").write_bytes(data)

    store = lf_ckpt.open(tmp_path / "local", upload=place(tmp_path))
    with pytest.raises(lf_ckpt.UploadError, match=r"step 1: .*; step 2: .* base 1 is damaged"):
        store.close()
    check_copy(tmp_path / "remote", ())


class SpoilsFirstStep(lf_ckpt.FileLayer):
    """A disk that loses a bit of step 1 when it is committed."""

    def rename(self, old: str, new: str) -> None:
        if new.endswith("/1/MANIFEST"):
            path = Path(new).with_name("rank-0.lfckpt")
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        super().rename(old, new)


def test_a_step_that_an_upload_finds_damaged_is_no_base_any_more(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "local", upload=place(tmp_path), files=SpoilsFirstStep()) as store:
        save(store, 1)
        with pytest.raises(lf_ckpt.UploadError, match="step 1: "):
            store.wait_uploaded()
        assert store.save(2, STATES[2]).wait().kind == "full"
        assert store.save(3, STATES[3]).wait().base == "2"

    check_copy(tmp_path / "remote", (2, 3))
