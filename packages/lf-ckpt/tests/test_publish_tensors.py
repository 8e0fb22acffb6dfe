"""Which tensors a publisher takes for ties and casts, and which a subscriber fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_states import assert_same, bits
from test_publish import STEPS, N, Subscriber_at, empty
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lf_ckpt
from lf_ckpt import Publisher, Subscriber


def test_other_tensors_are_filled_completely(tmp_path: Path) -> None:
    subscriber = Subscriber_at(tmp_path, 2)
    into = empty()
    subscriber.update(into)
    strided = {**empty(), "w": torch.zeros(N, 2, dtype=torch.bfloat16)[:, 1]}

    subscriber.update(strided)

    assert_same(strided, STEPS[3])
    model = {name: tensor.view_as(tensor) for name, tensor in strided.items()}  # as state_dict() gives them
    assert subscriber.update(model).bytes_changed == 0


def test_casting_keeps_ties_and_leaves_integers(tmp_path: Path) -> None:
    w = torch.randn(1000)
    with Publisher(tmp_path) as publisher:
        report = publisher.publish(1, {"w": w, "tied": w, "n": torch.arange(5)}).wait()
    w16 = w.to(torch.bfloat16)
    into = {"w": torch.zeros_like(w16), "tied": torch.zeros_like(w16), "n": torch.zeros(5, dtype=torch.int64)}

    Subscriber(tmp_path).update(into)

    assert_same(into, {"w": w16, "tied": w16, "n": torch.arange(5)})
    assert report.bytes_raw == 2 * 1000 + 5 * 8


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for and forgotten at once."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full((4096,), float(name))

    def __iter__(self) -> Iterator[str]:
        return iter(["1", "2", "3"])

    def __len__(self) -> int:
        return 3


def test_tensors_made_on_the_fly_are_not_taken_for_ties(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher:
        publisher.publish(1, Lazy())
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        assert [int(t[0]) for t in store.load().tensors.values()] == [1, 2, 3]


def test_a_negated_view_is_no_tie_of_what_it_negates(tmp_path: Path) -> None:
    z = torch.arange(8).to(torch.complex64) * 1j
    tensors = {"imag": z.imag, "minus": z.conj().imag}
    with Publisher(tmp_path) as publisher:
        publisher.publish(1, tensors)
    with lf_ckpt.open(tmp_path, read_only=True) as store:
        loaded = store.load().tensors
    assert torch.equal(loaded["imag"].float(), z.imag)
    assert torch.equal(loaded["minus"].float(), -z.imag)


def test_sharded_tensors_are_not_taken_for_ties(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = {"one": torch.ones(64), "two": torch.full((64,), 2.0)}
        tensors = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in whole.items()}
        with Publisher(tmp_path / "store") as publisher:
            publisher.publish(1, {**tensors, "tied": tensors["two"]}).wait()
        with lf_ckpt.open(tmp_path / "store", read_only=True) as store:
            loaded = store.load().tensors
    finally:
        dist.destroy_process_group()
    assert {name: float(t[0]) for name, t in loaded.items()} == {"one": 1, "two": 2, "tied": 2}
    assert loaded["two"].data_ptr() == loaded["tied"].data_ptr()


def test_without_a_cast_every_bit_arrives(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(1000), "h": torch.randn(10).half()}
    with Publisher(tmp_path, dtype=None) as publisher:
        publisher.publish(1, tensors).wait()
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    Subscriber(tmp_path).update(into)

    assert {name: bits(tensor) for name, tensor in into.items()} == {n: bits(t) for n, t in tensors.items()}
