"""torch.save files and DCP folders of several ranks: no code of theirs runs, damage is a typed error."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_states import assert_same, bits
from test_interop import Payload
from torch import nn

import lf_ckpt


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_save_file_becomes_names_and_items(tmp_path: Path, zipped: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "tied": model.weight.detach(),
    }
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)

    imported = lf_ckpt.import_torch(tmp_path / "old.pt")
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(0, *imported).wait()
        loaded = store.load()
    fresh = nn.Linear(3, 2)
    new_optimizer = torch.optim.AdamW(fresh.parameters())
    lf_ckpt.restore(fresh, None, loaded, strict=False)
    new_optimizer.load_state_dict(lf_ckpt.unpack(loaded.items["optimizer"], loaded.tensors))

    assert {"model.weight", "model.bias", "optimizer.state.0.exp_avg", "tied"} <= loaded.tensors.keys()
    assert loaded.items["epoch"] == 3
    assert loaded.tensors["tied"] is loaded.tensors["model.weight"]
    assert_same(fresh.state_dict(), model.state_dict())
    assert bits(new_optimizer.state[fresh.bias]["exp_avg"]) == bits(optimizer.state[model.bias]["exp_avg"])


def test_code_in_a_torch_file_is_refused_and_does_not_run(tmp_path: Path) -> None:
    torch.save({"model": Payload()}, tmp_path / "evil.pt")

    with pytest.raises(lf_ckpt.UnsupportedError, match="neither tensor nor plain data"):
        lf_ckpt.import_torch(tmp_path / "evil.pt")
    assert not Path("/tmp/lf-ckpt-was-here").exists()


def test_a_flipped_bit_in_a_torch_file_is_found(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(50_000)}, tmp_path / "old.pt")
    data = bytearray((tmp_path / "old.pt").read_bytes())
    data[100_000] ^= 1
    (tmp_path / "old.pt").write_bytes(data)

    with pytest.raises(lf_ckpt.CorruptError, match="CRC"):
        lf_ckpt.import_torch(tmp_path / "old.pt")
    assert lf_ckpt.import_torch(tmp_path / "old.pt", verify=False).tensors["w"].count_nonzero() == 1


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_cut_torch_file_is_damage(tmp_path: Path, cut: int) -> None:
    torch.save({"w": torch.zeros(500)}, tmp_path / "old.pt")
    data = (tmp_path / "old.pt").read_bytes()
    (tmp_path / "old.pt").write_bytes(data[:cut])
    with pytest.raises(lf_ckpt.CkptError, match=r"old\.pt"):
        lf_ckpt.import_torch(tmp_path / "old.pt")


def test_a_torch_file_without_names_is_unsupported(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "old.pt")
    with pytest.raises(lf_ckpt.UnsupportedError, match="a mapping of names"):
        lf_ckpt.import_torch(tmp_path / "old.pt")
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "old.pt")
    with pytest.raises(lf_ckpt.CkptError, match=r"'a\.b'"):
        lf_ckpt.import_torch(tmp_path / "old.pt")


def write_dcp(folder: Path, whole: torch.Tensor, rows: list[tuple[int, int]], **changes: Any) -> None:
    """A DCP folder as several ranks write it: `rows` of a tensor in a file each."""
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    chunks, places = [], {}
    for rank, (first, count) in enumerate(rows):
        offsets = torch.Size([first, 0])
        buffer = io.BytesIO()
        torch.save(whole[first : first + count].clone(), buffer)
        (folder / f"__{rank}_0.distcp").write_bytes(b"other part" + buffer.getvalue())
        chunks.append(m.ChunkStorageMetadata(offsets, torch.Size([count, whole.shape[1]])))
        length = changes.get("length", len(buffer.getvalue()))
        name = changes.get("file", f"__{rank}_0.distcp")
        places[m.MetadataIndex("w", offsets)] = _StorageInfo(name, 10, length)
    size = changes.get("size", whole.shape)
    entry = m.TensorStorageMetadata(m.TensorProperties(dtype=whole.dtype), torch.Size(size), chunks)
    document = m.Metadata({"w": entry}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(document))


def test_a_key_of_dcp_metadata_that_grows_when_hashed_is_refused(tmp_path: Path) -> None:
    """Forty tuples, each twice in the next, are 2**40 for whoever walks through them."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    nested: tuple[Any, ...] = (1,)
    for _ in range(40):
        nested = (nested, nested)
    key = MetadataIndex("w")
    object.__setattr__(key, "offset", nested)
    tmp_path.joinpath(".metadata").write_bytes(b"\x80\x02}" + pickle.dumps(key, 2)[2:-1] + b"K\x01s.")

    with pytest.raises(lf_ckpt.CorruptError, match="a key of the metadata holds a tuple"):
        lf_ckpt.import_dcp(tmp_path)


def test_shards_of_a_dcp_folder_are_put_together(tmp_path: Path) -> None:
    whole = torch.randn(7, 3)
    write_dcp(tmp_path / "dcp", whole, [(0, 4), (4, 3), (7, 0)])  # uneven, and one rank without rows

    assert_same(lf_ckpt.import_dcp(tmp_path / "dcp").tensors, {"w": whole})


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([(0, 4), (5, 2)], {}),  # a hole
        ([(0, 4), (3, 4)], {}),  # an overlap
        ([(0, 4), (4, 3)], {"size": (1 << 30, 1 << 30)}),
        ([(0, 7)], {"size": (7, 4)}),
        ([(0, 7)], {"length": 3}),
        ([(0, 7)], {"length": 1 << 40}),
        ([(0, 7)], {"file": "../dcp/__0_0.distcp"}),
        ([(0, 7)], {"file": "/etc/hostname"}),
        ([(0, 7)], {"file": "gone"}),
        ([], {}),
    ],
)
def test_dcp_metadata_that_does_not_fit_is_a_typed_error(
    tmp_path: Path, rows: list[tuple[int, int]], changes: dict[str, Any]
) -> None:
    write_dcp(tmp_path / "dcp", torch.randn(7, 3), rows, **changes)
    with pytest.raises(lf_ckpt.CkptError):
        lf_ckpt.import_dcp(tmp_path / "dcp")
