#!/usr/bin/env python3
"""Kernels beside torch eager on the CPU, float32: products of a 25 M-parameter LM and the convolutions of ResNet-50.

    bench_kernels.py --json OUT.json [--repeat 7] [--only WORD ...]

Ours and torch take turns on the same numbers; a row has the fastest and the median run of each. One thread is timed by
the processor's time, which neighbours on the machine hardly touch, two by the wall clock. Weights are packed before, as
when a model is opened. Two threads of ours are Python threads that call the kernel on halves of the output, which costs
some 20 us a call, so products of one row, which take less, are measured on one thread alone; bench_models.py has whole
models on the threads of an artefact. torch's convolutions are conv2d alone; ours include batch norm and relu.
The last rows are errors against float64: root mean square over N(0, 1) inputs, ours and torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two busy cores: spinning threads cost torch far more

import numpy as np
import torch
from torch.nn import functional as F

from lf_hal.build import CSRC, build_objects, find_compiler, link
from lf_hal.targets import resolve_target

PANEL = 16
GEMMS = {
    "prefill 512x512x512": (512, 512, 512),
    "prefill 512x1536x512": (512, 1536, 512),
    "prefill 512x2048x512": (512, 2048, 512),
    "prefill 512x512x2048": (512, 512, 2048),
    "decode 1x512x512": (1, 512, 512),
    "decode 1x1536x512": (1, 1536, 512),
    "decode 1x2048x512": (1, 2048, 512),
    "decode 1x512x2048": (1, 512, 2048),
    "decode 1x8192x512": (1, 8192, 512),
}
# in size, in channels, out channels, kernel, stride: one of each kind in ResNet-50 at 224 x 224
CONVS = {
    "conv 7x7 3-64 s2": (224, 3, 64, 7, 2),
    "conv 1x1 64-64": (56, 64, 64, 1, 1),
    "conv 3x3 64-64": (56, 64, 64, 3, 1),
    "conv 1x1 64-256": (56, 64, 256, 1, 1),
    "conv 3x3 128-128 s2": (56, 128, 128, 3, 2),
    "conv 3x3 128-128": (28, 128, 128, 3, 1),
    "conv 1x1 512-128": (28, 512, 128, 1, 1),
    "conv 3x3 256-256": (14, 256, 256, 3, 1),
    "conv 1x1 256-1024": (14, 256, 1024, 1, 1),
    "conv 1x1 512-1024 s2": (28, 512, 1024, 1, 2),
    "conv 3x3 512-512": (7, 512, 512, 3, 1),
    "conv 1x1 512-2048": (7, 512, 2048, 1, 1),
}


@dataclass(frozen=True)
class Row:
    """Times in milliseconds; ratio is torch over ours, of the fastest runs: above 1 we are faster."""

    case: str
    threads: int
    torch_best: float
    torch_median: float
    ours_best: float
    ours_median: float
    ratio: float
    gflops: float


class Conv2d(ctypes.Structure):
    """lf_conv2d of lf_kernels.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *(
                "batch",
                "in_h",
                "in_w",
                "in_c",
                "out_h",
                "out_w",
                "out_c",
                "k_h",
                "k_w",
                "stride_h",
                "stride_w",
            ),
            *("pad_top", "pad_left", "dil_h", "dil_w", "groups"),
        )
    ]


