"""A step appears whole or not at all where rename or directory fsync are refused, and on stores that hosts share."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from ckpt_faults import FailAtCall, Killed, Recorder, Refuses
from ckpt_states import assert_same, files_under, state

import lf_ckpt
from lf_ckpt.places import file_system, posix_traits
from lf_ckpt.storage import Buffer

STATES = {step: state(step, layers=2, size=6_000) for step in (1, 2, 3)}
NO_RENAME = [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP]


def save(path: Path, step: int, files: lf_ckpt.FileLayer | None = None, **options: object) -> None:
    with lf_ckpt.open(path, files=files, **options) as store:  # type: ignore[arg-type]
        store.save(step, STATES[step]).wait()


def check_newest(path: Path, allowed: Sequence[int]) -> int:
    """The newest step is one of `allowed`, loads bit for bit without falling back, and a writer can go on."""
    with lf_ckpt.open(path, read_only=True) as store:
        loaded = store.load()
        assert loaded.report.fallbacks == ()
        assert loaded.step in allowed
        assert_same(loaded.tensors, STATES[loaded.step])
    save(path, 3)
    with lf_ckpt.open(path, read_only=True) as store:
        assert store.steps() == tuple(sorted({*(s for s in allowed if s <= loaded.step), 3}))
    assert not [name for name in files_under(path) if name.endswith(".tmp")]
    return loaded.step


@pytest.mark.parametrize("code", NO_RENAME)
def test_a_refused_rename_commits_by_a_marker_written_last(tmp_path: Path, code: int) -> None:
    # huggingface/safetensors#792: 0.8 fails there
    with lf_ckpt.open(tmp_path, files=Refuses({"rename": code})) as store:
        store.save(1, STATES[1]).wait()
        store.save(2, STATES[2]).wait()
        assert_same(store.load().tensors, STATES[2])
        assert store.info()["commit"] == f"marker last (rename refused: {os.strerror(code)})"

    assert check_newest(tmp_path, (1, 2)) == 2


def test_mode_local_names_the_refused_rename_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(lf_ckpt.CkptError, match=r'rename is refused.*mode="shared"'):
        lf_ckpt.open(tmp_path, files=Refuses({"rename": errno.ENOSYS}), mode="local")


def test_another_error_of_rename_is_not_taken_for_a_refusal(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with lf_ckpt.open(tmp_path, files=Refuses({"rename": errno.EIO})) as store:
        with pytest.raises(OSError, match="Input/output"):
            store.save(2, STATES[2]).wait()
        assert store.steps() == (1,)


@pytest.mark.parametrize("mode", ["auto", "shared"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_directory_fsync_is_reported_and_tolerated(tmp_path: Path, mode: str, code: int) -> None:
    files = Refuses({"sync_dir": code})
    with lf_ckpt.open(tmp_path, files=files, mode=mode) as store:  # type: ignore[arg-type]
        store.save(1, STATES[1]).wait()
        assert "directory fsync refused" in store.info()["commit"]
        assert_same(store.load().tensors, STATES[1])


def test_mode_local_names_the_refused_directory_fsync(tmp_path: Path) -> None:
    with pytest.raises(lf_ckpt.CkptError, match=r'directory fsync is refused.*mode="shared"'):
        lf_ckpt.open(tmp_path, files=Refuses({"sync_dir": errno.EINVAL}), mode="local")


def test_shared_mode_never_renames_and_never_writes_past_the_cache(tmp_path: Path) -> None:
    files = Recorder()
    with lf_ckpt.open(tmp_path, files=files, mode="shared") as store:
        store.save(1, STATES[1]).wait()
        assert files.open_direct(str(tmp_path / "steps/1/MANIFEST")) is None
        assert store.info()["mode"] == "shared"
        assert store.info()["why"] == "mode='shared', as asked"
    assert "rename" not in {name for name, _ in files.calls}


def effects_of_a_save(path: Path) -> int:
    save(path, 1, mode="shared")
    recorder = Recorder()
    save(path, 2, recorder, mode="shared")
    return len(recorder.calls)


POWER = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("lose_data", "lose_names"), POWER, ids=["killed", "data", "names", "both"])
def test_stopping_a_marker_last_save_at_any_call_leaves_the_old_or_the_new_step(
    tmp_path: Path, lose_data: bool, lose_names: bool
) -> None:
    found = set()
    for at in range(effects_of_a_save(tmp_path / "count")):
        path = tmp_path / str(at)
        save(path, 1)
        files = Refuses({"rename": errno.ENOSYS})
        files.arm(at)
        with contextlib.suppress(Killed):
            store = lf_ckpt.open(path, files=files, mode="shared")
            try:
                store.save(2, STATES[2]).wait()
            finally:
                with contextlib.suppress(Killed):
                    store.close()
        files.cut_power(lose_data=lose_data, lose_names=lose_names)
        found.add(check_newest(path, (1, 2)))
    assert found == {1, 2}


class TearsManifest(lf_ckpt.FileLayer):
    """Writes only the first `keep` bytes of the file MANIFEST and dies."""

    def __init__(self, keep: int) -> None:
        self.keep, self.fd = keep, -1

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.fd = fd if path.endswith("MANIFEST") else -1
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        if fd == self.fd:
            super().write(fd, [bytes(buffers[0])[: self.keep]], offset)
            raise Killed("write")
        super().write(fd, buffers, offset)

    def unlink(self, path: str) -> None:
        raise Killed("unlink")


@pytest.mark.parametrize("keep", [0, 1, 300])
def test_a_torn_marker_is_no_step_and_the_next_writer_sweeps_it(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 1)
    with pytest.raises(Killed):
        save(tmp_path, 2, TearsManifest(keep), mode="shared")
    assert (tmp_path / "steps/2/MANIFEST").exists()

    assert check_newest(tmp_path, (1,)) == 1
    assert not (tmp_path / "steps/2").exists()


def test_a_torn_format_of_a_new_store_is_written_again(tmp_path: Path) -> None:
    save(tmp_path, 1, mode="shared")
    document = (tmp_path / "FORMAT").read_bytes()
    (tmp_path / "FORMAT").write_bytes(document[:20])
    with pytest.raises(lf_ckpt.CorruptError):  # alone it is damage
        lf_ckpt.open(tmp_path)
    (tmp_path / "FORMAT.tmp").write_bytes(document)

    lf_ckpt.open(tmp_path, mode="shared").close()

    assert not (tmp_path / "FORMAT.tmp").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_an_error_at_any_call_of_a_shared_save_is_raised_and_the_store_goes_on(
    tmp_path: Path, code: int
) -> None:
    for at in range(effects_of_a_save(tmp_path / "count")):
        files = FailAtCall(at, code)
        with lf_ckpt.open(tmp_path / str(at), files=files, mode="shared") as store:
            store.save(1, STATES[1]).wait()
            files.armed = True
            try:
                store.save(2, STATES[2]).wait()
            except (lf_ckpt.DiskFullError, OSError):
                assert store.steps() == (1,)
                assert_same(store.load().tensors, STATES[1])
            files.armed = False
            store.save(3, STATES[3]).wait()
            assert_same(store.load().tensors, STATES[3])


class ShowsLate(lf_ckpt.FileLayer):
    """A data file is short for the first looks at it, as on a client with a stale cache."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def size(self, fd: int) -> int:
        size = super().size(fd)
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".lfckpt") or self.looks == 0:
            return size
        self.looks -= 1
        return size - 1


