"""What only the Triton kernels can get wrong: grids, chunk ends, access widths, 64-bit offsets."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import sm90
import torch
from adamw_cases import DEVICE, SMALL, Twins, assert_twins_equal, same_bits
from torch import nn

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._flat import FlatParameters

pytest.importorskip("triton")


def run(launch: Launch, steps: int = 2) -> Twins:
    twins = Twins(
        "triton", shapes=((3, 300), (777,), (128,)), shadowed=(0, 1), launch=launch, step={"clip": 1.0}
    )
    for _ in range(steps):
        twins.step()
    return twins


def assert_close(a: Twins, b: Twins) -> None:
    """fp32 within rounding; a bf16 shadow may fall to the other side of a tie."""
    for x, y in zip(a.everything(), b.everything(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6 if x.dtype == torch.float32 else 8e-3, atol=1e-7)


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_the_number_of_programs_changes_no_bit(programs: int) -> None:
    expected = run(SMALL)
    other = run(Launch(block=128, chunk=256, programs=programs))
    assert same_bits(other.everything(), expected.everything())
    assert same_bits([other.fused.norm], [expected.fused.norm])


@pytest.mark.parametrize(
    "launch", [Launch(256, 2, 0, 256), Launch(128, 1, 3, 1024), Launch(64, 4, 2, 128, 8)]
)
def test_other_launches_change_only_the_rounding_of_the_norm(launch: Launch) -> None:
    expected, other = run(SMALL), run(launch)
    assert float(other.fused.norm) == pytest.approx(float(expected.fused.norm), rel=1e-6)
    assert_close(other, expected)


def test_both_implementations_agree() -> None:
    twins, reference = (Twins(name, step={"clip": 1.0}) for name in ("triton", "torch"))
    for _ in range(5):
        twins.step()
        reference.step()
    assert_close(twins, reference)


def test_nothing_is_written_outside_of_a_gradients_tensor() -> None:
    """Gradients are read only, and their neighbours in memory do not count."""
    p = nn.Parameter(torch.zeros(131, device=DEVICE))
    room = torch.full((640,), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    room[128:259] = 1.0
    before = room.clone()
    fused = FusedAdamW(FlatParameters(torch.optim.AdamW([p]), [p]), implementation="triton", launch=SMALL)
    fused.set_gradients([room[128:259]])
    fused.step()
    assert same_bits([room], [before])
    assert int(fused.skipped) == 0
    assert float(fused.norm) == pytest.approx(131**0.5)


@pytest.mark.parametrize(
    ("warps", "chunk", "block"), [(4, 32768, 4096), (8, 32768, 8192), (4, 384, 128), (1, 256, 256)]
)
def test_the_norm_reads_blocks_of_a_power_of_two_within_a_chunk(warps: int, chunk: int, block: int) -> None:
    from lf_graph._adamw_triton import norm_block

    assert norm_block(warps, chunk) == block


@pytest.fixture(scope="module")
def ptx_accesses() -> dict[str, Counter[str]]:
    """Memory instructions of the kernels compiled for an H200, which needs no GPU."""
    types = {"first": "i32", "count": "i32", "chunks": "*i64", "addresses": "*i64", "shadow": "*bf16"}

    def accesses(kernel: str, gradient: str, **constants: int) -> Counter[str]:
        text = sm90.ptx(
            "lf_graph._adamw_triton", kernel, types, {"GRADIENT": f"tl.{gradient}", **constants}, {"num_warps": 4},
            default="*fp32", aligned=(),
        )  # fmt: skip
        return Counter(re.findall(r"\b((?:ld|st)\.(?:global|shared)\S*)", text))

    return {
        "half": accesses("update", "bfloat16", BLOCK=1024, VECTOR=4),
        "full": accesses("update", "float32", BLOCK=1024, VECTOR=4),
        "norm": accesses("square_sums", "bfloat16", BLOCK=4096),
        "wide": accesses("update", "bfloat16", BLOCK=1024, VECTOR=8),
    }


def widths(accesses: Counter[str], start: str) -> Counter[str]:
    """Accesses of at least 8 bytes by kind: full blocks; the ends of tensors go element by element."""
    found: Counter[str] = Counter()
    for name, count in accesses.items():
        if name.startswith(start) and (".v4." in name or ".v2." in name):
            found["16 bytes" if ".v4." in name else "8 bytes"] += count
    return found


def test_full_blocks_move_16_bytes_at_once(ptx_accesses: dict[str, Counter[str]]) -> None:
    # 1024 elements over 128 threads: 8 a thread, as two groups of 4 neighbours in each of p, m, v (16 bytes) and of
    # the bf16 gradient and shadow (8 bytes, 256 in a warp).
    assert widths(ptx_accesses["half"], "ld.global") == {"16 bytes": 6, "8 bytes": 2}
    assert widths(ptx_accesses["half"], "st.global") == {"16 bytes": 6, "8 bytes": 2}
    assert widths(ptx_accesses["full"], "ld.global") == {"16 bytes": 8}
    assert widths(ptx_accesses["norm"], "ld.global") == {"16 bytes": 4}
    assert widths(ptx_accesses["wide"], "ld.global") == {"16 bytes": 7}


def test_the_update_exchanges_nothing_through_shared_memory(ptx_accesses: dict[str, Counter[str]]) -> None:
    assert not [name for name in ptx_accesses["half"] if ".shared" in name]


def test_full_blocks_are_marked_as_streams(ptx_accesses: dict[str, Counter[str]]) -> None:
    for name in ptx_accesses["half"]:
        if ".v4." in name or ".v2." in name:
            assert "evict_first" in name or ".cs." in name


@pytest.mark.gpu
def test_offsets_pass_2_to_the_31() -> None:
    """Two parameters of together 2^31 + 300 elements; 39 GB at the peak."""
    sizes = (1 << 31, 300)
    ps = [nn.Parameter(torch.ones(n, device=DEVICE)) for n in sizes]
    optimizer = torch.optim.AdamW(ps, lr=0.1, weight_decay=0.0)
    flat = FlatParameters(optimizer, [ps[1]])
    fused = FusedAdamW(flat, gate=False, implementation="triton")
    big, small = (
        torch.ones(sizes[0], device=DEVICE, dtype=torch.bfloat16),
        torch.full((300,), 2.0, device=DEVICE),
    )
    fused.set_gradients([big, small])
    fused.step()
    for p in (ps[0].data[:7], ps[0].data[-7:], ps[1].data):
        torch.testing.assert_close(p, torch.full_like(p, 0.9))
    assert same_bits([flat.shadow_of(ps[1])], [ps[1].detach().bfloat16()])


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [Launch(), Launch(2048, 8, 264), Launch(512, 4, 132, 65536, 8)])
def test_large_tensors_equal_torch_on_the_gpu(launch: Launch) -> None:
    shapes = ((4096, 1031), (5, 40_001), (2048, 2048), (17,))
    twins = Twins("triton", shapes=shapes, shadowed=(0, 1, 2), launch=launch)
    for _ in range(5):
        twins.step()
    assert_twins_equal(twins)
    for p in twins.shadowed:
        assert same_bits([twins.flat.shadow_of(p)], [p.detach().bfloat16()])
