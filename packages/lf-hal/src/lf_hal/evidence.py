"""How far a capability has been proved, and the table of what lf-hal claims.

A claim is never stronger than the way it was tested: an emulator proves the arithmetic of an instruction set and says
nothing of speed, and a contract test of a simulated device proves our side of the contract only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CAPABILITIES", "MEANING", "Capability", "Evidence", "capability"]


class Evidence(StrEnum):
    """The way in which a capability was tested, from the strongest down."""

    VERIFIED = "verified"
    EMULATED = "emulated"
    CONTRACT_ONLY = "contract-only"
    NEEDS_GPU = "needs a GPU"


MEANING = {
    Evidence.VERIFIED: "tests run it on real hardware of this kind",
    Evidence.EMULATED: "tests run it under qemu-user: results are proved, speed and the chip's errata are not",
    Evidence.CONTRACT_ONLY: "tests run our side against a simulation or samples; the vendor's side was never here",
    Evidence.NEEDS_GPU: "tests marked gpu run it on a CUDA device; skipped where there is none",
}


@dataclass(frozen=True)
class Capability:
    """One thing that lf-hal can do, how far that is proved, and what the proof leaves open."""

    name: str
    what: str
    evidence: Evidence
    limit: str = ""


# Rows are "area.subject"; add a row with the feature that it speaks of.
CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "probe.isolation",
        "a backend that crashes, hangs or patches torch changes nothing else",
        Evidence.VERIFIED,
    ),
    Capability("probe.cpu", "the CPU and its numpy", Evidence.VERIFIED),
    Capability(
        "probe.cuda",
        "driver, visibility and a CUDA torch",
        Evidence.NEEDS_GPU,
        "failures against a fake driver",
    ),
    Capability(
        "probe.ascend",
        "torch_npu over CANN",
        Evidence.CONTRACT_ONLY,
        "against packages that fail as reported, and the wheel of torch_npu 2.13.0 without CANN",
    ),
    Capability(
        "probe.mlu",
        "torch_mlu over CNToolkit",
        Evidence.CONTRACT_ONLY,
        "against packages that fail as reported",
    ),
    Capability(
        "packages.accelerators",
        "lf-ckpt, lf-memory and lf-meta on any accelerator of torch: order of copies, no call of torch.cuda",
        Evidence.CONTRACT_ONLY,
        "a PrivateUse1 device in Python named npu or mlu (lf-meta/tests/contract)",
    ),
    Capability("top.host", "load of CPUs and NUMA nodes and their memory", Evidence.VERIFIED),
    Capability("top.cuda", "load of GPUs, from nvidia-smi", Evidence.NEEDS_GPU),
    Capability(
        "top.ascend", "load of NPUs, from npu-smi", Evidence.CONTRACT_ONLY, "parsers on samples of our own"
    ),
    Capability(
        "top.mlu", "load of MLUs, from cnmon", Evidence.CONTRACT_ONLY, "parsers on samples of our own"
    ),
    Capability("consistency", "two devices compared by bits, or by a bound to float64", Evidence.VERIFIED),
    Capability(
        "consistency.tf32",
        "TF32 and HF32 are named",
        Evidence.CONTRACT_ONLY,
        "switches read, no such device ran",
    ),
    Capability("deterministic", "random transforms are named and refused", Evidence.VERIFIED),
    Capability("affinity", "LOONGFORGE_CPU_AFFINITY binds the threads of each rank", Evidence.VERIFIED),
    Capability("fp_guard.x86-64", "rounding, FTZ and DAZ set and verified per thread", Evidence.VERIFIED),
    Capability(
        "fp_guard.others",
        "FPCR, FCSR0 and fcsr set and verified",
        Evidence.EMULATED,
        "fields by C programs of aarch64, loongarch64 and riscv64; the Python half never ran there",
    ),
    Capability("spec.x86-64", "the host read from cpuinfo, getauxval and sysfs", Evidence.VERIFIED),
    Capability(
        "spec.loongarch64",
        "the host read from cpucfg, cpuinfo and getauxval",
        Evidence.EMULATED,
        "cpucfg by its machine code on qemu's LA464; the Python half never ran there",
    ),
    Capability(
        "compile.x86-64", "SSE2 and AVX2: models as C with the bits of every other target", Evidence.VERIFIED
    ),
    Capability(
        "compile.x86-64-avx512",
        "the same with AVX-512",
        Evidence.CONTRACT_ONLY,
        "compiled and disassembled; no processor with it was at hand",
    ),
    Capability(
        "compile.others",
        "aarch64, riscv64 and loongarch64 (scalar, LSX, LASX): the same bits as x86-64",
        Evidence.EMULATED,
        "qemu-user; its LoongArch is an LA464, so nothing is said of a 3A6000",
    ),
    Capability(
        "compile.narrow.x86-64",
        "weights stored as bf16, f16 or int8: the bits of float32 with the widened weights",
        Evidence.VERIFIED,
        "AVX-512 compiled only",
    ),
    Capability(
        "compile.narrow.others",
        "the same on aarch64, riscv64 and loongarch64",
        Evidence.EMULATED,
        "results only; what they gain there was not measured",
    ),
    Capability(
        "compile.sram_tiling",
        "products cut so that their weights fit an on-chip memory",
        Evidence.CONTRACT_ONLY,
        "on CPUs tests show that pieces fit, cover and change no bit; no MLU ever ran them",
    ),
    Capability(
        "load.direct",
        "weights read past the page cache, or through it with the reason",
        Evidence.VERIFIED,
        "on ext4; refusals are simulated",
    ),
    Capability(
        "profile.time", "time, GFLOP/s and GB/s of each step of a model that runs here", Evidence.VERIFIED
    ),
    Capability(
        "profile.counters",
        "cycles, instructions and cache misses of each step by perf_event_open",
        Evidence.CONTRACT_ONLY,
        "read back with the kernel's software events; the machine of the tests gives no hardware counter",
    ),
    Capability(
        "placement.plan", "the fastest placement by measured costs, held to trying all", Evidence.VERIFIED
    ),
    Capability("placement.cpu", "plans run over torch on the CPU and C of this machine", Evidence.VERIFIED),
    Capability(
        "placement.others",
        "segments of other machines' C targets",
        Evidence.EMULATED,
        "qemu-user: the bits of this machine's; copies are files, and nothing is said of speed",
    ),
    Capability(
        "placement.devices",
        "segments on torch's npu and mlu devices",
        Evidence.CONTRACT_ONLY,
        "simulated devices that refuse tensors of another memory",
    ),
    Capability(
        "placement.training",
        "modules marked @hardware trained over cpu, npu and mlu",
        Evidence.CONTRACT_ONLY,
        "simulated devices with the CPU's arithmetic; the test over cuda and cpu has not run on a GPU yet",
    ),
    Capability("spec.aarch64", "the host read from cpuinfo and getauxval", Evidence.CONTRACT_ONLY),
    Capability(
        "spec.table",
        "NPUs, MLUs and LoongArch chips as stated",
        Evidence.CONTRACT_ONLY,
        "vendor-stated, unverified",
    ),
)


def capability(name: str) -> Capability:
    """The row called `name`; KeyError names those there are."""
    for row in CAPABILITIES:
        if row.name == name:
            return row
    raise KeyError(f"no capability {name!r}; there are {', '.join(row.name for row in CAPABILITIES)}")
