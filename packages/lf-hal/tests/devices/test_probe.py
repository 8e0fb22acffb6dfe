"""Each backend is tried in a process of its own: whatever it does, the result says what, and nothing else changes."""

import inspect
import json
import logging
import os
import select
import subprocess
import sys
from pathlib import Path

import device_fakes as fakes
import pytest
import torch  # the real one, before a test puts a small one in its place

from lf_hal.cli import main
from lf_hal.probe import BACKENDS, Probe, State, probe

needs_gcc = pytest.mark.skipif(fakes.GCC is None, reason="no C compiler")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, first on sys.path, with a small torch; and a /dev without devices."""
    folder = tmp_path / "site"
    fakes.install_torch(folder)
    (tmp_path / "root/dev").mkdir(parents=True)
    monkeypatch.setenv("LOONGFORGE_PROBE_ROOT", str(tmp_path / "root"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def node(site: Path, *names: str) -> None:
    for name in names:
        path = site.parent / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def ends(pid: int) -> bool:
    """Whether this process is gone, or goes within ten seconds."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], 10.0)[0])
    finally:
        os.close(watch)


def one(name: str, timeout_s: float = 60.0) -> Probe:
    (found,) = probe(timeout_s, [name])
    return found


def test_a_machine_without_accelerators_has_a_ready_cpu_and_says_what_is_absent(site: Path) -> None:
    found = {p.backend: p for p in probe()}
    assert list(found) == [row.name for row in BACKENDS]
    assert found["cpu"].state is State.READY
    assert found["cpu"].count == 1
    assert found["ascend"].state is found["mlu"].state is State.ABSENT
    assert "torch_npu is not installed" in found["ascend"].reason
    assert "torch_mlu is not installed" in found["mlu"].reason


@needs_gcc
def test_a_missing_library_is_named_with_its_stage_and_what_installs_it(site: Path, tmp_path: Path) -> None:
    built = fakes.library(tmp_path / "b/libtorch_npu.so", fakes.MISSING_LIBRARY, needs="hccl")
    fakes.install(site, "torch_npu", "2.12.0", fakes.LOAD, libtorch_npu__so=built)
    found = one("ascend")
    assert found.state is State.INSTALLED_UNUSABLE
    assert found.missing == ("libhccl.so",)
    assert found.stage == "import torch_npu"
    assert "CANN" in found.fix
    assert found.versions["torch_npu"] == "2.12.0"


