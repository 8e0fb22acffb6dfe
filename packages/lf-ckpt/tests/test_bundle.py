"""One self-contained file of a step: it resumes a run elsewhere, bit for bit, and no damage to it goes unseen."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_faults import FailAtCall, Killed, StopAtCall, Volatile
from ckpt_states import assert_same, bits, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_format import read_by_the_spec
from test_shards import write_step
from torch import nn

import lf_ckpt
from lf_ckpt.boxes import Box
from lf_ckpt.interop import bundle, bundle_reader

ITEMS = {"epoch": 3, "loader": {"offset": [1, 2]}, "blob": b"b" * 9000}
OLD = {**state(1, size=90_000), "tied": torch.zeros(0)}


def new() -> dict[str, torch.Tensor]:
    tensors = {**OLD, "layer0.weight": torch.linspace(0, 1, 90_000), "big": torch.randn(400_000)}
    return {**tensors, "tied": tensors["layer1.weight"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose step 2 is a delta, and what step 2 holds exported."""
    folder = tmp_path_factory.mktemp("bundle")
    with lf_ckpt.open(folder / "store") as store:
        store.save(1, OLD).wait()
        assert store.save(2, new(), ITEMS).wait().kind == "delta"
        lf_ckpt.export_file(store, 2, folder / "step.lfckpt")
    return folder


@pytest.fixture
def wanted(folder: Path) -> dict[str, torch.Tensor]:
    with lf_ckpt.open(folder / "store", read_only=True) as store:
        return store.load(2).tensors


@pytest.fixture
def moved(folder: Path, tmp_path: Path) -> Path:
    """The file alone, under another name in another place."""
    shutil.copy(folder / "step.lfckpt", tmp_path / "anything")
    return tmp_path / "anything"


def test_a_delta_becomes_a_file_that_needs_nothing_else(moved: Path, wanted: dict[str, torch.Tensor]) -> None:
    loaded = lf_ckpt.load_file(moved)

    assert loaded.step == 2
    assert loaded.report.kind == "full"
    assert_same(loaded.tensors, wanted)
    assert loaded.tensors["tied"] is loaded.tensors["layer1.weight"]
    assert loaded.items == ITEMS
    assert lf_ckpt.verify_file(moved) == sum(t.nbytes for n, t in wanted.items() if n != "tied") + 9000


def test_the_report_says_what_is_in_the_file(folder: Path, tmp_path: Path) -> None:
    with lf_ckpt.open(folder / "store", read_only=True) as store:
        report = lf_ckpt.export_file(store, "latest", tmp_path / "x.lfckpt", only=["layer*", "tied"])

    assert (report.step, report.tensors, report.left_out) == (2, 3, 2)
    assert report.aliases == (("tied", "layer1.weight"),)
    assert report.files == (("x.lfckpt", (tmp_path / "x.lfckpt").stat().st_size),)
    assert lf_ckpt.load_file(tmp_path / "x.lfckpt").items == ITEMS


