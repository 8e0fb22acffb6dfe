"""Devices are asked for by name; an explicit one is had or is an error, and a choice stays."""

import inspect
import logging
import typing
from collections.abc import Sequence

import pytest
import torch

import lf_hal
from lf_hal.errors import DeviceIndexError, DeviceNameError, DeviceUnavailableError, HalError
from lf_hal.evidence import Evidence
from lf_hal.probe import Devices, Probe, State, parse_device


def found(backend: str, kind: str, *devices: str, reason: str = "", **more: typing.Any) -> Probe:
    state = State.READY if devices else State.INSTALLED_UNUSABLE
    return Probe(backend, kind, state, reason or ", ".join(devices), "done", devices=devices, **more)


CPU = found("cpu", "cpu", "a CPU", evidence=Evidence.VERIFIED)
NO_CUDA = Probe("cuda", "cuda", State.ABSENT, "no NVIDIA driver", "driver")
NO_NPU = found("ascend", "npu", reason="ImportError: libhccl.so", fix="install CANN")
NO_MLU = Probe("mlu", "mlu", State.INVISIBLE, "MLU_VISIBLE_DEVICES='' hides them", "devices")
NPUS = found("ascend", "npu", "Ascend910B3", "Ascend910B3")


def devices(*probes: Probe) -> Devices:
    return Devices(lambda: probes)


def test_case_2_the_error_of_the_automatic_choice_has_the_cause_of_every_backend() -> None:
    with pytest.raises(DeviceUnavailableError) as caught:
        devices(NO_CUDA, NO_NPU, NO_MLU, CPU).choose(accelerator=True)
    text = str(caught.value)
    assert "no NVIDIA driver" in text
    assert "libhccl.so" in text
    assert "MLU_VISIBLE_DEVICES" in text


def test_case_4_an_explicit_device_never_becomes_another() -> None:
    with pytest.raises(DeviceUnavailableError) as caught:
        devices(NO_CUDA, NO_NPU, NO_MLU, CPU).require("npu:0")
    assert caught.value.device == "npu:0"
    assert caught.value.causes[0] == "ascend: installed_unusable, ImportError: libhccl.so"
    assert len(caught.value.causes) == 4
    assert caught.value.fix == "install CANN"
    assert isinstance(caught.value, HalError)


def test_a_type_nobody_probes_is_unavailable_too() -> None:
    with pytest.raises(DeviceUnavailableError, match="tpu:0 cannot be used"):
        devices(NO_CUDA, CPU).require("tpu:0")


@pytest.mark.parametrize(
    "given",
    [
        0,
        1,
        True,
        -1,
        None,
        1.0,
        "0",
        "npu",
        "npu:",
        "npu:-1",
        "npu:01",
        "NPU:0",
        "npu:0 ",
        "npu:0:1",
        b"npu:0",
        "",
    ],
)
def test_case_6_only_a_type_with_an_index_is_a_device(given: object) -> None:
    with pytest.raises(DeviceNameError, match="npu:0") as caught:
        devices(NPUS, CPU).require(given)
    assert caught.value.given is given


def test_case_6_an_index_that_is_not_there_is_rejected_with_the_range() -> None:
    with pytest.raises(DeviceIndexError, match="npu:0 to npu:1") as caught:
        devices(NPUS, CPU).require("npu:2")
    assert caught.value.count == 2
    with pytest.raises(DeviceIndexError, match="there is cpu:0"):
        devices(CPU).require("cpu:1")


def test_a_torch_device_is_a_name_and_one_without_index_is_not() -> None:
    assert parse_device(torch.device("cuda", 3)) == ("cuda", 3)
    assert parse_device(torch.device("cpu")) == ("cpu", 0)
    with pytest.raises(DeviceNameError):
        parse_device(torch.device("cuda"))
    assert devices(CPU).require("cpu").torch_device() == torch.device("cpu:0")


def test_case_7_no_public_function_returns_a_bare_int_as_a_device() -> None:
    asked = {name: getattr(lf_hal, name) for name in lf_hal.__all__}
    functions = {
        n: f for n, f in asked.items() if inspect.isfunction(f) and f.__module__.startswith("lf_hal.probe")
    }
    assert {"probe", "choose", "require"} <= set(functions)
    for name, function in functions.items():
        assert typing.get_type_hints(function)["return"] not in (int, int | None), name
    assert devices(NPUS).choose().device == "npu:0"


def test_case_9_a_choice_is_logged_once_with_its_evidence_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def ask() -> Sequence[Probe]:
        asked.append(1)
        return (NO_CUDA, NPUS, CPU) if len(asked) == 1 else (CPU,)

    process = Devices(ask)
    with caplog.at_level(logging.INFO, "lf_hal.devices"):
        first = process.choose()
        assert process.choose() is first
        assert process.require("npu:0").device == "npu:0"
    assert first.device == "npu:0"
    assert len(asked) == 1
    (record,) = caplog.records
    assert "npu:0 (Ascend910B3)" in record.getMessage()
    assert "no NVIDIA driver" in record.getMessage()
    assert "contract-only" in record.getMessage()


def test_case_9_the_cpu_is_chosen_aloud_and_only_where_an_accelerator_is_not_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = devices(NO_CUDA, NO_NPU, CPU)
    with caplog.at_level(logging.INFO, "lf_hal.devices"):
        assert process.choose().device == "cpu:0"
    assert "libhccl.so" in caplog.text
    with pytest.raises(DeviceUnavailableError):
        process.choose(accelerator=True)


def test_a_refused_chip_is_refused_by_index() -> None:
    with pytest.raises(DeviceUnavailableError, match="Ascend910A is refused"):
        devices(found("ascend", "npu", "Ascend910A", "Ascend910B3")).require("npu:0")
    assert devices(found("ascend", "npu", "Ascend910A", "Ascend910B3")).require("npu:1").name == "Ascend910B3"


def test_a_note_on_a_patched_torch_cuda_is_in_the_error() -> None:
    patched = Probe(
        "cuda", "cuda", State.ABSENT, "no NVIDIA driver", "driver", notes=("torch.cuda is torch_npu's",)
    )
    with pytest.raises(DeviceUnavailableError, match=r"torch\.cuda is torch_npu's"):
        devices(patched, NPUS, CPU).require("cuda:0")


def test_where_nothing_is_ready_nothing_is_chosen() -> None:
    with pytest.raises(DeviceUnavailableError, match="any device cannot be used"):
        devices(NO_CUDA, NO_NPU).choose()


def test_this_process_has_its_cpu() -> None:
    assert lf_hal.require("cpu:0").evidence is Evidence.VERIFIED
    with pytest.raises(DeviceUnavailableError):
        lf_hal.require("mlu:0")
