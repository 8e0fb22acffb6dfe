"""A model that has changed since: renamed, reshaped and converted parameters take their state along, when asked."""

from __future__ import annotations

import pytest
import torch
from ckpt_states import assert_same, bits
from torch import nn

import lf_ckpt
from lf_ckpt.naming import Fitting, Kind, castable, match, rename, select


class Net(nn.Module):
    def __init__(self, inner: str = "body", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.add_module(inner, nn.Linear(4, 4, dtype=dtype))
        self.add_module("head", nn.Linear(4, 2, dtype=dtype))


def trained(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 + i} for i, p in enumerate(net.parameters())], weight_decay=0.5
    )
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "mapping",
    [{"body.weight": "trunk.weight", "body.bias": "trunk.bias"}, lambda name: name.replace("body", "trunk")],
)
def test_moments_and_groups_follow_a_renamed_parameter(mapping: object) -> None:
    net = Net()
    optimizer = trained(net)
    renamed = Net("trunk")
    fresh = torch.optim.AdamW([{"params": [p]} for p in renamed.parameters()])

    report = lf_ckpt.restore(renamed, fresh, lf_ckpt.collect(net, optimizer), map_names=mapping)

    assert report.renamed == (("body.weight", "trunk.weight"), ("body.bias", "trunk.bias"))
    assert report.groups_kept == report.missing == report.unexpected == ()
    assert bits(renamed.trunk.weight) == bits(net.body.weight)
    assert bits(fresh.state[renamed.trunk.weight]["exp_avg"]) == bits(
        optimizer.state[net.body.weight]["exp_avg"]
    )
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 1.1, 2.1, 3.1]


def test_a_reshaped_parameter_takes_its_moments_along_only_when_asked() -> None:
    net = Net()
    optimizer = trained(net)
    saved = lf_ckpt.collect(net, optimizer)
    other = Net()
    other.body.weight = nn.Parameter(torch.zeros(2, 8))
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(lf_ckpt.MismatchError, match=r"model.body.weight: float32\[4, 4\] -> float32\[2, 8\]"):
        lf_ckpt.restore(other, fresh, saved)

    report = lf_ckpt.restore(other, fresh, saved, reshape=True)

    assert report.reshaped == ("body.weight: float32[4, 4] -> float32[2, 8]",)
    assert bits(other.body.weight) == bits(net.body.weight)
    moment = fresh.state[other.body.weight]["exp_avg"]
    assert moment.shape == (2, 8)
    assert bits(moment) == bits(optimizer.state[net.body.weight]["exp_avg"])


def test_moments_of_a_parameter_that_does_not_fit_are_left_out() -> None:
    net = Net()
    saved = lf_ckpt.collect(net, trained(net))
    wider = Net()
    wider.body = nn.Linear(4, 5)
    fresh = torch.optim.AdamW(wider.parameters())

    report = lf_ckpt.restore(wider, fresh, saved, strict=False)

    assert [text.split(":")[0] for text in report.mismatched] == ["model.body.weight", "model.body.bias"]
    assert wider.body.weight not in fresh.state
    assert fresh.state[wider.head.weight]["exp_avg"].shape == (2, 4)


def test_dtypes_are_converted_only_when_asked_and_moments_keep_theirs() -> None:
    net = Net()
    optimizer = trained(net)
    saved = lf_ckpt.collect(net, optimizer)
    half = Net(dtype=torch.bfloat16)
    fresh = torch.optim.AdamW(half.parameters())
    with pytest.raises(lf_ckpt.MismatchError, match=r"float32.* -> bfloat16"):
        lf_ckpt.restore(half, fresh, saved)

    report = lf_ckpt.restore(half, fresh, saved, cast=True)

    assert len(report.cast) == 4
    assert_same(half.state_dict(), {n: t.bfloat16() for n, t in net.state_dict().items()})
    assert fresh.state[half.body.weight]["exp_avg"].dtype == torch.float32


def test_a_cast_only_rounds() -> None:
    yes = [("float32", "bfloat16"), ("float16", "float64"), ("int32", "int64"), ("bool", "uint8")]
    yes += [("int64", "float32"), ("float32", "complex64"), ("complex128", "complex64"), ("uint8", "int16")]
    no = [("float32", "int32"), ("complex64", "float32"), ("int64", "int32"), ("int8", "uint8")]
    no += [("float32", "bool"), ("int8", "bool"), ("uint64", "int64")]

    def ask(pair: tuple[str, str]) -> bool:
        return castable(getattr(torch, pair[0]), getattr(torch, pair[1]))

    assert [pair for pair in yes if not ask(pair)] == []
    assert [pair for pair in no if ask(pair)] == []


def test_names_may_swap_but_not_collide() -> None:
    assert rename(["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}
    with pytest.raises(lf_ckpt.CkptError, match="'b' to both 'a' and 'b'"):
        rename(["a", "b"], {"a": "b"})
    with pytest.raises(lf_ckpt.CkptError, match="'x' to both"):
        rename(["a", "b"], lambda _: "x")
    with pytest.raises(lf_ckpt.MismatchError, match="gone"):
        rename(["a"], {"gone": "b"})
    with pytest.raises(lf_ckpt.CkptError, match="None for 'a'"):
        rename(["a"], lambda _: None)  # type: ignore[arg-type,return-value]


def test_patterns_select_by_glob_or_whole_name_and_must_match_something() -> None:
    names = ["model.a", "model.b[0]", "optim.a.step"]

    assert select(names, None) == names
    assert select(names, "model.*") == names[:2]
    assert select(names, ["*.step", "model.b[0]"]) == names[1:]
    with pytest.raises(lf_ckpt.MismatchError, match=r"model\.z"):
        select(names, ["model.*", "model.z*"])
    assert select(names, []) == []


def test_a_match_says_what_is_taken_and_what_is_not() -> None:
    f32 = torch.float32
    saved = {"a": Kind(f32, (2, 3)), "b": Kind(f32, (4,)), "old": Kind(f32, ()), "extra": Kind(f32, ())}
    wanted = {
        "a": Kind(torch.float64, (6,)),
        "b": Kind(f32, (5,)),
        "new": Kind(f32, ()),
        "gone": Kind(f32, ()),
    }
    names = {"a": "a", "b": "b", "old": "new", "extra": "extra"}

    found = match(saved, wanted, names, Fitting(reshape=True, cast=True))

    assert found.source == {"a": "a", "new": "old"}
    assert (found.missing, found.unexpected) == (("gone",), ("extra",))
    assert found.mismatched == ("b: float32[4] -> float32[5]",)
    assert found.renamed == (("old", "new"),)
    assert found.reshaped == found.cast == ("a: float32[2, 3] -> float64[6]",)
    with pytest.raises(lf_ckpt.MismatchError):
        found.require()
    assert match(saved, wanted, names, Fitting()).source == {"new": "old"}
