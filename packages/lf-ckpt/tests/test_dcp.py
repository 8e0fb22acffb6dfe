"""torch.distributed.checkpoint through lf-ckpt: FSDP2 state on real Gloo ranks, in an ordinary store."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import ckpt_dcp_jobs as jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_ranks import Ranks
from ckpt_states import bits
from test_corruption import flip_in_extent
from torch.distributed.checkpoint.planner import LoadPlan

import lf_ckpt
from lf_ckpt import cli
from lf_ckpt.dcp import LfLoadPlanner, LfSavePlanner, LfStorageReader, LfStorageWriter
from lf_ckpt.dcp.naming import step_of

EXTRA = {"epoch": 3, "betas": (0.9, 0.95), "note": "ä", "raw": b"\0\1", "list": [1, {"a": None}]}


@pytest.fixture(scope="module", params=[False, True], ids=["save", "async_save"])
def saved(
    request: pytest.FixtureRequest, fsdp_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, jobs.Bits]:
    """FSDP2 and AdamW saved twice by three ranks, in the foreground or in DCP's thread."""
    path = tmp_path_factory.mktemp("dcp") / "store"
    answers = fsdp_ranks.call(jobs.save_with_dcp, 3, path=str(path), in_background=request.param)
    assert all(kinds == ["full", "delta"] for _, kinds in answers)
    return path, answers[0][0]


def test_the_store_is_an_ordinary_one(
    saved: tuple[Path, jobs.Bits], capsys: pytest.CaptureFixture[str]
) -> None:
    path, wanted = saved
    with lf_ckpt.open(path, read_only=True) as store:
        assert store.steps() == (10, 20)
        loaded = store.load(10)
    assert {name: bits(tensor) for name, tensor in loaded.tensors.items()} == wanted
    assert loaded.items["extra.epoch"] == 3
    assert cli.main(["verify", str(path), "--deep"]) == 0
    assert cli.main(["ls", str(path)]) == 0
    assert "delta" in capsys.readouterr().out


@pytest.mark.parametrize("world", [1, 2, 5])
def test_it_loads_on_any_number_of_ranks(ranks: Ranks, saved: tuple[Path, jobs.Bits], world: int) -> None:
    path, wanted = saved
    for found, extra in ranks.call(jobs.load_with_dcp, world, path=str(path)):
        assert found == wanted
        assert extra == EXTRA


