"""Python transforms: the same batches in the thread and in any number of processes, and every way to fail."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import transform_cases as cases
from child_env import child_env

from lf_iouring import LoaderError, TransformError, WorkerDied
from lf_iouring.transforms import OutputSpec, TransformContext

ROWS, EDGE = 24, 256
OUTPUT = {"noise": ((ROWS,), "f8"), "tokens": ((ROWS, EDGE), "u2"), "step": ((1,), "f8")}
WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


def contents(batches):
    return [
        (
            b.step,
            b.epoch,
            np.asarray(b.ids).tolist(),
            {name: np.asarray(b[name]).tolist() for name in b},
        )
        for b in batches
    ]


@WORKERS
def test_a_transform_in_place_changes_what_is_delivered(loader_of, workers):
    plain = [batch.tokens.copy() for batch in loader_of(epochs=1)]
    loader = loader_of(epochs=1, transform=cases.add_one, transform_workers=workers)
    seen = []
    for batch in loader:
        assert batch.tokens is batch["tokens"]
        assert set(batch) == {"tokens", "loss_mask", "lengths"}
        seen.append(batch.tokens.copy())
    assert len(seen) == len(plain)
    assert all(np.array_equal(a + 1, b) for a, b in zip(plain, seen, strict=True))
    assert loader.stats().overflow == 0


def test_results_do_not_depend_on_workers_ranks_or_where_one_resumes(loader_of):
    arguments = {"epochs": 1, "transform": cases.noise}
    reference = contents(loader_of(**arguments))
    spread = {"transform_workers": 2, "transform_output": OUTPUT}
    first = loader_of(**arguments, **spread)
    head = contents(next(first) for _ in range(7))
    second = loader_of(**arguments, **spread)
    second.load_state_dict(first.state_dict())
    assert head + contents(second) == reference
    ranks = [loader_of(**arguments, rank=rank, world_size=2) for rank in range(2)]
    for whole, parts in zip(reference, zip(*map(contents, ranks), strict=True), strict=True):
        assert whole[3]["noise"] == parts[0][3]["noise"] + parts[1][3]["noise"]
        assert whole[3]["step"] == parts[0][3]["step"] == parts[1][3]["step"]


def test_random_numbers_differ_between_records_epochs_steps_and_seeds():
    ids = np.array([4, 9])
    contexts = [TransformContext(*at, ids) for at in ((7, 1, 0), (7, 2, 0), (7, 1, 1), (8, 1, 0))]
    by_record = {context.rng_of(row).random() for context in contexts for row in (0, 1)}
    assert len(by_record) == 6  # the step does not matter
    assert (
        len({context.rng().random() for context in contexts}) == 3
    )  # nor here the epoch, which the step names


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_come_with_positions_and_segments(loader_of, workers):
    shape = {"pack": 256, "epochs": 1, "global_batch": 4}
    output = dict.fromkeys(("tokens", "loss_mask", "position_ids", "segment_ids"), ((4, 256), "i4"))
    loader = loader_of(**shape, transform=cases.packed, transform_workers=workers, transform_output=output)
    for batch, expected in zip(loader, loader_of(**shape), strict=True):
        for name in output:
            assert np.array_equal(batch[name], getattr(expected, name))
        assert batch.max_seqlen == expected.max_seqlen
        assert np.array_equal(batch.ids, expected.ids)


@pytest.mark.parametrize("output", [None, OUTPUT], ids=["in place", "output"])
def test_batches_stay_intact_while_every_slot_is_held(loader_of, output):
    transform = cases.noise if output else cases.add_one
    expected = contents(loader_of(epochs=1, transform=transform))
    loader = loader_of(epochs=1, transform=transform, transform_workers=1, transform_output=output)
    assert contents(list(loader)) == expected
    assert loader.stats().overflow > 0


def test_set_step_and_a_second_pass_work(loader_of):
    loader = loader_of(epochs=1, transform=cases.add_one, transform_workers=1)
    reference = contents(loader)
    assert contents(loader) == reference
    loader.set_step(3)
    assert contents([next(loader)]) == reference[3:4]


def test_torch_tensors_are_delivered(loader_of):
    torch = pytest.importorskip("torch")
    batch = next(loader_of(transform=cases.add_one, transform_workers=1, return_type="torch"))
    assert batch.tokens.dtype == torch.uint16
    assert batch.tokens.data_ptr() == batch.lease.address
    assert batch["lengths"].sum() == batch.lengths.sum()


def test_a_forked_child_goes_on_with_workers_of_its_own(loader_of, in_fork):
    loader = loader_of(epochs=1, transform=cases.add_one, transform_workers=1)
    reference = contents(loader_of(epochs=1, transform=cases.add_one))
    assert contents(next(loader) for _ in range(2)) == reference[:2]

    def child():
        assert contents(loader) == reference[2:]
        loader.close()

    assert in_fork(child) == 0
    assert contents(loader) == reference[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_arrives_with_step_and_traceback_and_can_be_tried_again(loader_of, tmp_path, workers):
    flag = tmp_path / "fail"
    flag.touch()
    loader = loader_of(epochs=1, transform=cases.Failing(3, flag), transform_workers=workers)
    reference = contents(loader_of(epochs=1, transform=cases.Failing(-1, flag)))
    assert contents(next(loader) for _ in range(3)) == reference[:3]
    for _ in range(2):
        with pytest.raises(TransformError, match="one over nothing") as caught:
            next(loader)
        assert caught.value.step == 3
        assert "transform_cases.py" in caught.value.text
    flag.unlink()
    assert contents(loader) == reference[3:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("transform", "output", "text"),
    [
        (cases.replaces, None, r"replaced \['tokens'\] and returned None"),
        (cases.writes_lengths, None, "read-only"),
        (cases.add_one, {"tokens": ((ROWS, EDGE), "u2")}, "returned None"),
        (cases.wrong_dtype, {"tokens": ((ROWS, EDGE), "u2")}, "'tokens' is float64"),
        (cases.nothing_declared, {"tokens": ((ROWS, 1), "u2")}, "at most"),
        (cases.nothing_declared, {"other": ((1,), "u2")}, "transform_output names"),
    ],
)
def test_a_result_that_was_not_declared_is_refused(loader_of, workers, transform, output, text):
    loader = loader_of(transform=transform, transform_workers=workers, transform_output=output)
    with pytest.raises(TransformError, match=text):
        next(loader)


def test_workers_that_return_arrays_need_them_declared(loader_of):
    with pytest.raises(TransformError, match="needs transform_output"):
        next(loader_of(transform=cases.nothing_declared, transform_workers=1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"transform": lambda arrays, context: None, "transform_workers": 1}, "does not pickle"),
        ({"transform_workers": 1}, "belong to transform"),
        ({"transform_output": OUTPUT}, "belong to transform"),
        ({"transform": 5}, "callable"),
        ({"transform": cases.add_one, "transform_workers": -1}, "transform_workers"),
        ({"transform": cases.noise, "transform_output": {"a": "f4"}}, "pass an array or"),
        ({"transform": cases.noise, "transform_output": {"a": ((2,), "O")}}, "shared memory"),
        ({"transform": cases.noise, "transform_output": {}}, "no array"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(loader_of, arguments, text):
    with pytest.raises(LoaderError, match=text):
        loader_of(**arguments)


def test_an_example_array_declares_an_output():
    spec = OutputSpec({"a": np.zeros((2, 3), np.float32), "b": ((1,), "u1")})
    assert [(f.shape, f.dtype.str, f.offset) for f in spec.fields] == [((2, 3), "<f4", 0), ((1,), "|u1", 64)]


def test_a_killed_worker_is_named_with_the_batches_under_way(loader_of, tmp_path):
    """Case A6, the worker's death."""
    flag = tmp_path / "wait"
    flag.touch()
    loader = loader_of(epochs=1, transform=cases.Waiting(2, flag), transform_workers=2)
    reference = contents(loader_of(epochs=1, transform=cases.Waiting(-1, flag)))
    assert contents(next(loader) for _ in range(2)) == reference[:2]

    def kill():
        while not (blocked := list(tmp_path.glob("wait.*"))):
            time.sleep(0.01)
        os.kill(int(blocked[0].suffix[1:]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDied, match="signal 9") as caught:
        next(loader)
    killer.join()
    assert caught.value.exitcode == -signal.SIGKILL
    assert caught.value.pid == int(next(tmp_path.glob("wait.*")).suffix[1:])
    assert 2 in caught.value.steps
    flag.unlink()
    assert contents(loader) == reference[2:]


def test_ctrl_c_ends_a_next_that_waits_for_a_worker_and_loses_nothing(loader_of, tmp_path):
    flag = tmp_path / "wait"
    flag.touch()
    loader = loader_of(epochs=1, transform=cases.Waiting(1, flag), transform_workers=1)
    reference = contents(loader_of(epochs=1, transform=cases.Waiting(-1, flag)))
    next(loader)
    asked = threading.Event()

    def interrupt():
        asked.wait()
        while not list(tmp_path.glob("wait.*")):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    def ask():
        asked.set()
        next(loader)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ask()
    flag.unlink()
    assert contents(loader) == reference[1:]


@pytest.mark.parametrize("output", [None, OUTPUT], ids=["in place", "output"])
def test_signals_at_any_moment_lose_and_repeat_nothing(loader_of, under_signals, output):
    transform = cases.noise if output else cases.add_one
    reference = contents(loader_of(epochs=2, transform=transform))
    loader = loader_of(epochs=2, transform=transform, transform_workers=1, transform_output=output)
    assert under_signals(loader, len(reference), lambda batch: contents([batch])[0]) == reference


def running(pid):
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def files_of(pid):
    """Paths of what a process has open or mapped."""
    opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = [line.split(maxsplit=5)[5:] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return opened + [path for paths in mapped for path in paths]


def test_workers_leave_with_a_killed_parent_and_nothing_stays(masked_path, tmp_path):
    """Case A6, the parent's death, with both workers in the middle of a transform."""
    flag, scratch = tmp_path / "wait", tmp_path / "temp"
    flag.touch()
    scratch.mkdir()
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import lf_format
        from lf_iouring import LoongDataLoader
        from transform_cases import Waiting

        class Always(Waiting):
            def __call__(self, arrays, context):
                self.step = context.step
                super().__call__(arrays, context)

        if __name__ == "__main__":
            dataset = lf_format.open_dataset({str(masked_path)!r})
            loader = LoongDataLoader(
                dataset, global_batch=4, transform=Always(0, {str(flag)!r}), transform_workers=2
            )
            next(loader)
        """)
    )
    environment = child_env(TMPDIR=str(scratch))
    parent = subprocess.Popen([sys.executable, script], env=environment)
    while len(pids := [int(path.suffix[1:]) for path in tmp_path.glob("wait.*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.02)
    assert all(running(pid) for pid in pids)
    assert not [
        file
        for pid in (parent.pid, *pids)
        for file in files_of(pid)
        if file.startswith(("/dev/shm", str(scratch)))
    ]
    parent.kill()
    parent.wait()
    while any(running(pid) for pid in pids):  # the test's time limit is the bound
        time.sleep(0.02)
    assert os.listdir(scratch) == []


def test_closing_ends_the_workers(loader_of, tmp_path):
    flag = tmp_path / "wait"
    flag.touch()
    loader = loader_of(transform=cases.Waiting(1, flag), transform_workers=2)
    next(loader)
    pids = loader._through.pids
    loader.close()
    assert not any(running(pid) for pid in pids)
