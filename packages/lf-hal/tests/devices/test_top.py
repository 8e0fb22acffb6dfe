"""Utilisation: the kernel's own numbers, and vendors' tables. Samples of npu-smi and cnmon have the published layouts
with numbers of our own; no such tool ever ran here, so they hold our side of the contract only."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lf_hal._monitors import (
    busy_between,
    parse_cnmon,
    parse_meminfo,
    parse_npu_smi,
    parse_nvidia_smi,
    parse_stat,
)
from lf_hal.cli import main
from lf_hal.evidence import Evidence
from lf_hal.top import Monitor, table

STAT = (
    "cpu  40 0 40 320 0 0 0 0 0 0\ncpu0 {0} 0 20 160 10 0 0 5 0 0\ncpu1 20 0 20 {1} 0 0 0 0 0 0\nintr 1 2 3\n"
)
MIB = 1 << 20

# contract-only: the layout of npu-smi 23 to 25 with one chip a card
NPU_A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.0.0                   Version: 25.0.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 101.5       44                0    / 0             |
| 0                         | 0000:C1:00.0  | 93          0    / 0          60060/ 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 98.0        41                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3400 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4242          | python                   | 56700                   |
+===========================+===============+====================================================+
"""
# contract-only: two chips a card, with their physical ids
NPU_A3 = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 170.0       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 12          0    / 0          3416 / 65536         |
| 0     Ascend910           | OK            | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 7           0    / 0          3189 / 65536         |
"""
# contract-only: an inference card without HBM
NPU_310P = """\
| NPU     Name              | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device            | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 8       310P3             | OK              | NA           40                0     / 0             |
| 0       0                 | 0000:08:00.0    | 31           1500 / 21527                            |
"""
# contract-only: the layouts of cnmon 5 and of cnmon 4
CNMON_5 = """\
Tue Dec  1 12:00:00 2026
+------------------------------------------------------------------------------+
| CNMON v5.10.22                                               Driver v5.10.22 |
+-------------------------------+----------------------+-----------------------+
| Card  VF  Name       Firmware |               Bus-Id | Util        Ecc-Error |
| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage | Mode     Compute-Mode |
|===============================+======================+=======================|
| 0     /   MLU370-X8    v1.1.6 |         0000:13:00.0 | 42%                 0 |
|  0%   28C        107 W/ 250 W |  5120 MiB/ 20638 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+
| 1     /   MLU370-X8    v1.1.6 |         0000:16:00.0 | N/A                 0 |
|  0%   32C        107 W/ 250 W |     0 MiB/ 20638 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+