def test_a_shared_commit_waits_until_the_data_is_visible_and_refuses_when_it_stays_short(
    tmp_path: Path,
) -> None:
    save(tmp_path / "late", 1, ShowsLate(2), mode="shared")
    check_newest(tmp_path / "late", (1,))

    with lf_ckpt.open(tmp_path / "short", files=ShowsLate(99), mode="shared") as store:
        with pytest.raises(OSError, match="visible after fsync"):
            store.save(1, STATES[1]).wait()
        assert store.steps() == ()


class Retired(lf_ckpt.FileLayer):
    """Another host removes the newest step while it is being read: reads answer ESTALE, then the step is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(self.folder / "rank-0.lfckpt") and offset >= 4096:
            for name in ("MANIFEST", "rank-0.lfckpt"):
                (self.folder / name).unlink()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return super().read(fd, view, offset)


def test_a_step_that_another_host_retires_under_a_reader_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    with lf_ckpt.open(tmp_path, read_only=True, files=Retired(tmp_path / "steps/2")) as store:
        loaded = store.load()

    assert (loaded.step, loaded.report.fallbacks) == (1, ())


def test_a_step_that_was_asked_for_and_is_retired_meanwhile_is_said_to_be_gone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    store = lf_ckpt.open(tmp_path, read_only=True, files=Retired(tmp_path / "steps/1"))
    with pytest.raises(lf_ckpt.NoCheckpointError, match="removed it while it was read"):
        store.load(1)


class RetiresBase(lf_ckpt.FileLayer):
    """A writer retires a delta and its base, and commits another step, once the delta's files are open."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def open(self, path: str) -> int:
        if path == str(self.store / "steps/1/MANIFEST") and (self.store / "steps/2/MANIFEST").exists():
            with lf_ckpt.open(self.store, keep=[lf_ckpt.Last(1)]) as writer:
                writer.save(3, STATES[3]).wait()
        return super().open(path)


