"""Tables from results: pure functions over what the benchmarks write, and a command.

python report.py results/stock.json results/ours.json                 # print
python report.py results/*.json --source stock --into peers/README.md   # between its two marker lines
python report.py results/*.json --source stock --into peers/README.md --check   # fail if it is out of date
python report.py results/hf*.json --mark hf --into ../README.md   # a document with several tables
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def marks(name: str = "") -> tuple[str, str]:
    """The two lines of a document between which a table stands; a document may have several, by name."""
    label = f"results {name}".strip()
    return f"<!-- {label}: begin -->", f"<!-- {label}: end -->"


BEGIN, END = marks()

EAGER_ROWS = ("eager", "eager fused", "grouped eager")
"""Rows that nothing compiles or captures; what all others must compute. The loop over experts comes before its
grouped form."""

COLUMNS: tuple[str, ...] = (
    "row",
    "by",
    "ms",
    "spread",
    "queued ms",
    "/ best stock",
    "per s",
    "launches",
    "kernels",
)
COLUMNS += ("kernel ms", "peak GiB", "prep s", "parity")


def groups(results: Iterable[Result]) -> dict[tuple[str, int], list[Result]]:
    """Results by (workload, batch), in order of appearance."""
    found: dict[tuple[str, int], list[Result]] = {}
    for r in results:
        found.setdefault((r["workload"], r["batch"]), []).append(r)
    return found


def measured(results: Iterable[Result]) -> list[Result]:
    """Those with numbers."""
    return [r for r in results if r["status"] == "ok"]


def best_stock(results: Iterable[Result]) -> Result | None:
    """The fastest stock result that keeps float32 master weights."""
    stock = [r for r in measured(results) if r["source"] == "stock" and r.get("masters", True)]
    return min(stock, key=lambda r: r["step_ms"], default=None)


def distance(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference of two short loss curves; infinite where one is not a number."""
    worst = 0.0
    for a, b in zip(losses, reference, strict=True):
        gap = abs(a - b) / abs(b)
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def with_parity(results: list[Result]) -> list[Result]:
    """Each result with ``parity``: its distance from an eager row of its group, or None without one.

    That is the first measured of EAGER_ROWS; the plain one carries its distance from itself with another dropout seed.
    """
    done = []
    for group in groups(results).values():
        stock = {r["row"]: r for r in measured(group) if r["source"] == "stock"}
        eager = next((stock[name] for name in EAGER_ROWS if name in stock), None)
        for r in group:
            if r["status"] != "ok" or eager is None:
                done.append(r | {"parity": None})
                continue
            mine = r.get("losses_reseeded", r["losses"]) if r is eager else r["losses"]
            done.append(r | {"parity": distance(mine, eager["losses"])})
    return done


def cell(value: Any, form: str) -> str:
    """A formatted number, or nothing."""
    return "" if value is None else format(value, form)


def line(r: Result, best: Result | None) -> list[str]:
    """One table row."""
    name = r["row"] if r.get("masters", True) else f"{r['row']} (no fp32 masters)"
    if r["status"] != "ok":
        return [name, r["source"], f"{r['status']}: {r['error'][:60]}"] + [""] * (len(COLUMNS) - 3)
    ratio = r["step_ms"] / best["step_ms"] if best else None
    return [
        name,
        r["source"],
        cell(r["step_ms"], ".2f"),
        cell(r["spread"], ".1%"),
        cell(r.get("through_ms"), ".2f"),
        cell(ratio, ".3f"),
        cell(r["units_per_s"], ".0f"),
        cell(r.get("launches"), "d"),
        cell(r.get("kernels"), "d"),
        cell(r.get("kernel_ms"), ".1f"),
        cell(r.get("peak_gib"), ".1f"),
        cell(r["prep_s"], ".0f"),
        cell(r.get("parity"), ".1e"),
    ]


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(r)} |" for r in rows)


def order(r: Result) -> tuple[bool, float]:
    """Slowest first, those without numbers last."""
    return r["status"] != "ok", -r.get("step_ms", 0.0)


def tables(results: list[Result]) -> str:
    """One table per workload and batch, rows from slow to fast."""
    parts = []
    for (workload, batch), group in groups(with_parity(results)).items():
        best = best_stock(group)
        body = markdown(COLUMNS, [line(r, best) for r in sorted(group, key=order)])
        parts.append(f"**{workload}, batch {batch}** (per s: {group[0]['unit']})\n\n{body}")
    return "\n\n".join(parts)


def machine_line(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    return ", ".join(f"{k} {v}" for k, v in facts.items() if v)


def load(paths: Iterable[Path]) -> tuple[list[str], list[Result]]:
    """Machines and results of several files; a row measured twice counts as the later file says."""
    machines: list[str] = []
    found: dict[tuple[str, int, str, str], Result] = {}
    for path in paths:
        document = json.loads(path.read_text())
        machines.append(machine_line(document["machine"]))
        for r in document["rows"]:
            key = (r["workload"], r["batch"], r["row"], r["source"])
            if r["status"] == "ok" or key not in found:
                found[key] = r
    return list(dict.fromkeys(machines)), list(found.values())


def between_markers(text: str, body: str, mark: str = "") -> str:
    """``text`` with ``body`` between the two marker lines of that name.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    begin, end = marks(mark)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs one line {begin} and, below it, one line {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("json", nargs="+", type=Path)
    p.add_argument("--source", default="", help="only rows of this source: stock or ours")
    p.add_argument("--leave-out", default="", help="no row whose name contains this")
    p.add_argument("--into", type=Path, help="a Markdown file with marker lines")
    p.add_argument("--mark", default="", help="name in its marker lines, such as hf in 'results hf: begin'")
    p.add_argument("--check", action="store_true", help="change nothing; fail if --into is out of date")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Print the tables of the files named, or put them into a document."""
    args = arguments(argv)
    machines, results = load(args.json)
    chosen = [r for r in results if args.source in ("", r["source"])]
    if args.leave_out:
        chosen = [r for r in chosen if args.leave_out not in r["row"]]
    body = "\n".join(machines) + "\n\n" + tables(chosen)
    if not args.into:
        print(body)
        return
    old = args.into.read_text()
    new = between_markers(old, body, args.mark)
    if args.check and new != old:
        raise SystemExit(f"{args.into} is not what the results say; run this again without --check")
    args.into.write_text(new)


if __name__ == "__main__":
    main()
