"""LoongDataLoader: order, position, slots, life and death."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, LoaderError, LoongDataLoader, PlanError, StateError


def merged(parts):
    """Global batches from the batches of all ranks: [(id, ...)] per step."""
    return [tuple(i for ids in step for i in ids) for step in zip(*parts, strict=True)]


def take(loader, count):
    return [next(loader) for _ in range(count)]


def test_resume_on_other_ranks_and_threads_continues_exactly(loader_of, ids_of):
    """Case A5: 11 steps on 4 ranks x 2 threads, then 3 ranks x automatic, then 8 ranks x 1."""
    reference = ids_of(loader_of(epochs=2))

    def run(world, threads, steps, state, prefetch=16):
        loaders = [
            loader_of(rank=r, world_size=world, num_workers=threads, prefetch_factor=prefetch, epochs=2)
            for r in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(state))
        parts = [ids_of(take(loader, steps)) for loader in loaders]
        states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
        assert len(states) == 1, "the state differs between ranks"
        assert len(next(iter(states))) < 1024
        for loader in loaders:
            loader.close()
        return merged(parts), states.pop()

    seen, state = run(4, 2, 11, None)
    for world, threads, steps in ((3, 0, 20), (8, 1, len(reference) - 31)):
        more, state = run(world, threads, steps, state)
        seen += more
    assert seen == reference


def test_the_state_counts_delivered_batches_not_those_read_ahead(loader_of):
    loader = loader_of(prefetch_factor=16)
    take(loader, 3)
    assert loader.state_dict()["step"] == 3


def test_loading_a_state_after_iteration_began_is_refused(loader_of):
    for begin in (iter, next):
        loader = loader_of()
        begin(loader)
        with pytest.raises(StateError, match="before the first"):
            loader.load_state_dict(loader.state_dict())


def test_a_state_of_another_data_set_is_refused(tmp_path, write, loader_of):
    other = lff.open_dataset(write(tmp_path / "o.loongbin", 1000, (16, 64, 256), mask=True, seed=1))
    with pytest.raises(StateError, match="fingerprint"):
        loader_of(other).load_state_dict(loader_of().state_dict())


def test_resuming_at_the_end_yields_nothing_and_then_starts_over(loader_of, ids_of):
    first = loader_of(epochs=1)
    everything = ids_of(first)
    second = loader_of(epochs=1)
    second.load_state_dict(first.state_dict())
    assert ids_of(second) == []
    assert ids_of(second) == everything


def test_a_finished_loader_starts_again_at_the_next_iter(loader_of, ids_of):
    loader = loader_of(epochs=1)
    assert ids_of(loader) == ids_of(loader)
    assert len(loader) == loader.steps_per_epoch == 42


def test_an_interrupted_for_loop_goes_on(loader_of, ids_of):
    loader = loader_of(epochs=1)
    head = []
    for batch in loader:
        head.append(batch)
        if len(head) == 5:
            break
    assert ids_of(head) + ids_of(loader) == ids_of(loader_of(epochs=1))


def test_set_step_jumps_both_ways(loader_of, ids_of):
    reference = ids_of(take(loader_of(), 60))
    loader = loader_of()
    take(loader, 3)
    for step in (50, 0, 4):
        loader.set_step(step)
        assert ids_of(take(loader, 2)) == reference[step : step + 2]
    with pytest.raises(LoaderError, match="step=-1"):
        loader.set_step(-1)


def test_endless_by_default(loader_of):
    loader = loader_of(global_batch=500)
    assert [batch.epoch for batch in take(loader, 5)] == [0, 0, 1, 1, 2]
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(loader)


def test_batches_stay_intact_while_held(loader_of, digest):
    held = list(loader_of(epochs=1, prefetch_factor=2))
    assert digest(held) == digest(loader_of(epochs=1, engine="python"))


def test_holding_more_batches_than_slots_is_counted_not_fatal(loader_of, caplog):
    loader = loader_of(epochs=1, prefetch_factor=2)
    held = list(loader)
    assert loader.stats().overflow == len(held) - loader.stats().slots > 0
    assert any(batch.lease is None for batch in held)
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_loop_that_lets_go_needs_no_memory_beyond_the_slots(loader_of):
    loader = loader_of(epochs=2, prefetch_factor=2)
    for batch in loader:
        view = batch.tokens[0]
        assert view is not None
    assert loader.stats().overflow == 0


def test_release_gives_the_slot_back_at_once(loader_of):
    loader = loader_of(epochs=1)
    batch = next(loader)
    lease = batch.lease
    batch.release()
    assert lease.released
    assert batch.tokens is None


def test_torch_tensors_share_the_slot_and_keep_it(loader_of, masked):
    torch = pytest.importorskip("torch")
    loader = loader_of(return_type="torch", epochs=1)
    batch = next(loader)
    assert batch.tokens.dtype == torch.uint16
    assert batch.ids.dtype == batch.lengths.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.uint8
    assert batch.tokens.data_ptr() == batch.lease.address
    first = batch.tokens[0]
    number, length = int(batch.ids[0]), int(batch.lengths[0])
    del batch
    for _ in loader:
        pass
    gc.collect()
    assert np.array_equal(first[:length].numpy(), masked.record(number).tokens)


def test_a_tensor_outlives_its_loader(loader_of, masked):
    loader = loader_of()
    batch = next(loader)
    loader.close()
    del loader
    gc.collect()
    number, length = int(batch.ids[0]), int(batch.lengths[0])
    assert np.array_equal(batch.tokens[0, :length], masked.record(number).tokens)


def test_a_loader_that_is_just_dropped_cleans_up(masked):
    before = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
    for engine in ("auto", "pread", "python"):
        for _ in range(5):
            next(LoongDataLoader(masked, global_batch=24, engine=engine))
    gc.collect()
    for _ in range(100):
        after = (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(os.listdir("/proc/self/task")),
        )
        if after <= before:
            break
        threading.Event().wait(0.02)  # Python's pool threads end a moment later
    assert after <= before


def test_close_is_final_and_repeatable(loader_of):
    with loader_of() as loader:
        next(loader)
    loader.close()
    for use in (lambda: next(loader), lambda: iter(loader)):
        with pytest.raises(LoaderError, match="closed"):
            use()


def test_two_loaders_on_one_data_set(loader_of, ids_of):
    a, b = loader_of(epochs=1), loader_of(epochs=1, seed=8)
    mixed = [(next(a), next(b)) for _ in range(42)]
    assert ids_of(x for x, _ in mixed) == ids_of(loader_of(epochs=1))
    assert ids_of(y for _, y in mixed) == ids_of(loader_of(epochs=1, seed=8))


def test_threads_may_share_a_loader(loader_of, ids_of):
    loader = loader_of(epochs=2)
    got = []

    def work():
        while (batch := next(loader, None)) is not None:
            got.append((batch.step, tuple(batch.ids.tolist())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [ids for _, ids in sorted(got)] == ids_of(loader_of(epochs=2))


@pytest.mark.parametrize("engine", ["auto", "pread", "python"])
def test_a_forked_child_goes_on_from_the_same_position(loader_of, ids_of, in_fork, engine):
    expected = ids_of(take(loader_of(), 8))
    loader = loader_of(engine=engine)
    take(loader, 3)

    def child():
        assert ids_of(take(loader, 5)) == expected[3:]
        loader.close()

    assert in_fork(child) == 0
    assert ids_of(take(loader, 5)) == expected[3:]


def test_a_forked_child_may_exit_without_touching_the_loader(masked_path):
    code = f"""