def test_a_delta_that_is_retired_with_its_base_while_it_is_opened_is_no_damage(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as writer:
        writer.save(1, STATES[1]).wait()
        assert writer.save(2, {**STATES[1], "step": torch.tensor(2)}).wait().kind == "delta"
    reader = lf_ckpt.open(tmp_path, read_only=True, files=RetiresBase(tmp_path))

    loaded = reader.load()

    assert (loaded.step, loaded.report.fallbacks) == (3, ())


class KeepsNfsName(lf_ckpt.FileLayer):
    """An NFS client renames a removed file that is still open."""

    def unlink(self, path: str) -> None:
        if path.endswith(".lfckpt"):
            os.rename(path, os.path.join(os.path.dirname(path), ".nfs0001"))
        else:
            super().unlink(path)


def test_retention_on_nfs_leaves_what_a_local_reader_holds_to_the_next_writer(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path, files=KeepsNfsName(), mode="shared", keep=[lf_ckpt.Last(1)]) as store:
        store.save(1, {"x": STATES[1]["layer0.weight"]}).wait()
        report = store.save(2, {"x": STATES[2]["layer0.weight"]}).wait()
        assert (report.removed, store.steps()) == (("1",), (2,))
    (tmp_path / "steps/1/.nfs0001").unlink()  # the reader has closed it

    lf_ckpt.open(tmp_path).close()

    assert not (tmp_path / "steps/1").exists()


MOUNTS = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /mnt/nfs rw,relatime shared:4 - nfs4 server:/x rw,vers=4.2
31 30 0:41 / /mnt/nfs/scratch rw - tmpfs tmpfs rw
32 27 0:42 / /mnt/with\040blank rw - fuse.s3fs s3fs rw
33 27 0:43 / /lustre rw - lustre mds@tcp:/l rw
34 27 8:1 / /over rw - ext4 /dev/sdb rw
35 34 0:44 / /over rw - ceph mon:/ rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/", "ext4", False),
        ("/home/x", "ext4", False),
        ("/mnt/nfs", "nfs4", True),
        ("/mnt/nfs/a/b", "nfs4", True),
        ("/mnt/nfsx", "ext4", False),
        ("/mnt/nfs/scratch/a", "tmpfs", False),
        ("/mnt/with blank/a", "fuse.s3fs", True),
        ("/lustre/a", "lustre", True),
        ("/over/a", "ceph", True),
    ],
)
def test_auto_looks_at_the_file_system_of_the_deepest_and_latest_mount(
    path: str, kind: str, shared: bool
) -> None:
    assert file_system(path, MOUNTS) == kind
    traits = posix_traits(path, "auto", MOUNTS)
    assert (traits.kind, traits.shared) == (kind, shared)
    assert kind in traits.why
    assert posix_traits(path, "shared", MOUNTS).shared
    assert not posix_traits(path, "local", MOUNTS).shared


@pytest.mark.parametrize("mounts", ["", "no mounts\n", "1 2 3 / / rw - \n"])
def test_an_unknown_file_system_is_treated_as_shared(mounts: str) -> None:
    traits = posix_traits("/x", "auto", mounts)
    assert (traits.kind, traits.shared) == ("unknown", True)


def test_the_choice_is_told(tmp_path: Path) -> None:
    with lf_ckpt.open(tmp_path) as store:
        info: Mapping[str, str] = store.info()
    assert set(info) == {"path", "storage", "mode", "why", "commit", "lock"}
    assert info["path"] == str(tmp_path)
    with pytest.raises(ValueError, match="mode='nfs': choose auto or local or shared"):
        lf_ckpt.open(tmp_path, mode="nfs")  # type: ignore[arg-type]
