"""Published weights: a chain of deltas that subscribers follow link by link."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ckpt_faults import Killed, Recorder, StopAtCall
from ckpt_states import assert_same, copy_of

import lf_ckpt
from lf_ckpt import FileLayer, Last, Publisher, Subscriber, cli

N = 700_000  # two extents of bfloat16 numbers


def weights(step: int) -> dict[str, torch.Tensor]:
    """Weights of which one number in 80 changes from step to step, by one unit in the last place or two."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(N, generator=generator).to(torch.bfloat16)
    for _ in range(step):
        at = torch.randint(0, N, (N // 80,), generator=generator)
        w.view(torch.int16)[at] += torch.randint(1, 3, (N // 80,), generator=generator).to(torch.int16)
    return {"w": w, "bias": torch.full((7,), float(step)).to(torch.bfloat16), "n": torch.tensor(step)}


STEPS = {step: weights(step) for step in range(9)}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in STEPS[0].items()}


def publish(
    path: Path, *steps: int, every_full: int = 50, files: FileLayer | None = None
) -> list[lf_ckpt.SaveReport]:
    with Publisher(path, every_full=every_full, files=files) as publisher:
        return [
            publisher.publish(step, STEPS[step], {"step": step, "raw": b"%d" % step}).wait() for step in steps
        ]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_subscriber_follows_link_by_link(tmp_path: Path) -> None:
    into = empty()
    with Publisher(tmp_path) as publisher:
        subscriber = Subscriber(tmp_path)
        assert subscriber.update(into).step is None
        for step in range(6):
            report = publisher.publish(step, STEPS[step]).wait()
            got = subscriber.update(into)

            assert (report.kind, report.base) == (("delta", str(step - 1)) if step else ("full", None))
            assert (got.step, got.links, got.fallbacks) == (step, 1 if step else 0, ())
            assert got.reloaded == (None if step else "first update")
            assert_same(into, STEPS[step])
            if step:
                assert report.bytes_written < 0.06 * report.bytes_raw
                assert got.bytes_read < 0.05 * report.bytes_raw
        assert subscriber.update(into).bytes_changed == 0


def test_several_links_at_once_and_items(tmp_path: Path) -> None:
    publish(tmp_path, 0, 1)
    subscriber, into = Subscriber(tmp_path), empty()
    subscriber.update(into)
    shutil.rmtree(tmp_path / "steps/0")  # what has been received is not needed again
    with Publisher(tmp_path) as publisher:
        for step in (2, 3, 4):
            publisher.publish(step, STEPS[step], {"step": step, "raw": b"%d" % step}).wait()

    report = subscriber.update(into)

    # The publisher began anew with a full step.
    assert (report.previous, report.step, report.links) == (1, 4, 0)
    assert report.reloaded is not None
    assert "chain" in report.reloaded
    assert report.items == {"step": 4, "raw": b"4"}
    assert_same(into, STEPS[4])
    assert subscriber.step == 4


def test_links_that_were_missed_are_applied_in_order(tmp_path: Path) -> None:
    into = empty()
    with Publisher(tmp_path) as publisher:
        publisher.publish(0, STEPS[0]).wait()
        subscriber = Subscriber(tmp_path)
        subscriber.update(into)
        for step in (1, 2, 3):
            publisher.publish(step, STEPS[step])
        publisher.wait()

        report = subscriber.update(into)

    assert (report.links, report.reloaded) == (3, None)
    assert_same(into, STEPS[3])


def test_any_store_function_reads_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = publish(tmp_path, *range(7), every_full=4)

    assert [report.kind for report in reports] == [
        "full",
        "delta",
        "delta",
        "delta",
        "full",
        "delta",
        "delta",
    ]
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        for step in range(7):
            assert_same(store.load(step).tensors, STEPS[step])
            into = copy_of(STEPS[0])
            store.load(step, into=into)
            assert_same(into, STEPS[step])
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 0
    assert cli.main(["diff", str(tmp_path), "2", "3"]) == 0
    assert "max |difference|" in capsys.readouterr().out


def test_retention_keeps_chains_whole(tmp_path: Path) -> None:
    with Publisher(tmp_path, every_full=4, keep=[Last(1)]) as publisher:
        kept = []
        for step in range(9):
            publisher.publish(step, STEPS[step]).wait()
            with lf_ckpt.open(tmp_path, read_only=True) as store:
                kept.append(store.steps())
                assert_same(store.load().tensors, STEPS[step])

    assert kept == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (4,), (4, 5), (4, 5, 6), (4, 5, 6, 7), (8,)]


def test_a_damaged_link_is_passed_over_and_a_follower_that_had_it_goes_on(tmp_path: Path) -> None:
    subscriber, into = Subscriber_at(tmp_path, 0), empty()
    follower = Subscriber_at(tmp_path, 2)
    publish_more = Publisher(tmp_path)
    publish_more.close()
    flip(tmp_path / "steps/2/rank-0.lfckpt", 5000)

    report = subscriber.update(into)

    assert report.step == 1
    assert [step for step, _ in report.fallbacks] == [3, 2]
    assert "hash" in report.fallbacks[0][1]
    assert_same(into, STEPS[1])

    fresh = empty()
    assert Subscriber(tmp_path).update(fresh).step == 1
    assert_same(fresh, STEPS[1])

    followed = empty()
    assert follower.update(followed).step == 3
    assert_same(followed, STEPS[3])


def Subscriber_at(path: Path, step: int) -> Subscriber:  # noqa: N802
    """A subscriber that has received `step` of a chain that goes on to 3."""
    if not path.joinpath("steps").exists():
        publish(path, 0, 1, 2, 3)
    hidden = path / "hidden"
    hidden.mkdir()
    for folder in range(step + 1, 4):
        (path / f"steps/{folder}").rename(hidden / str(folder))
    subscriber = Subscriber(path)
    assert subscriber.update(empty()).step == step
    for folder in hidden.iterdir():
        folder.rename(path / "steps" / folder.name)
    hidden.rmdir()
    return subscriber


def test_a_missing_link_is_named_and_the_next_full_step_heals(tmp_path: Path) -> None:
    subscriber, into = Subscriber_at(tmp_path, 0), empty()
    shutil.rmtree(tmp_path / "steps/1")

    report = subscriber.update(into)
    assert (report.step, [step for step, _ in report.fallbacks]) == (0, [3, 2])
    assert "missing" in report.fallbacks[0][1]
    assert_same(into, STEPS[0])

    publish(tmp_path, 4)
    report = subscriber.update(into)
    assert (report.step, report.fallbacks) == (4, ())
    assert_same(into, STEPS[4])


def test_nothing_that_can_be_received_is_an_error(tmp_path: Path) -> None:
    publish(tmp_path, 0, 1)
    flip(tmp_path / "steps/0/rank-0.lfckpt", 5000)

    with pytest.raises(lf_ckpt.NoCheckpointError, match=r"step 1.*step 0"):
        Subscriber(tmp_path).update(empty())


def test_memory_that_was_damaged_is_read_anew(tmp_path: Path) -> None:
    subscriber, into = Subscriber_at(tmp_path, 1), empty()
    assert subscriber._replica is not None
    held = next(iter(subscriber._replica._held.values()))
    held.data[100] ^= 1

    report = subscriber.update(into)

    assert (report.step, report.links) == (3, 0)
    assert report.reloaded is not None
    assert "differ from their hash" in report.reloaded
    assert_same(into, STEPS[3])


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_a_flipped_bit_anywhere_in_the_chain_is_never_received(tmp_path: Path, at: int) -> None:
    subscriber = Subscriber_at(tmp_path, 0)
    files = sorted((tmp_path / "steps").glob("[123]/*"))
    file = files[at % len(files)]
    flip(file, at * 7919 % file.stat().st_size)

    for who in (subscriber, Subscriber(tmp_path)):
        into = empty()
        report = who.update(into)
        assert report.step is not None
        assert_same(into, STEPS[report.step])
    assert cli.main(["verify", str(tmp_path), "--deep"]) == 1


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    for change, message in (
        (lambda good: good.pop("bias"), "unexpected: bias"),
        (lambda good: good.update(x=good["n"].clone()), "missing: x"),
        (lambda good: good.update(w=good["w"].float()), "mismatched: w"),
        (lambda good: good.update(w=good["w"].view(7, -1)), "mismatched: w"),
    ):
        good, bad = empty(), empty()
        change(bad)
        subscriber = Subscriber(tmp_path)
        with pytest.raises(lf_ckpt.MismatchError, match=message):
            subscriber.update(bad)
        assert not any(tensor.any() for tensor in bad.values())
        subscriber.update(good)  # and it can still be put right
        assert_same(good, STEPS[0])


def test_the_caller_may_change_the_tensors_at_once(tmp_path: Path) -> None:
    w = torch.ones(N)
    with Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": w})
        w.zero_()
    into = {"w": torch.zeros(N, dtype=torch.bfloat16)}
    Subscriber(tmp_path).update(into)

    assert bool((into["w"] == 1).all())


def test_tensors_that_come_or_go_begin_a_new_copy_for_the_subscriber(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": STEPS[1]["w"]}).wait()
        subscriber = Subscriber(tmp_path)
        subscriber.update({"w": torch.zeros(N, dtype=torch.bfloat16)})
        publisher.publish(2, STEPS[2]).wait()
        into = empty()

        report = subscriber.update(into)

    assert report.reloaded is not None
    assert_same(into, STEPS[2])


def test_steps_only_ascend(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish(5, STEPS[1])
        for step in (5, 4):
            with pytest.raises(lf_ckpt.CkptError, match="only go forward"):
                publisher.publish(step, STEPS[2])
        publisher.publish(6, STEPS[2]).wait()


@pytest.mark.parametrize("every_full", [0, 201])
def test_the_length_of_a_chain_is_limited(tmp_path: Path, every_full: int) -> None:
    with pytest.raises(ValueError, match="every_full"):
        Publisher(tmp_path, every_full=every_full)


def test_a_chain_of_a_training_store_is_refused(tmp_path: Path) -> None:
    """Only the profile allows a delta on a delta."""
    from lf_ckpt.manifest_text import dump
    from lf_ckpt.reader import read_manifest

    publish(tmp_path, 0, 1, 2)
    manifest = read_manifest(FileLayer(), str(tmp_path / "steps"), "2")
    (tmp_path / "steps/2/MANIFEST").write_bytes(dump(replace(manifest, profile=""))[0])

    with (
        lf_ckpt.open(tmp_path, read_only=True) as store,
        pytest.raises(lf_ckpt.CorruptError, match="base is not a full step"),
    ):
        store.load(2)


def test_dying_at_any_call_of_a_publication_leaves_a_chain_that_can_be_followed(tmp_path: Path) -> None:
    def begin(path: Path) -> Subscriber:
        publish(path, 0, 1)
        subscriber = Subscriber(path)
        subscriber.update(empty())
        return subscriber

    def go_on(path: Path, files: Recorder, at: int | None) -> int:
        """Effects of publishing step 3; the process dies before effect number `at` of them."""
        publisher = Publisher(path, every_full=3, keep=[Last(1)], files=files)
        publisher.publish(2, STEPS[2]).wait()
        before = len(files.calls)
        if isinstance(files, StopAtCall) and at is not None:
            files.arm(at)
        publisher.publish(3, STEPS[3]).wait()
        effects = len(files.calls) - before
        publisher.close()
        return effects

    begin(tmp_path / "count")
    effects = go_on(tmp_path / "count", Recorder(), None)
    assert effects > 8
    for at in range(0, effects, 2):
        path = tmp_path / str(at)
        subscriber, into = begin(path), empty()
        with pytest.raises(Killed):
            go_on(path, StopAtCall(), at)

        report = subscriber.update(into)

        assert report.step in (2, 3)
        assert_same(into, STEPS[report.step or 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_weights_go_from_device_to_device(tmp_path: Path) -> None:
    into = {name: tensor.cuda() for name, tensor in empty().items()}
    with Publisher(tmp_path) as publisher:
        subscriber = Subscriber(tmp_path)
        for step in range(3):
            publisher.publish(step, {name: tensor.cuda() for name, tensor in STEPS[step].items()}).wait()
            subscriber.update(into)

            assert_same({name: tensor.cpu() for name, tensor in into.items()}, STEPS[step])