def test_a_stock_planners_pickle_is_refused_until_it_is_allowed(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.call(jobs.refuse_pickle, 2, path=str(tmp_path)):
        refused, written, unread, nothing, read, value = said
        assert "LfSavePlanner" in refused
        assert "value" in refused
        assert (written, nothing, read, value) == ("done", "None", "done", "{1, 2}")
        assert "allow_pickle=True" in unread
    with lf_ckpt.open(tmp_path / "False", read_only=True) as store:
        assert store.steps() == ()


@pytest.mark.parametrize("world", [1, 3])
def test_tied_tensors_are_stored_once_and_read_under_each_name(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    """DCP gives the names of tensors that all ranks have to one rank each: no rank writes both."""
    answers = ranks.call(jobs.save_tied, world, path=str(tmp_path))
    assert all(all(same) for _, same in answers)
    assert sum(raw for raw, _ in answers) == 4 * (1000 + 2000 + 1000)
    manifest = json.loads((tmp_path / "steps/1/MANIFEST").read_bytes())["body"]
    assert manifest["aliases"] == {"b": "a", "t": "s"}
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 0


def test_dcp_reads_what_the_store_has_saved(ranks: Ranks, tmp_path: Path) -> None:
    for values, missing in ranks.call(jobs.read_a_store_save, 3, path=str(tmp_path)):
        assert values == [0, 1, 2, 3, 4, 5, 6, 5]
        assert "y" in missing


def test_one_process_without_a_group_saves_and_loads(tmp_path: Path) -> None:
    state = {"a": {"b": torch.randn(3, 4), "n": 7}, "empty": torch.empty(0, 2), "scalar": torch.tensor(1.5)}
    writer = LfStorageWriter(tmp_path, full_every=3)
    dcp.save(state, storage_writer=writer, planner=LfSavePlanner())
    dcp.save(state, storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    into = {"a": {"b": torch.zeros(3, 4), "n": 0}, "empty": torch.empty(0, 2), "scalar": torch.tensor(0.0)}
    dcp.load(into, storage_reader=LfStorageReader(tmp_path), planner=LfLoadPlanner())

    assert torch.equal(into["a"]["b"], state["a"]["b"])
    assert (into["a"]["n"], float(into["scalar"])) == (7, 1.5)
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert store.steps() == (0, 1)


@pytest.mark.parametrize("flatten", [True, False])
def test_values_come_back_as_the_types_that_the_state_dict_has(tmp_path: Path, flatten: bool) -> None:
    state = {"n": 3, "nested": (1, [(2, 3), {"betas": (0.9, 0.95), "none": None}]), "list": [(1,), [2]]}
    writer = LfStorageWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=LfSavePlanner(flatten_state_dict=flatten))
    writer.close()
    into = {"n": 0, "nested": (0, [(0, 0), {"betas": (0.0, 0.0), "none": 1}]), "list": [(0,), [0]]}
    dcp.load(
        into, storage_reader=LfStorageReader(tmp_path), planner=LfLoadPlanner(flatten_state_dict=flatten)
    )

    assert into == state


def test_ranks_that_see_different_newest_steps_load_nothing(tmp_path: Path) -> None:
    plans = []
    with lf_ckpt.open(tmp_path) as store:
        for step in (1, 2):  # a writer commits between the looks of two ranks
            store.save(step, {"x": torch.ones(3)}).wait()
            reader = LfStorageReader(tmp_path)
            reader.read_metadata()
            plans.append(reader.prepare_local_plan(LoadPlan([])))

    assert reader.prepare_global_plan([plans[1], plans[1]])
    with pytest.raises(lf_ckpt.CkptError, match=r"several steps \(1, 2\)"):
        reader.prepare_global_plan(plans)


def test_tensors_without_memory_of_their_own_are_refused(tmp_path: Path) -> None:
    writer = LfStorageWriter(tmp_path)
    dcp.save({"x": torch.ones(3)}, storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    with pytest.raises(BaseException, match="x: is expanded"):
        dcp.load({"x": torch.zeros(1).expand(3)}, storage_reader=LfStorageReader(tmp_path))


def test_a_flipped_bit_stops_a_dcp_load(tmp_path: Path) -> None:
    writer = LfStorageWriter(tmp_path)
    dcp.save({"x": torch.randn(1000)}, checkpoint_id="1", storage_writer=writer)
    writer.close()
    flip_in_extent(tmp_path / "steps/1/rank-0.lfckpt", "x")

    with pytest.raises(BaseException, match="differ from their hash"):
        dcp.load({"x": torch.zeros(1000)}, storage_reader=LfStorageReader(tmp_path))


def test_values_that_are_no_json_are_refused_by_name(tmp_path: Path) -> None:
    writer = LfStorageWriter(tmp_path)
    with pytest.raises(BaseException, match=r"item x\.y: object"):
        dcp.save({"x": {"y": object()}}, checkpoint_id="1", storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    assert list((tmp_path / "steps").iterdir()) == []


def test_json_values_need_our_load_planner(tmp_path: Path) -> None:
    writer = LfStorageWriter(tmp_path)
    dcp.save({"n": 1}, checkpoint_id="1", storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    with pytest.raises(BaseException, match="LfLoadPlanner"):
        dcp.load({"n": 0}, storage_reader=LfStorageReader(tmp_path))


@pytest.mark.parametrize(("name", "step"), [("100", 100), ("run/step-7", 7), (5, 5), ("a1/epoch_02", 2)])
def test_the_step_is_the_number_at_the_end_of_the_id(name: str | int, step: int) -> None:
    assert step_of(name) == step
    assert LfStorageWriter.validate_checkpoint_id(str(name))


@pytest.mark.parametrize("name", ["latest", "step", "1x", "9" * 30])
def test_an_id_without_a_step_is_refused(name: str) -> None:
    assert not LfStorageReader.validate_checkpoint_id(name)
    with pytest.raises(lf_ckpt.CkptError, match="end it with one"):
        step_of(name)


class NoWay(lf_ckpt.FileLayer):
    """A place for copies that takes no data file."""

    def create(self, path: str) -> int:
        if path.endswith(".lfckpt"):
            raise OSError(errno.ECONNRESET, "connection reset", path)
        return super().create(path)


def test_an_upload_that_failed_is_raised_by_the_next_save(tmp_path: Path) -> None:
    upload = lf_ckpt.Upload(tmp_path / "copy", files=NoWay(), attempts=1, pause=0.0)
    writer = LfStorageWriter(tmp_path / "store", upload=upload)

    def save(times: int) -> None:
        for _ in range(times):
            dcp.save({"x": torch.ones(3)}, storage_writer=writer, planner=LfSavePlanner())

    save(1)
    with pytest.raises(BaseException, match="UploadError.*connection reset"):  # noqa: RUF043
        save(1000)  # the thread tries behind them
    with pytest.raises(lf_ckpt.UploadError):
        writer.close()
