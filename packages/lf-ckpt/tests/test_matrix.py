"""Every kind of step against every way to stop: kill -9, power cut, failing call. LF_FAULTS=N tries N times as much."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ckpt_faults import FailAtCall, FailAtLook, KillAtByte, KillAtCall, Killed, Recorder, Volatile
from ckpt_kinds import KINDS, Kind, copy_of_store
from ckpt_states import assert_same, files_under

import lf_ckpt
from lf_ckpt import cli
from lf_ckpt.errors import RankFailedError

MORE = int(os.environ.get("LF_FAULTS", "1"))
POWER = [(False, False), (True, False), (False, True), (True, True)]  # what is lost: (data, names)
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture(scope="module")
def before(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the steps before."""
    path = tmp_path_factory.mktemp("before") / "store"
    kind.prepare(path)
    return path


@pytest.fixture(scope="module")
def calls(kind: Kind, before: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """Every effect of the save as (name, bytes written before it); the kind is what it is called."""
    path = copy_of_store(before, tmp_path_factory.mktemp("count") / "store")
    files = Recorder()
    reports = kind.act(path, files)  # of the ranks, in the order in which they ended
    assert {report.kind for report in reports} == {kind.kind}
    assert any(kind.codec in report.codecs for report in reports)
    assert_newest(kind, path, (kind.step,))
    return files.calls


def assert_newest(kind: Kind, path: Path, allowed: tuple[int, ...]) -> int:
    """The newest step is one of `allowed`, loads bit for bit without falling back, and a writer can go on."""
    states = kind.states()
    with lf_ckpt.open(path, read_only=True) as store:
        loaded = store.load()
        assert loaded.report.fallbacks == ()
        assert loaded.step in allowed, (loaded.step, allowed)
        assert_same(loaded.tensors, states[loaded.step])
    with lf_ckpt.open(path) as store:
        store.save(9, states[1]).wait()
        assert_same(store.load().tensors, states[1])
        for step in store.steps()[:-1]:
            assert_same(store.load(step).tensors, states[step])
    assert not [name for name in files_under(path) if name.endswith(".tmp")]
    return loaded.step


def kill_points(number: int, calls: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Case A1: before every call, at fixed bytes, at every record edge, and between two edges."""
    # Half of the calls of each kind by default, the other half of its neighbours.
    some = range(len(calls)) if MORE > 1 else range(number % 2, len(calls), 2)
    yield from (("call", at) for at in some)
    edges = sorted({written for _, written in calls})
    end = edges[-1]
    middles = [(a + b) // 2 for a, b in itertools.pairwise(edges)]
    bytes_ = {0, 1, 4095, 4096, 4097, end // 2, end - 1, end, *(middles if MORE > 1 else middles[:1])}
    yield from (("byte", at) for at in sorted(bytes_ | set(edges) if MORE > 1 else bytes_))


def killed(work: Callable[[], object]) -> None:
    """Run `work` in a child that kills itself, or is killed at the end."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        with contextlib.suppress(BaseException):
            work()
        os.kill(os.getpid(), signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_kill_9_leaves_the_step_before_or_the_new_one(
    kind: Kind, before: Path, calls: list[tuple[str, int]], tmp_path: Path
) -> None:
    found = set()
    for what, at in kill_points(KINDS.index(kind), calls):
        path = copy_of_store(before, tmp_path / f"{what}-{at}")
        files: lf_ckpt.FileLayer = KillAtCall(at) if what == "call" else KillAtByte(at)
        killed(lambda path=path, files=files: kind.act(path, files))
        committed = (path / f"steps/{kind.step}/MANIFEST").exists() and kind.name != "marker last"
        allowed = (kind.step,) if committed else (kind.step - 1, kind.step)
        found.add(assert_newest(kind, path, allowed))
    assert found == {kind.step - 1, kind.step}


def test_a_power_cut_at_any_call_leaves_the_step_before_or_the_new_one(
    kind: Kind, before: Path, calls: list[tuple[str, int]], tmp_path: Path
) -> None:
    if kind.ranks > 1:
        pytest.skip("ranks that stop at one call are killed above: the others would wait for them")
    found = set()
    for at in range(len(calls) + 1):
        # Each loss at each second call by default, and all of them at each with LF_FAULTS=2.
        for number in range(4) if MORE > 1 else (at % 2 * 2, at % 2 * 2 + 1):
            lose_data, lose_names = POWER[number]
            path = copy_of_store(before, tmp_path / f"{at}-{number}")
            files = Volatile()
            files.arm(at)
            with contextlib.suppress(Killed):
                kind.act(path, files)
            files.cut_power(lose_data=lose_data, lose_names=lose_names)
            found.add(assert_newest(kind, path, (kind.step - 1, kind.step)))
    assert found == {kind.step - 1, kind.step}


def test_a_power_cut_that_keeps_some_of_it_leaves_the_step_before_or_the_new_one(
    kind: Kind, before: Path, calls: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Disks reorder: pages of what was not synced arrive or not, and folders are behind each other."""
    if kind.ranks > 1:
        pytest.skip("ranks that stop at one call are killed above: the others would wait for them")
    found = set()
    for at in range(KINDS.index(kind) % 2, len(calls) + 1, 1 if MORE > 1 else 2):
        for seed in range(5 if MORE > 1 else 1):
            path = copy_of_store(before, tmp_path / f"{at}-{seed}")
            files = Volatile()
            files.arm(at)
            with contextlib.suppress(Killed):
                kind.act(path, files)
            files.cut_power_out_of_order(100 * at + seed)
            found.add(assert_newest(kind, path, (kind.step - 1, kind.step)))
    assert found == {kind.step - 1, kind.step}


def test_an_error_at_any_call_is_typed_and_the_store_goes_on(
    kind: Kind, before: Path, calls: list[tuple[str, int]], tmp_path: Path
) -> None:
    failed = 0
    for at in range(len(calls)):
        for code in CODES if MORE > 1 or at == 0 else CODES[at % 3 : at % 3 + 1]:
            path = copy_of_store(before, tmp_path / f"{at}-{code}")
            files = FailAtCall(at, code)
            files.armed = True
            try:
                kind.act(path, files)
            except (lf_ckpt.DiskFullError, lf_ckpt.CkptError, OSError) as error:
                failed += 1
                check_type(error, code)
                assert_newest(kind, path, (kind.step - 1,))
            else:
                assert_newest(kind, path, (kind.step,))
    assert failed > len(calls) // 2


def test_a_look_that_fails_at_any_call_loses_nothing(kind: Kind, before: Path, tmp_path: Path) -> None:
    """A step whose MANIFEST cannot be looked at just now is neither unfinished nor damaged for good."""
    if kind.ranks > 1:
        pytest.skip("which rank looks when is not told in advance")
    files = FailAtLook(-1, errno.EIO)
    files.armed = True
    kind.act(copy_of_store(before, tmp_path / "count"), files)
    looks, failed = -1 - files.at, 0
    for at in range(0, looks, 1 if MORE > 1 else 3):
        path = copy_of_store(before, tmp_path / str(at))
        files = FailAtLook(at, errno.EIO)
        files.armed = True
        try:
            kind.act(path, files)
        except (lf_ckpt.CkptError, OSError):
            failed += 1
        with lf_ckpt.open(path, read_only=True) as store:
            assert set(store.steps()) >= {kind.step - 1} or store.latest() == kind.step
        assert cli.main(["verify", str(path), "--deep"]) == 0
        assert_newest(kind, path, (kind.step - 1, kind.step))
    assert failed > 0


def check_type(error: BaseException, code: int) -> None:
    """A full disk or quota says so, whoever met it; other errors keep their number."""
    if isinstance(error, RankFailedError) or "cannot be opened" in str(error):
        assert os.strerror(code) in str(error) or "DiskFullError" in str(error)
    elif code in (errno.ENOSPC, errno.EDQUOT):
        assert isinstance(error, lf_ckpt.DiskFullError)
        assert error.needed > 0
    else:
        assert isinstance(error, OSError)
        assert error.errno == code


def test_deep_verification_passes_what_was_saved(kind: Kind, before: Path, tmp_path: Path) -> None:
    path = copy_of_store(before, tmp_path / "store")
    kind.act(path, lf_ckpt.FileLayer())
    assert cli.main(["verify", str(path), "--deep"]) == 0


def test_kill_9_while_a_link_is_published_leaves_a_chain_that_can_be_followed(tmp_path: Path) -> None:
    old, new = ({"w": torch.full((5_000,), float(n)).bfloat16()} for n in (1, 2))
    with lf_ckpt.Publisher(tmp_path / "before") as publisher:
        publisher.publish(1, old).wait()

    def publish(path: Path, files: lf_ckpt.FileLayer) -> None:
        with lf_ckpt.Publisher(path, files=files) as publisher:
            publisher.publish(2, new).wait()

    recorder = Recorder()
    publish(copy_of_store(tmp_path / "before", tmp_path / "count"), recorder)
    found = set()
    for at in range(0, len(recorder.calls), 1 if MORE > 1 else 2):
        path = copy_of_store(tmp_path / "before", tmp_path / str(at))
        killed(lambda path=path, at=at: publish(path, KillAtCall(at)))
        into = {"w": torch.zeros(5_000).bfloat16()}
        lf_ckpt.Subscriber(path).update(into)
        found.add(float(into["w"][0]))
        assert_same(into, {1.0: old, 2.0: new}[float(into["w"][0])])
        with lf_ckpt.Publisher(path) as publisher:
            publisher.publish(3, old).wait()
        lf_ckpt.Subscriber(path).update(into)
        assert_same(into, old)
    assert 1.0 in found


def test_kill_9_while_a_file_is_exported_leaves_no_file_or_all_of_it(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(1, KINDS[1].after).wait()

    def export(path: Path, files: lf_ckpt.FileLayer) -> None:
        with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
            lf_ckpt.export_file(store, 1, path, files=files)

    recorder, found = Recorder(), set()
    export(tmp_path / "count", recorder)
    for at in range(len(recorder.calls)):
        path = tmp_path / str(at)
        killed(lambda path=path, at=at: export(path, KillAtCall(at)))
        found.add(path.exists())
        if not path.exists():
            export(path, lf_ckpt.FileLayer())
        assert_same(lf_ckpt.load_file(path).tensors, KINDS[1].after)
    assert False in found
