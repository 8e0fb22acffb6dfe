"""The container by the byte: what SPEC.md says is enough to read it (ckpt_spec.py does)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from ckpt_spec import CODECS_SEEN, read_by_the_spec
from ckpt_states import bits, copy_of, state
from hypothesis import given, settings
from hypothesis import strategies as st

import lf_ckpt
from lf_ckpt.jsonio import canonical, decode_item, encode_item, parse_canonical


@pytest.mark.parametrize("compress", ["raw", "auto", "zstd"])
def test_the_spec_is_enough_to_read_full_and_delta_steps(tmp_path: Path, compress: str) -> None:
    tensors = {
        **state(),
        "big": torch.arange(300_000),
        "half": torch.randn(5000).bfloat16(),
        "none": torch.empty(0),
    }
    tensors["tied"] = tensors["half"]
    with lf_ckpt.open(tmp_path, compress=compress) as store:  # type: ignore[arg-type]
        store.save(1, tensors).wait()
        changed = {**tensors, "layer0.weight": torch.zeros(20_000)}
        assert store.save(2, changed).wait().kind == "delta"

    for folder, wanted in (("1", tensors), ("2", changed)):
        found = read_by_the_spec(tmp_path, folder)
        assert found == {name: bits(tensor) for name, tensor in wanted.items()}


def test_the_spec_is_enough_to_read_every_codec(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    first = {
        "unchanged": torch.randn(20_000, generator=chance),
        "moved": torch.randn(20_000, generator=chance),
        "few": torch.randn(40_000, generator=chance).bfloat16(),
        "rows": torch.randn(16, 2048, generator=chance),
        "flags": torch.randint(0, 2**62, (9000,), generator=chance),
        "noise": torch.randint(0, 255, (9001,), generator=chance, dtype=torch.uint8),
    }
    second = copy_of(first)
    second["moved"] += 1e-4 * torch.randn(20_000, generator=chance)
    second["few"].view(torch.int16)[::77] += 1
    second["rows"].view(torch.uint8)[7] = torch.randint(0, 255, (8192,), generator=chance, dtype=torch.uint8)
    second["flags"] ^= 1 << 40
    second["noise"] = torch.zeros(9001, dtype=torch.uint8)
    CODECS_SEEN.clear()
    with lf_ckpt.open(tmp_path) as store:
        store.save(1, first).wait()
        store.save(2, second, {"blob": b"text " * 900}).wait()

    for folder, wanted in (("1", first), ("2", second)):
        assert read_by_the_spec(tmp_path, folder) == {name: bits(tensor) for name, tensor in wanted.items()}
    assert {0, 1, 2, 3, 4, 5, 6} == CODECS_SEEN


def test_no_pickle_anywhere(tmp_path: Path) -> None:
    """Only the importers of other formats know of it, and whatever a store holds is our own format or JSON."""
    items = {"a": lf_ckpt.pack({(1, 2): {3}, "x": b"bytes"}, "a")[0], "note": "text"}
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, {"x": torch.randn(300), "y": torch.ones(3, dtype=torch.int8)}, items).wait()
        lf_ckpt.export_file(store, 1, tmp_path / "store/one.lfckpt")
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size]
    assert {path.suffix for path in files} >= {".lfckpt", ""}
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"\x89LFC") or json.loads(data) is not None, path
        assert not zipfile.is_zipfile(path)
    package = Path(lf_ckpt.__file__).parent
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "interop") or path.name == "import_.py":
            continue
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "torch.save" not in text


def test_the_public_surface_is_listed_and_real() -> None:
    assert len(set(lf_ckpt.__all__)) == len(lf_ckpt.__all__)
    assert all(hasattr(lf_ckpt, name) for name in lf_ckpt.__all__)


text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("$abytesflo", max_size=8), inner),
    max_leaves=20,
)


def in_order(value: object) -> str:
    """Text of a value that tells every type and float apart but not the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{in_order(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(in_order, value)) + "]" if isinstance(value, list) else repr(value)


@settings(max_examples=60, deadline=None)
@given(json_values)
def test_items_survive_canonical_json(value: object) -> None:
    text = canonical(encode_item(value, "x"))

    assert in_order(decode_item(parse_canonical(text))) == in_order(value)


NOT_CANONICAL = [b'{"a": 1}', b'{"b":1,"a":2}', b"1.0e5", b'"\\u0041"', b"[1,]", b"\xc3\xa4", b" 1", b"NaN"]


@pytest.mark.parametrize("text", NOT_CANONICAL)
def test_text_that_is_not_canonical_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_canonical(text)