+------------------------------------------------------------------------------+
| Processes:                                                                   |
|  Card  MI  PID     Command Line                             MLU Memory Usage |
|==============================================================================|
|  No running processes found                                                  |
+------------------------------------------------------------------------------+
"""
CNMON_4 = """\
| Card  VF  Name       Firmware | Inited        Driver | Util        Ecc-Error |
| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage |         vMemory-Usage |
| 0     /   MLU290-M5    v1.1.6 | On          v4.20.11 | 7%          N/A       |
|  0%   32C         30 W/ 150 W |   512 MiB/ 32768 MiB | 10240 MiB/1048576 MiB |
"""


def test_work_is_what_is_neither_idle_nor_waiting() -> None:
    assert parse_stat(STAT.format(20, 160)) == {0: (45, 215), 1: (40, 200)}


def test_busy_is_the_share_of_the_time_between_two_looks() -> None:
    busy = busy_between(parse_stat(STAT.format(20, 160)), parse_stat(STAT.format(45, 260)))
    assert busy == {0: 100.0, 1: 0.0}
    assert busy_between({}, {3: (5, 10)}) == {3: None}
    assert busy_between({3: (5, 10)}, {3: (5, 10)}) == {3: None}


def test_memory_in_use_leaves_out_what_can_be_had_back() -> None:
    host = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n"
    node = "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  100 kB\nNode 0 FilePages:  500 kB\nNode 0 Shmem:  50 kB\n"
    assert parse_meminfo(host) == (400 << 10, 1000 << 10)
    assert parse_meminfo(node) == (450 << 10, 1000 << 10)
    with pytest.raises(ValueError, match="MemTotal"):
        parse_meminfo("")


def test_rows_of_nvidia_smi_and_what_a_gpu_does_not_say() -> None:
    one, two = parse_nvidia_smi("0, NVIDIA H200, 37, 1024, 143771\n1, NVIDIA H200, [N/A], [N/A], 143771\n")
    assert (one.device, one.name, one.busy, one.used) == ("cuda:0", "NVIDIA H200", 37, 1024 * MIB)
    assert (two.busy, two.used, two.memory) == (None, None, None)
    assert one.evidence is Evidence.NEEDS_GPU
    assert parse_nvidia_smi("") == []
    with pytest.raises(ValueError, match="not a row"):
        parse_nvidia_smi("No devices were found")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (NPU_A2, [("npu:0", "910B3", 93, 60060, 65536), ("npu:1", "910B3", 0, 3400, 65536)]),
        (NPU_A3, [("npu:0", "Ascend910", 12, 3416, 65536), ("npu:1", "Ascend910", 7, 3189, 65536)]),
        (NPU_310P, [("npu:0", "310P3", 31, 1500, 21527)]),
    ],
)
def test_contract_only_rows_of_npu_smi(text: str, wanted: list[tuple[str, str, int, int, int]]) -> None:
    rows = parse_npu_smi(text)
    expected = [(d, n, b, u * MIB, t * MIB) for d, n, b, u, t in wanted]
    assert [(r.device, r.name, r.busy, r.used, r.total) for r in rows] == expected
    assert {r.evidence for r in rows} == {Evidence.CONTRACT_ONLY}


def test_contract_only_rows_of_cnmon() -> None:
    rows = parse_cnmon(CNMON_5)
    assert [(r.device, r.name, r.busy, r.used, r.total) for r in rows] == [
        ("mlu:0", "MLU370-X8", 42, 5120 * MIB, 20638 * MIB),
        ("mlu:1", "MLU370-X8", None, 0, 20638 * MIB),
    ]
    (old,) = parse_cnmon(CNMON_4)
    assert (old.name, old.busy, old.used) == ("MLU290-M5", 7, 512 * MIB)
    assert {r.evidence for r in [*rows, old]} == {Evidence.CONTRACT_ONLY}


@pytest.mark.parametrize("parse", [parse_npu_smi, parse_cnmon, parse_nvidia_smi])
def test_any_text_gives_rows_or_a_value_error(parse: object) -> None:
    assert callable(parse)
    source = random.Random(7)
    for sample in (NPU_A2, NPU_A3, NPU_310P, CNMON_5, CNMON_4, "0, NVIDIA H200, 37, 1024, 143771\n"):
        for _ in range(100):
            cut = list(sample)
            for _ in range(source.randrange(1, 20)):
                cut[source.randrange(len(cut))] = source.choice("|0/ x\n%-\x1b")
            text = "".join(cut[: source.randrange(len(cut))])
            try:
                rows = parse(text)
            except ValueError:
                continue
            assert all(row.device and row.name is not None for row in rows)


def host(root: Path, busy: int, idle: int) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(STAT.format(busy, idle))
    for node, (cpus, free) in enumerate([("0", 750), ("1", 250)]):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal: 1000 kB\nNode {node} MemFree: {free} kB\n")


def test_a_look_has_cpus_nodes_and_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host with two sockets: their load and their memory can be compared."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("npu-smi", NPU_A2), ("cnmon", CNMON_5)):
        (tools / f"{name}.txt").write_text(text)
        (tools / name).write_text(f"#!/bin/sh\nexec cat {tools / name}.txt\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    host(tmp_path, 20, 160)
    monitor = Monitor(tmp_path)
    host(tmp_path, 45, 260)
    seen = monitor.look()
    rows = {row.device: row for row in seen.rows}
    assert (rows["cpu0"].busy, rows["cpu1"].busy) == (100.0, 0.0)
    assert (rows["node0"].busy, rows["node1"].busy) == (100.0, 0.0)
    assert (rows["node0"].memory, rows["node1"].memory) == (25.0, 75.0)
    assert rows["npu:0"].busy == 93
    assert rows["mlu:0"].name == "MLU370-X8"
    text = table(seen)
    assert "contract-only" in text
    assert "cpu0" in text
    assert "cpu0" not in table(seen, cpus=False)
    assert json.loads(json.dumps(seen.describe()))["rows"][0]["device"] == "cpu0"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo dcmi model initialized failed >&2; exit 3", "npu-smi: exit 3, dcmi model initialized failed"),
        ("echo hello", "npu-smi printed what lf-hal does not understand"),
    ],
)
def test_a_tool_that_fails_is_a_note_and_changes_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    (tmp_path / "npu-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    host(tmp_path, 20, 160)
    seen = Monitor(tmp_path).look()
    assert any(said in note for note in seen.notes)
    assert {row.device for row in seen.rows} >= {"cpu0", "node1"}
    assert said in table(seen)


def test_a_host_without_numa_has_one_node(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT.format(20, 160))
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    seen = {row.device: row for row in Monitor(tmp_path).look().rows}
    assert seen["node0"].memory == 10.0
    assert "node1" not in seen


def test_the_command_prints_this_machine_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--interval", "0.02"]) == 0
    printed = json.loads(capsys.readouterr().out)
    cpus = [row for row in printed["rows"] if row["device"].startswith("cpu")]
    assert len(cpus) == os.cpu_count()
    assert main(["top", "--once", "--interval", "0.02"]) == 0
    assert "node0" in capsys.readouterr().out


def test_loongarch_smi_is_the_same_table() -> None:
    code = "import sys; from lf_hal.cli import loongarch_smi; sys.exit(loongarch_smi())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--interval", "0.02"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("device")


def test_a_reader_that_goes_away_ends_the_live_table() -> None:
    command = [sys.executable, "-m", "lf_hal.cli", "top", "--interval", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as live:
        assert live.stdout is not None
        assert live.stderr is not None
        assert live.stdout.readline().startswith("device")
        live.stdout.close()
        assert live.wait(timeout=60) == 141
        assert "Traceback" not in live.stderr.read()


@pytest.mark.parametrize("interval", ["-1", "0", "nan", "inf", "x"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", "--once", f"--interval={interval}"])

    assert caught.value.code == 2
    assert "--interval" in capsys.readouterr().err
