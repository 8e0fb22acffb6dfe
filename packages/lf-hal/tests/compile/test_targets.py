"""Targets and switches: what exists, what is refused, and what native means."""

import platform
import re

import pytest

from lf_hal import targets
from lf_hal.errors import UnknownSwitchError, UnknownTargetError, WrongTargetError
from lf_hal.targets import TARGETS, check_switches, missing_features, resolve_target


def test_an_unknown_target_is_named_with_all_known_ones() -> None:
    with pytest.raises(UnknownTargetError, match="loongarch64-lasx") as caught:
        resolve_target("loongarch65")
    assert caught.value.name == "loongarch65"
    assert set(caught.value.known) == set(TARGETS)


def test_native_is_the_best_target_that_this_machine_runs() -> None:
    native = resolve_target("native")
    assert native.machine == platform.machine()
    assert missing_features(native) == ()


def test_native_follows_the_features_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for words, expected in (("sse2", "sse2"), ("sse2 avx2 fma f16c", "avx2")):
        monkeypatch.setattr(targets, "_cpu_features", lambda words=words: frozenset(words.split()))
        assert resolve_target("native").name == f"x86-64-{expected}"
    avx512 = TARGETS["x86-64-avx512"].features
    monkeypatch.setattr(targets, "_cpu_features", lambda: frozenset(avx512))
    assert resolve_target("native").name == "x86-64-avx512"
    monkeypatch.setattr(targets, "_cpu_features", lambda: frozenset(avx512) - {"avx512vl"})
    assert missing_features(TARGETS["x86-64-avx512"]) == ("avx512vl",)


def test_a_machine_without_a_target_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(UnknownTargetError, match="s390x"):
        resolve_target("native")


@pytest.mark.parametrize("name", [n for n in TARGETS if not n.startswith("loongarch64")])
def test_the_loongarch_switch_on_another_target_is_a_named_error(name: str) -> None:
    with pytest.raises(WrongTargetError, match="loongarch64-lasx") as caught:
        check_switches(TARGETS[name], ["--enable-loongarch-optimization"])
    assert caught.value.target == name
    assert caught.value.switch == "enable-loongarch-optimization"


SWITCH = "--enable-loongarch-optimization"


def test_the_loongarch_switch_takes_the_widest_vectors_and_its_absence_none() -> None:
    assert resolve_target("loongarch64").name == "loongarch64-scalar"
    assert resolve_target("loongarch64", ["disable-vma"]).name == "loongarch64-scalar"
    assert resolve_target("loongarch64", [SWITCH]).name == "loongarch64-lasx"
    assert resolve_target("loongarch64-lsx", [SWITCH]).name == "loongarch64-lsx"  # asked for by name


@pytest.mark.parametrize(("words", "width"), [("lsx", "lsx"), ("lsx lasx fpu", "lasx")])
def test_on_a_loongarch_machine_the_widest_is_what_its_processor_has(
    monkeypatch: pytest.MonkeyPatch, words: str, width: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "loongarch64")
    monkeypatch.setattr(targets, "_cpu_features", lambda: frozenset(words.split()))
    assert resolve_target("loongarch64", [SWITCH]).name == f"loongarch64-{width}"
    assert resolve_target("native").name == f"loongarch64-{width}"


def test_the_loongarch_switch_without_vectors_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongTargetError, match="loongarch64-lsx, loongarch64-lasx"):
        check_switches(TARGETS["loongarch64-scalar"], [SWITCH])
    monkeypatch.setattr(platform, "machine", lambda: "loongarch64")
    monkeypatch.setattr(targets, "_cpu_features", lambda: frozenset(["fpu"]))
    with pytest.raises(WrongTargetError, match="without LSX"):
        resolve_target("loongarch64", [SWITCH])


def test_switches_are_accepted_where_they_belong() -> None:
    lasx = TARGETS["loongarch64-lasx"]
    both = ["--enable-loongarch-optimization", "disable-vma"]
    assert check_switches(lasx, both) == {"enable-loongarch-optimization", "disable-vma"}
    with pytest.raises(UnknownSwitchError, match="--disable-vma"):
        check_switches(lasx, ["--disable-vna"])


def test_no_target_lets_the_compiler_change_bits() -> None:
    assert "-ffp-contract=off" in targets.COMMON_FLAGS
    for target in TARGETS.values():
        words = (*targets.COMMON_FLAGS, *target.flags, *target.zig_only)
        assert not any("fast" in word or "unsafe" in word for word in words)
        for pattern in (target.expected, target.forbidden):
            re.compile(pattern or "")