class Epilogue(ctypes.Structure):
    """lf_epilogue of lf_kernels.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "scale", "shift")),
        ("act", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("weight_scale", "add")),
    ]


def library() -> ctypes.CDLL:
    """The kernels, built for this machine."""
    target = resolve_target("native")
    compiler = find_compiler(target)
    path = Path(tempfile.mkdtemp()) / "kernels.so"
    link(
        compiler,
        target,
        build_objects(compiler, target, sorted(CSRC.glob("lf_*.c")), [CSRC]),
        path,
        shared=True,
    )
    return ctypes.CDLL(str(path))


LIB = library()
POOL = ThreadPoolExecutor(2)


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def ints(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(v) for v in values]


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 16, np.float32)
    skip = -(raw.ctypes.data // 4) % 16
    return raw[skip : skip + size]


def shared_out(count: int, threads: int, part: Callable[[int, int], None]) -> Callable[[], None]:
    """part(begin, end) over [0, count), on so many threads."""
    if threads == 1:
        return lambda: part(0, count)
    middle = (count // 2 + 23) // 24 * 24 if count > 48 else count // 2

    def both() -> None:
        other = POOL.submit(part, middle, count)
        part(0, middle)
        other.result()

    return both


def gemm(m: int, n: int, k: int, threads: int) -> tuple[Callable[[], object], Callable[[], object], float]:
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    y, packed, panels = np.zeros((m, n), np.float32), aligned(-(-n // PANEL) * k * PANEL), -(-n // PANEL)
    LIB.lf_pack_b_f32(at(packed), at(w), *ints(1, k, k, n, 0, panels))

    def part(begin: int, end: int) -> None:
        LIB.lf_gemm_f32(
            at(y), *ints(n), at(a), *ints(k), at(packed), *ints(k, n), None, *ints(0, m, begin, end)
        )

    ours = shared_out(panels, threads, part)
    ta, tw = torch.from_numpy(a), torch.from_numpy(w)
    ours()
    np.testing.assert_allclose(y, F.linear(ta, tw).numpy(), atol=1e-3)
    return ours, lambda: F.linear(ta, tw), 2e-6 * m * n * k


def conv(
    size: int, ci: int, co: int, kernel: int, stride: int, threads: int
) -> tuple[Callable[[], object], Callable[[], object], float]:
    rng = np.random.default_rng(0)
    pad, out = kernel // 2, (size + 2 * (kernel // 2) - kernel) // stride + 1
    x, w = (
        rng.standard_normal((1, size, size, ci), np.float32),
        rng.standard_normal((co, ci, kernel, kernel), np.float32),
    )
    scale, shift = rng.random(co, np.float32), rng.random(co, np.float32)
    c = Conv2d(1, size, size, ci, out, out, co, kernel, kernel, stride, stride, pad, pad, 1, 1, 1)
    e = Epilogue(None, scale.ctypes.data, shift.ctypes.data, 1)
    LIB.lf_packed_conv_size_f32.restype = ctypes.c_int64
    packed, y = aligned(LIB.lf_packed_conv_size_f32(ctypes.byref(c))), np.zeros((1, out, out, co), np.float32)
    LIB.lf_pack_conv_f32(at(packed), at(w), ctypes.byref(c), *ints(0, 1))

    def part(begin: int, end: int) -> None:
        LIB.lf_conv2d_f32(at(y), at(x), at(packed), ctypes.byref(c), ctypes.byref(e), *ints(begin, end))

    ours = shared_out(out * out, threads, part)
    tx, tw = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(w)
    ours()
    plain = F.conv2d(tx, tw, stride=stride, padding=pad).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(y, np.maximum(plain * scale + shift, 0), atol=5e-3)
    return (
        ours,
        lambda: F.conv2d(tx, tw, stride=stride, padding=pad),
        2e-6 * out * out * co * ci * kernel * kernel,
    )


def measure(case: str, threads: int, repeat: int) -> Row:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        if case in GEMMS:
            ours, theirs, mflop = gemm(*GEMMS[case], threads)
        else:
            ours, theirs, mflop = conv(*CONVS[case], threads)
        loops = max(1, int(40 / mflop))
        clock = time.process_time if threads == 1 else time.perf_counter
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for _ in range(repeat):
            for name, call in (("torch", theirs), ("ours", ours)):
                begin = clock()
                for _ in range(loops):
                    call()
                times[name].append((clock() - begin) * 1e3 / loops)
    best, theirs_best = min(times["ours"]), min(times["torch"])
    medians = (statistics.median(times["torch"]), statistics.median(times["ours"]))
    return Row(case, threads, theirs_best, medians[0], best, medians[1], theirs_best / best, mflop / best)


def errors() -> list[dict[str, float]]:
    """Root mean square error of products against float64, by K."""
    rows = []
    for k in (256, 1024, 2048, 8192):
        rng = np.random.default_rng(k)
        a, w = rng.standard_normal((64, k), np.float32), rng.standard_normal((96, k), np.float32)
        y, packed = np.zeros((64, 96), np.float32), aligned(96 * k)
        LIB.lf_pack_b_f32(at(packed), at(w), *ints(1, k, k, 96, 0, 6))
        LIB.lf_gemm_f32(at(y), *ints(96), at(a), *ints(k), at(packed), *ints(k, 96), None, *ints(0, 64, 0, 6))
        exact = a.astype(np.float64) @ w.T.astype(np.float64)
        theirs = F.linear(torch.from_numpy(a), torch.from_numpy(w)).numpy()
        ours, other = (float(np.sqrt(((v - exact) ** 2).mean())) for v in (y, theirs))
        rows.append({"k": k, "ours": ours, "torch": other})
    return rows


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return f"{model}, {os.cpu_count()} cores, target {resolve_target('native').name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these words")
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    print(f"{'case':24}{'threads':>8}{'torch ms':>10}{'ours ms':>10}{'GFLOP/s':>9}{'torch/ours':>12}")
    rows = []
    for case in [*GEMMS, *CONVS]:
        if options.only and not any(word in case for word in options.only):
            continue
        for threads in (1,) if case.startswith("decode") else (1, 2):
            row = measure(case, threads, options.repeat)
            rows.append(row)
            print(
                f"{row.case:24}{row.threads:8}{row.torch_best:10.3f}{row.ours_best:10.3f}"
                f"{row.gflops:9.1f}{row.ratio:12.2f}",
                flush=True,
            )
    accuracy = errors()
    for error in accuracy:
        print(f"error at K = {error['k']:5}: ours {error['ours']:.3g}, torch {error['torch']:.3g}")
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "rows": [asdict(row) for row in rows],
        "errors": accuracy,
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