import os, sys, lf_format, lf_iouring
loader = lf_iouring.LoongDataLoader(lf_format.open_dataset({str(masked_path)!r}), global_batch=24)
next(loader)
if os.fork() == 0:
    sys.exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_it_works_in_a_spawned_process(masked_path, loader_of, digest):
    code = f"""
import multiprocessing, lf_format, lf_iouring, sys
def work(path, queue):
    with lf_iouring.LoongDataLoader(lf_format.open_dataset(path), global_batch=24, seed=7) as loader:
        queue.put([next(loader).ids.tolist() for _ in range(3)])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=({str(masked_path)!r}, queue))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""
    script = masked_path.parent / "spawned.py"
    script.write_text(code)
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == str([b.ids.tolist() for b in take(loader_of(), 3)])


def test_it_does_not_pickle(loader_of):
    with pytest.raises(TypeError, match="make it in the new process"):
        pickle.dumps(loader_of())


def test_data_errors_pickle():
    error = pickle.loads(pickle.dumps(DataError("p", 1, 2, "a", "b")))
    assert (error.path, error.record, error.offset, error.expected, error.found) == ("p", 1, 2, "a", "b")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"world_size": 5}, PlanError),
        ({"rank": 4, "world_size": 4}, PlanError),
        ({"global_batch": 0}, PlanError),
        ({"num_workers": -1}, LoaderError),
        ({"num_workers": 1.5}, LoaderError),
        ({"prefetch_factor": -1}, LoaderError),
        ({"prefetch_factor": 1000}, LoaderError),
        ({"epochs": 0}, LoaderError),
        ({"return_type": "jax"}, LoaderError),
    ],
)
def test_arguments_out_of_range_are_refused(loader_of, arguments, error):
    with pytest.raises(error):
        loader_of(**arguments)


def test_fewer_records_than_a_batch_give_one_padded_batch(tmp_path, write, loader_of):
    dataset = lff.open_dataset(write(tmp_path / "s.loongbin", 3, (16,)))
    (batch,) = loader_of(dataset, epochs=1)
    assert sorted(batch.ids.tolist()) == [-1] * 21 + [0, 1, 2]
    assert not batch.tokens[np.asarray(batch.ids) < 0].any()


def test_threads_follow_cores_and_ranks_of_the_host(loader_of, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    info = loader_of().info()
    assert info.engine.threads == 1
    assert "1000 ranks" in info.threads_reason
    assert loader_of(num_workers=3).info().threads_reason.startswith("num_workers, more than the 1 cores")


def test_the_barrier_variable_is_reported(loader_of, monkeypatch):
    monkeypatch.setenv("LOONGFORGE_NCCL_BARRIER_MODE", "llsc")
    assert "llsc" in loader_of().info().notes[0]


def test_the_whole_epoch_is_read_in_plan_order(loader_of):
    loader = loader_of(epochs=2, num_workers=3)
    for step, batch in enumerate(loader):
        spec = loader.plan.batch(step)
        assert (batch.step, batch.epoch) == (step, spec.epoch)
        assert np.array_equal(batch.ids, spec.ids)
        assert batch.tokens.shape == (24, spec.bucket_edge)


def test_torch_is_imported_only_when_it_is_wanted(masked_path):
    code = f"""
import sys, lf_format, lf_iouring
dataset = lf_format.open_dataset({str(masked_path)!r})
with lf_iouring.LoongDataLoader(dataset, global_batch=24, return_type="numpy") as loader:
    assert type(next(loader).tokens).__name__ == "ndarray"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_ctrl_c_at_any_moment_keeps_the_position(loader_of, ids_of):
    """Interrupts strike between any two lines; one that strikes after delivery costs that batch at most.

    Not for the Python engine: futures of the standard library do not survive this.
    """
    reference = ids_of(take(loader_of(), 400))
    loader = loader_of(prefetch_factor=2)
    armed = [False]

    def tick(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        for _ in range(60):
            try:
                armed[0] = True
                while loader.step < 390:
                    batch = next(loader)
                    assert tuple(batch.ids.tolist()) == reference[batch.step]
            except KeyboardInterrupt:
                pass
            finally:
                armed[0] = False
            if loader.step >= 380:
                loader.set_step(0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    step = loader.step
    assert ids_of(take(loader, 5)) == reference[step : step + 5]
