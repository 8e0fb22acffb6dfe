"""The table of bench_kernels.py's results: pure functions over what it writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from report import cell, markdown

Result = dict[str, Any]
COLUMNS = ("way", "us", "spread", "x best other", "GB/s", "TFLOP/s", "extra MiB", "parity")


def rates(us: float, moved: int, flops: int) -> dict[str, float | None]:
    """GB/s and TFLOP/s of a call; None for what was not given."""
    return {
        "gb_s": moved / us / 1e3 if moved else None,
        "tflops": flops / us / 1e6 if flops else None,
    }


def groups(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by (operator, shape), in order of appearance."""
    found: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        found.setdefault((r["op"], r["shape"]), []).append(r)
    return found


def best_other(group: Iterable[Result]) -> float | None:
    """Microseconds of the fastest way that is not ours and computes the right thing."""
    return min((r["us"] for r in group if r["status"] == "ok" and not r["ours"] and "us" in r), default=None)


def order(r: Result) -> tuple[bool, float]:
    """Slowest first, those without numbers last."""
    return "us" not in r, -r.get("us", 0.0)


def line(r: Result, best: float | None) -> list[str]:
    """One row of the table."""
    name = f"**{r['name']}**" if r["ours"] else r["name"]
    if r["status"] != "ok":
        return [name, f"{r['status']}: {r['error'][:80]}"] + [""] * (len(COLUMNS) - 2)
    us = r.get("us")
    ratio = best / us if best and us else None
    return [
        name,
        cell(us, ".1f"),
        cell(r.get("spread"), ".1%"),
        cell(ratio, ".2f"),
        cell(r.get("gb_s"), ".0f"),
        cell(r.get("tflops"), ".0f"),
        cell(r.get("extra_mib"), ".0f"),
        cell(r.get("parity"), ".1e"),
    ]


def tables(results: Iterable[Result]) -> str:
    """One Markdown table per operator and shape, ways from slow to fast."""
    parts = []
    for (op, shape), group in groups(results).items():
        best = best_other(group)
        body = markdown(COLUMNS, [line(r, best) for r in sorted(group, key=order)])
        parts.append(f"**{op}, {shape}**\n\n{body}")
    return "\n\n".join(parts)
