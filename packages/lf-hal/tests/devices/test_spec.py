"""Specs of devices: what is read here, what vendors state, and that nobody invents what no source says."""

import ctypes
import json
import platform
from pathlib import Path

import pytest

from lf_hal._cpu import caches_of, cpucfg_facts, features_of, read_cpu, vector_facts
from lf_hal.cli import main
from lf_hal.errors import SpecError
from lf_hal.evidence import Evidence
from lf_hal.spec import FACTS, READ, STATED, chip, host, names, spec

LA = """system type : generic-loongson-machine
processor\t\t: 0
CPU Family\t\t: Loongson-64bit
Model Name\t\t: Loongson-3A6000
ISA\t\t\t: loongarch32r loongarch32s loongarch64
Features\t\t: cpucfg lam ual fpu lsx lasx crc32

processor\t\t: 1
Model Name\t\t: Loongson-3A6000
"""


@pytest.mark.parametrize("name", [n for n in names() if n != "host"])
def test_every_fact_of_the_table_has_a_source_and_is_marked_unverified(name: str) -> None:
    found = spec(name)
    known = {key for key in FACTS if getattr(found, key) is not None}
    assert known == set(found.origins)
    assert all(origin.how == STATED and origin.source for origin in found.origins.values())
    assert found.evidence is Evidence.CONTRACT_ONLY
    json.dumps(found.describe())


def test_the_first_ascend_910_is_refused_and_the_second_is_not() -> None:
    assert "bf16" in spec("910A").refused
    assert not spec("910b").refused
    assert "bf16" in (spec("ascend910b").dtypes or ())


def test_a_driver_that_says_910b_without_a_digit_speaks_of_the_first_generation() -> None:
    first, second = chip("Ascend910B"), chip("Ascend910B3")
    assert first is not None
    assert second is not None
    assert first.refused
    assert not second.refused
    assert second.sram_bytes == 192 * 1024


def test_sram_of_a_cambricon_cluster_is_what_its_compiler_defines() -> None:
    assert spec("MLU290-M5").sram_bytes == 2 << 20
    assert spec("mlu370").memories == {"nram": 768 << 10, "wram": 1 << 20, "sram": 4 << 20}
    assert spec("mlu290").cache_line is None


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(SpecError, match="mlu290") as caught:
        spec("mlu9000")
    assert caught.value.name == "mlu9000"
    assert chip("mlu9000") is None


def test_the_host_is_read_and_says_from_where() -> None:
    found = host()
    known = {key for key in FACTS if getattr(found, key) is not None}
    assert known == set(found.origins)
    assert {origin.how for origin in found.origins.values()} == {READ}
    assert found.kind == "cpu"
    assert found.evidence is Evidence.VERIFIED
    assert found.cores


@pytest.mark.skipif(platform.machine() != "x86_64", reason="speaks of x86 flags")
def test_the_width_of_the_host_is_what_the_compiler_sees() -> None:
    flags = features_of("x86_64", Path("/proc/cpuinfo").read_text(), 0)
    wanted = 512 if "avx512f" in flags else 256 if "avx" in flags else 128
    assert host().vector_bits == wanted
    assert host().fma == ("fma" in flags)


def test_loongarch_is_read_from_cpuinfo_where_there_is_no_cpucfg(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(LA)
    name, facts, sources = read_cpu(tmp_path, "loongarch64")
    assert name == "Loongson-3A6000"
    assert (facts["vector_bits"], facts["fma"], facts["cores"]) == (256, True, 2)
    assert sources["vector_bits"].startswith("/proc/cpuinfo")
    assert chip(name) == spec("3a6000")


def test_hwcap_bits_serve_where_cpuinfo_is_empty() -> None:
    assert features_of("loongarch64", "", 0b111111) == {"cpucfg", "lam", "ual", "fpu", "lsx", "lasx"}
    assert vector_facts("loongarch64", features_of("loongarch64", "", 0b011000))["vector_bits"] == 128
    assert features_of("x86_64", "", 0xFFFFFFFF) == frozenset()  # its hwcap is no list of vector units


def test_words_of_cpucfg_give_caches_and_vectors_as_a_3a5000_states_them() -> None:
    def word(ways: int, sets: int, line: int) -> int:
        return (ways - 1) | (sets.bit_length() - 1) << 16 | (line.bit_length() - 1) << 24

    words = {
        0x2: 1 | 1 << 6 | 1 << 7,
        0x10: 1 | 1 << 2 | 1 << 3 | 1 << 10,
        0x12: word(4, 256, 64),
        0x13: word(16, 256, 64),
        0x14: word(16, 16384, 64),
    }
    stated = spec("3a5000")
    facts = cpucfg_facts(words)
    assert facts == {
        "fma": True,
        "vector_bits": stated.vector_bits,
        "cache_line": stated.cache_line,
        "l1_bytes": stated.l1_bytes,
        "l2_bytes": stated.l2_bytes,
        "l3_bytes": stated.l3_bytes,
    }
    assert cpucfg_facts({0x2: 1, 0x10: 0, 0x12: word(4, 256, 64)}) == {"fma": True}


@pytest.mark.parametrize(
    ("machine", "features", "width", "fma"),
    [
        ("x86_64", {"sse2"}, 128, False),
        ("x86_64", {"sse2", "avx", "avx2", "fma"}, 256, True),
        ("x86_64", {"sse2", "avx2", "fma", "avx512f", "avx512_bf16"}, 512, True),
        ("aarch64", {"fp", "asimd"}, 128, True),
        ("loongarch64", {"fpu"}, None, True),
        ("riscv64", {"i", "m", "f", "d", "v"}, None, True),
    ],
)
def test_features_give_the_width(machine: str, features: set[str], width: int | None, fma: bool) -> None:
    facts = vector_facts(machine, frozenset(features))
    assert facts.get("vector_bits") == width
    assert facts["fma"] == fma
    assert ("bf16" in facts["dtypes"]) == ("avx512_bf16" in features)


def test_an_sve_length_is_taken_as_the_kernel_says_it() -> None:
    assert vector_facts("aarch64", frozenset({"asimd", "sve"}), 512)["vector_bits"] == 512


def test_a_machine_nobody_knows_has_no_facts() -> None:
    assert vector_facts("vax", frozenset({"sse2"})) == {}


def test_caches_skip_instructions_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    for number, (kind, level, size) in enumerate(
        [("Instruction", "1", "64K"), ("Data", "1", "32K"), ("Unified", "2", "1M"), ("Unified", "3", "")]
    ):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        folder.mkdir(parents=True)
        for file, text in (("type", kind), ("level", level), ("size", size)):
            (folder / file).write_text(text + "\n")
    assert caches_of(tmp_path) == {"l1_bytes": 32 << 10, "l2_bytes": 1 << 20}


def test_the_command_prints_every_field_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "910A"]) == 0
    text = capsys.readouterr().out
    assert "REFUSED" in text
    assert all(f"  {key} " in text for key in FACTS)
    assert main(["spec", "mlu290", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["origins"]["sram_bytes"]["how"] == STATED
    assert main(["spec", "nobody"]) == 1
    assert "mlu290" in capsys.readouterr().err


def test_getauxval_is_the_libc_s() -> None:
    from lf_hal._cpu import _auxval

    assert _auxval(6) == ctypes.CDLL(None).sysconf(30)  # AT_PAGESZ, _SC_PAGESIZE