def test_a_tie_whose_first_name_is_left_out_keeps_its_bytes(
    folder: Path, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    with lf_ckpt.open(folder / "store", read_only=True) as store:
        lf_ckpt.export_file(store, 2, tmp_path / "x.lfckpt", only="tied")

    assert_same(lf_ckpt.load_file(tmp_path / "x.lfckpt").tensors, {"tied": wanted["tied"]})


def test_the_options_of_load_hold_for_a_file(moved: Path, wanted: dict[str, torch.Tensor]) -> None:
    into = {"a": torch.zeros(300, 300, dtype=torch.float64)}

    report = lf_ckpt.load_file(
        moved, into, only="layer1.weight", map_names={"layer1.weight": "a"}, reshape=True, cast=True
    ).report

    assert bits(into["a"]) == bits(wanted["layer1.weight"].double().view(300, 300))
    assert report.renamed == (("layer1.weight", "a"),)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_file_is_read_directly_or_not_as_asked(
    moved: Path, wanted: dict[str, torch.Tensor], io: Any
) -> None:
    try:
        loaded = lf_ckpt.load_file(moved, io=io)
    except lf_ckpt.CkptError as error:
        if "cannot be had" in str(error):
            pytest.skip(str(error))
        raise

    assert loaded.report.io.startswith(io)
    assert_same(loaded.tensors, wanted)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_run_resumes_elsewhere_from_the_file_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = run(0)
    train(model, optimizer, 3)
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(3, *lf_ckpt.collect(model, optimizer, rng=True)).wait()
        lf_ckpt.export_file(store, 3, tmp_path / "run.lfckpt")
    shutil.rmtree(tmp_path / "store")
    train(model, optimizer, 2)

    fresh, new_optimizer = run(1)
    with lf_ckpt.open(tmp_path / "elsewhere") as store:
        store.save(3, *lf_ckpt.import_file(tmp_path / "run.lfckpt")).wait()
        assert lf_ckpt.resume(store, fresh, new_optimizer, rng=True) == 3
    train(fresh, new_optimizer, 2)

    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(lf_ckpt.collect(fresh, new_optimizer).tensors, lf_ckpt.collect(model, optimizer).tensors)


def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    rows = torch.randn(3000, 4)
    cut = [(0, Box((0, 0), (2000, 4))), (1, Box((2000, 0), (1000, 4)))]
    write_step(tmp_path / "store", 5, {"rows": rows}, {"rows": cut}, 2)
    with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
        lf_ckpt.export_file(store, 5, tmp_path / "x.lfckpt")

    assert_same(lf_ckpt.load_file(tmp_path / "x.lfckpt").tensors, {"rows": rows})


@pytest.mark.parametrize("rank", [0, 1])
def test_values_kept_per_rank_come_under_their_plain_names(tmp_path: Path, rank: int) -> None:
    whole = {"w": torch.randn(9), "rank-0/rng.torch": torch.zeros(5), "rank-1/rng.torch": torch.ones(7)}
    cut = {name: [(int(name[5:6] or 0), Box((0,), tuple(t.shape)))] for name, t in whole.items()}
    write_step(tmp_path / "store", 5, whole, cut, 2)
    with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
        report = lf_ckpt.export_file(store, 5, tmp_path / "x.lfckpt", rank=rank)
        lf_ckpt.export_safetensors(store, 5, tmp_path / "weights", rank=rank)
        with pytest.raises(lf_ckpt.CkptError, match="saved by ranks 0 to 1"):
            lf_ckpt.export_file(store, 5, tmp_path / "y.lfckpt", rank=2)

    wanted = {"w": whole["w"], "rng.torch": whole[f"rank-{rank}/rng.torch"]}
    assert_same(lf_ckpt.load_file(tmp_path / "x.lfckpt").tensors, wanted)
    assert_same(lf_ckpt.import_safetensors(tmp_path / "weights").tensors, wanted)
    assert (report.tensors, report.left_out) == (2, 1)
    assert not (tmp_path / "y.lfckpt").exists()


def canonical_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    values = torch.arange(300_000, dtype=torch.int32)
    tensors = {
        "b": values.view(torch.float32),
        "a": values.to(torch.bfloat16).view(500, 600),
        "empty": torch.empty(0, 2),
    }
    return {**tensors, "tied": tensors["a"]}, {"epoch": 1, "rate": 0.1, "bytes": b"\0\1"}


# sha256 of the file: a change means that files of older versions differ, or that this machine writes other bytes.
CANONICAL = "18bd9cdacc5d67548bb95508ce76ccc62c806ea859819650912248491c2205e6"


@pytest.mark.parametrize("compress", ["raw", "zstd"])
def test_a_canonical_file_has_the_same_bytes_everywhere(tmp_path: Path, compress: Any) -> None:
    tensors, items = canonical_state()
    found = set()
    for number, order in enumerate((1, -1)):
        with lf_ckpt.open(tmp_path / str(number), compress=compress) as store:
            if number:
                store.save(6, {"a": tensors["a"]}).wait()
            named = {name: tensors[name] for name in list(tensors)[::order]}
            store.save(7, named, items, metrics={"loss": 0.5}).wait()
            lf_ckpt.export_file(store, 7, tmp_path / f"{number}.lfckpt", canonical=True)
            found.add(hashlib.sha256((tmp_path / f"{number}.lfckpt").read_bytes()).hexdigest())

    assert found == {CANONICAL}


def test_two_hundred_flipped_bits_are_all_found(moved: Path, wanted: dict[str, torch.Tensor]) -> None:
    chance, good = random.Random(1), moved.read_bytes()
    places = [chance.randrange(len(good)) for _ in range(150)] + [len(good) - 1 - i * 7 for i in range(50)]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << chance.randrange(8)
        moved.write_bytes(bad)
        with pytest.raises(lf_ckpt.CorruptError, match="anything"):
            lf_ckpt.verify_file(moved)
        with contextlib.suppress(lf_ckpt.CorruptError):
            assert_same(lf_ckpt.load_file(moved).tensors, wanted)  # padding carries nothing


@pytest.mark.parametrize("cut", [0, 1, 100, 4096, 0.5, -4096, -129, -128, -1])
def test_cut_and_grown_files_are_damage(moved: Path, cut: float) -> None:
    good = moved.read_bytes()
    moved.write_bytes(good[: int(len(good) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(lf_ckpt.CorruptError):
        lf_ckpt.load_file(moved)
    moved.write_bytes(good + b"\0")
    with pytest.raises(lf_ckpt.CorruptError):
        lf_ckpt.load_file(moved)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_forged_footers_are_damage(folder: Path, data: st.DataObject) -> None:
    good = (folder / "step.lfckpt").read_bytes()
    footer = bundle.parse_footer(good[-128:], len(good), "x")
    numbers = [data.draw(st.sampled_from([n, 0, n - 1, n + 4096, 1 << 63])) for n in footer[:3]]
    forged = bundle.Footer(*numbers, data.draw(st.sampled_from([footer.root, bytes(32)])))
    path = folder / "forged.lfckpt"
    path.write_bytes(good[:-128] + bundle.pack_footer(forged))
    try:
        with bundle_reader(path):
            assert forged == footer
    except lf_ckpt.CorruptError:
        assert forged != footer


def test_a_data_file_of_a_store_is_no_bundle(folder: Path) -> None:
    with pytest.raises(lf_ckpt.CorruptError, match=r"not an \.lfckpt bundle"):
        lf_ckpt.load_file(folder / "store/steps/1/rank-0.lfckpt")
    with pytest.raises(lf_ckpt.CkptError, match="cannot be read"):
        lf_ckpt.load_file(folder / "gone.lfckpt")


def test_the_first_part_of_a_bundle_is_a_data_file_as_specified(
    moved: Path, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    data = moved.read_bytes()
    footer = bundle.parse_footer(data[-128:], len(data), "x")
    step = tmp_path / "steps/2"
    step.mkdir(parents=True)
    (step / "rank-0.lfckpt").write_bytes(data[: footer.data_bytes])
    (step / "MANIFEST").write_bytes(data[footer.data_bytes : -128])

    assert read_by_the_spec(tmp_path, "2") == {n: bits(t) for n, t in wanted.items()}


@pytest.mark.parametrize("at", range(7))
def test_an_export_that_fails_leaves_no_file(folder: Path, tmp_path: Path, at: int) -> None:
    files = FailAtCall(at, errno.ENOSPC)
    files.armed = True
    with (
        lf_ckpt.open(folder / "store", read_only=True) as store,
        pytest.raises(lf_ckpt.CkptError, match="No space"),
    ):
        lf_ckpt.export_file(store, 2, tmp_path / "x.lfckpt", files=files)

    assert os.listdir(tmp_path) == []


def test_an_export_that_dies_at_any_call_leaves_a_whole_file_or_none(
    folder: Path, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    done = 0
    for at in range(100):
        target = tmp_path / f"{at}.lfckpt"
        files = Volatile()
        files.arm(at)
        with lf_ckpt.open(folder / "store", read_only=True) as store:
            try:
                lf_ckpt.export_file(store, 2, target, files=files)
                done += 1
            except Killed:
                pass
        files.cut_power(lose_data=True, lose_names=False)
        if target.exists():
            assert_same(lf_ckpt.load_file(target).tensors, wanted)
        if done:
            break
    assert done
    assert at > 8


def test_a_stopped_export_does_not_hinder_the_next(folder: Path, tmp_path: Path) -> None:
    files = StopAtCall()
    files.arm(3)
    with lf_ckpt.open(folder / "store", read_only=True) as store:
        with pytest.raises(Killed):
            lf_ckpt.export_file(store, 2, tmp_path / "x.lfckpt", files=files)
        lf_ckpt.export_file(store, 2, tmp_path / "x.lfckpt")

    assert os.listdir(tmp_path) == ["x.lfckpt"]


def test_a_directory_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(lf_ckpt.CkptError, match="cannot be read"):
        lf_ckpt.load_file(tmp_path)