@needs_gcc
def test_case_1_a_symbol_that_cann_lacks_is_named_with_its_stage_and_nothing_is_raised(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = fakes.library(tmp_path / "b/libtorch_npu.so", fakes.MISSING_SYMBOL)
    fakes.install(site, "torch_npu", "2.12.0", fakes.LOAD, libtorch_npu__so=built)
    cann = tmp_path / "cann/x86_64-linux"
    cann.mkdir(parents=True)
    (cann / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    found = one("ascend")
    assert found.state is State.INSTALLED_UNUSABLE
    assert found.missing == ("aclrtMallocAlign32",)
    assert found.stage == "import torch_npu"
    assert "released with cann 9.1.0, and 8.5.0 is installed" in found.reason
    assert "CANN" in found.fix


BROKEN = {
    "segfault": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "abort": ("import os; os.abort()", "SIGABRT"),
    "leaves": ("import os; os._exit(0)", "exit status 0 and no result"),
    "exits": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "raises": ("raise RuntimeError('driver 22 wants firmware 7')", "driver 22 wants firmware 7"),
    "closes": ("import os; os.closerange(3, 256); raise ImportError('gone')", "exit status 1 and no result"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_backend_that_breaks_at_import_is_unusable_and_changes_no_other_result(
    site: Path, way: str
) -> None:
    code, said = BROKEN[way]
    fakes.install(site, "torch_npu", "2.12.0", f"import torch\nprint('half way', flush=True)\n{code}\n")
    fakes.install(site, "torch_mlu", "1.22.0+torch2.12.0", fakes.works("mlu", "MLU370-X8"))
    found = {p.backend: p for p in probe()}
    assert found["ascend"].state is State.INSTALLED_UNUSABLE
    assert said in found["ascend"].reason
    assert found["ascend"].stage == "import torch_npu"
    assert found["mlu"].state is State.READY, found["mlu"].reason
    assert found["mlu"].devices == ("MLU370-X8", "MLU370-X8")
    assert found["cpu"].state is State.READY


def test_a_backend_that_hangs_is_killed_with_what_it_started_and_holds_up_nobody(
    site: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    code = f"""
        import subprocess
        print("waiting for the driver", flush=True)
        open({str(mark)!r}, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
        while True: pass
    """
    fakes.install(site, "torch_npu", "2.12.0", code)
    ascend, cpu = probe(3.0, ["ascend", "cpu"])
    assert ascend.state is State.INSTALLED_UNUSABLE
    assert "no answer in 3 s in stage 'import torch_npu'" in ascend.reason
    assert "waiting for the driver" in ascend.reason
    assert cpu.state is State.READY
    assert ends(int(mark.read_text()))


def test_a_process_that_a_backend_leaves_behind_delays_no_answer(site: Path) -> None:
    start = "import subprocess; subprocess.Popen(['sleep', '600'], close_fds=False)\n"
    fakes.install(site, "torch_npu", "2.12.0", start + fakes.works("npu", "Ascend910B3"))
    assert one("ascend").state is State.READY


def test_what_a_backend_prints_is_taken_for_nothing_else(site: Path) -> None:
    line = '{"end": "absent", "reason": "fake"}'
    noise = f"import sys\nfor i in range(20000): print({line!r}, '\\x00\\x1b[2J')\n"
    noise += "sys.stderr.buffer.write(bytes(range(256)) * 64)\n"
    fakes.install(site, "torch_npu", "2.12.0", noise + fakes.works("npu", "Ascend910B3"))
    found = one("ascend")
    assert found.state is State.READY
    assert found.devices == ("Ascend910B3", "Ascend910B3")


def test_a_backend_that_prints_for_ever_is_stopped(site: Path) -> None:
    fakes.install(site, "torch_npu", "2.12.0", "while True: print('x' * 100000)\n")
    assert "no answer in 2 s" in one("ascend", 2.0).reason


def test_case_5_a_patched_torch_cuda_is_reported_and_the_npu_is_found(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = "torch.cuda.is_available = lambda: True\ntorch.cuda.is_available.__module__ = 'torch_npu.npu'\n"
    fakes.install(site, "torch_npu", "2.12.0", fakes.works("npu", "Ascend910B3") + patch)
    found = one("ascend")
    assert found.state is State.READY
    assert any("torch_npu patches torch.cuda" in note for note in found.notes)

    def is_available() -> bool:
        return True

    is_available.__module__ = "torch_npu.contrib.transfer_to_npu"
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    cuda, ascend = probe(60.0, ["cuda", "ascend"])
    assert cuda.state is not State.READY
    assert any(
        "torch.cuda.is_available is torch_npu.contrib.transfer_to_npu's" in note for note in cuda.notes
    )
    assert ascend.count == 2


def test_a_torch_of_another_release_makes_a_backend_unusable_even_where_it_answers(site: Path) -> None:
    fakes.install(site, "torch_npu", "2.9.0.post2", fakes.works("npu", "Ascend910B3"))
    fakes.install(site, "torch_mlu", "1.22.0+torch2.4.0", fakes.works("mlu", "MLU370-X8"))
    ascend, mlu = probe(60.0, ["ascend", "mlu"])
    assert "torch_npu 2.9.0.post2 is for torch 2.9.0, and torch 2.12.0 is installed" in ascend.reason
    assert "torch_mlu 1.22.0+torch2.4.0 is for torch 2.4.0" in mlu.reason
    assert {ascend.state, mlu.state} == {State.INSTALLED_UNUSABLE}
    assert ascend.stage == "versions"


def test_an_older_cann_that_works_is_noted(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann/version.cfg").write_text("runtime_running_version=[7.0.0.5.242:8.3.RC1]\n")
    node(site, "usr/local/Ascend/driver/version.info")
    (tmp_path / "root/usr/local/Ascend/driver/version.info").write_text(
        "Version=24.1.rc3\nascendhal_version=7.35\n"
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    fakes.install(site, "torch_npu", "2.12.0", fakes.works("npu", "Ascend910B3"))
    found = one("ascend")
    assert found.state is State.READY
    assert found.versions["cann"] == "8.3.RC1"
    assert found.versions["ascend driver"] == "24.1.rc3"
    assert any("released with cann 9.1.0" in note for note in found.notes)


def test_the_first_ascend_910_is_refused_and_an_unknown_chip_is_noted(site: Path) -> None:
    fakes.install(site, "torch_npu", "2.12.0", fakes.works("npu", "Ascend910A"))
    fakes.install(site, "torch_mlu", "1.22.0+torch2.12.0", fakes.works("mlu", "MLU999"))
    ascend, mlu = probe(60.0, ["ascend", "mlu"])
    assert ascend.state is State.INSTALLED_UNUSABLE
    assert "Ascend910A is refused" in ascend.reason
    assert ascend.count == 0
    assert mlu.state is State.READY
    assert "MLU999 is not in the table of chips" in mlu.notes


def test_hidden_npus_are_invisible_and_the_variable_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(site, "dev/davinci0", "dev/davinci1", "dev/davinci_manager")
    fakes.install(site, "torch_npu", "2.12.0", fakes.works("npu", "Ascend910B3"))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    found = one("ascend")
    assert found.state is State.INVISIBLE
    assert "2 npus are there, and ASCEND_RT_VISIBLE_DEVICES='' hides them" in found.reason
    assert found.count == 0


def test_device_nodes_without_the_package_are_not_absent(site: Path) -> None:
    node(site, "dev/cambricon_dev0")
    found = one("mlu")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "1 mlu devices are there, but torch_mlu is not installed" in found.reason


def test_a_package_without_devices_is_unusable(site: Path) -> None:
    fakes.install(site, "torch_npu", "2.12.0", fakes.works("npu", "", count=0))
    found = one("ascend")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "there is no npu" in found.reason


def test_a_package_that_import_torch_loads_by_itself_is_noted(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """research 3f: an installed torch_npu without CANN breaks `import torch` of every program."""
    broken = "import ctypes; ctypes.CDLL('libhccl.so')\n"
    fakes.install(site, "torch_npu", "2.12.0", broken, backend="_autoload")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    ascend, cpu = probe(60.0, ["ascend", "cpu"])
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in note for note in ascend.notes)
    assert cpu.state is State.READY
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert not any("AUTOLOAD" in note for note in one("ascend").notes)


def test_the_real_torch_comes_up_beside_a_broken_backend_that_it_would_load(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real torch, and the package put in place by pip."""
    broken = "import torch, ctypes; ctypes.CDLL('libhccl.so')\n"
    made = fakes.wheel(
        tmp_path, "torch_npu", "2.13.0", {"torch_npu/__init__.py": broken}, backend="_autoload"
    )
    target = tmp_path / "pip"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, made]
    subprocess.run(pip, check=True, timeout=120)
    monkeypatch.setattr(sys, "path", [str(target), *sys.path[1:]])
    # torch loads what is in this group, as research 3f found with the wheel of torch_npu
    assert '"torch.backends"' in inspect.getsource(torch._import_device_backends)
    found = one("ascend")
    assert found.stage == "import torch_npu"
    assert found.missing == ("libhccl.so",)


@needs_gcc
def test_cuda_devices_hidden_by_the_environment_are_invisible(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.library(tmp_path / "cuda/libcuda.so.1", fakes.LIBCUDA, soname="libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "cuda"))
    node(site, "proc/driver/nvidia/gpus/0000:01:00.0", "proc/driver/nvidia/gpus/0000:02:00.0")
    fakes.install_torch(site, cuda="12.8", count=2)
    seen = one("cuda")
    assert seen.state is State.READY
    assert seen.devices == ("NVIDIA Fake", "NVIDIA Fake")
    assert seen.versions == {"cuda driver": "12.8", "torch": "2.12.0", "torch cuda": "12.8"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = one("cuda")
    assert hidden.state is State.INVISIBLE
    assert "2 GPUs are there, and CUDA_VISIBLE_DEVICES='' hides them" in hidden.reason
    assert "unset CUDA_VISIBLE_DEVICES" in hidden.fix


@needs_gcc
def test_a_driver_that_does_not_fit_its_library_is_unusable_with_the_number(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.library(tmp_path / "cuda/libcuda.so.1", fakes.LIBCUDA, soname="libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "cuda"))
    monkeypatch.setenv("FAKE_CUINIT", "803")
    found = one("cuda")
    assert found.state is State.INSTALLED_UNUSABLE
    assert found.stage == "cuInit"
    assert "803" in found.reason


@needs_gcc
def test_a_torch_without_cuda_is_told_apart_from_a_machine_without_gpus(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.library(tmp_path / "cuda/libcuda.so.1", fakes.LIBCUDA, soname="libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "cuda"))
    found = one("cuda")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "2 GPUs, but torch 2.12.0 is built without CUDA" in found.reason


def test_gpus_without_the_user_library_are_unusable(site: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has the library")
    assert one("cuda").state is State.ABSENT
    node(site, "dev/nvidia0", "dev/nvidiactl")
    found = one("cuda")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "1 GPUs are there, but libcuda.so.1" in found.reason


def test_a_cpu_whose_numpy_cannot_run_is_unusable(site: Path) -> None:
    fakes.install(site, "numpy", "9.9.9", "import os, signal; os.kill(os.getpid(), signal.SIGILL)\n")
    found = one("cpu")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "SIGILL in stage 'import numpy'" in found.reason


def test_probing_loads_nothing_into_the_process_that_asks() -> None:
    code = "import sys; from lf_hal import probe; probe(); sys.exit(bool({'torch', 'torch_npu'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_module_of_the_caller_takes_the_place_of_none_in_the_child(site: Path) -> None:
    for name in ("resource", "json", "ctypes"):
        (site / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    assert one("mlu").state is State.ABSENT


def test_a_process_that_cannot_be_started_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = one("cpu")
    assert found.state is State.INSTALLED_UNUSABLE
    assert "no process could be started" in found.reason

    def pipe() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", pipe)
    assert "Too many open files" in one("mlu").reason
    assert probe(1.0, []) == []


def test_a_backend_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="ascend"):
        probe(1.0, ["tpu"])


def test_the_command_prints_every_backend_and_its_evidence(
    site: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lf_hal.devices"):
        assert main(["probe", "--json", "--require", "cpu:0"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in printed["probes"]] == [row.name for row in BACKENDS]
    assert all(row["evidence"] and row["reason"] for row in printed["probes"])
    assert main(["probe", "--require", "npu:0"]) == 1
    out, err = capsys.readouterr()
    assert "contract-only" in out
    assert "npu:0 cannot be used, and nothing is used in its place" in err
    assert "torch_npu is not installed" in err
