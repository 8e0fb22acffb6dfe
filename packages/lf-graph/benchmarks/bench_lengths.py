"""Training on documents of real lengths: useful tokens a second, loader included; padded and packed, stock and ours.

    python bench_lengths.py --json results/lengths.json --budget-s 250           # on a GPU
    python bench_lengths.py --rows ladder --json results/ladder.json             # one thing after the other
    python bench_lengths.py --tiny                                               # any machine; times say nothing
    python bench_lengths.py --list

The dense language model of the baselines, float32 masters, AdamW, bf16 autocast. Every batch has 8 x 2048 places.
Padded rows put one document in each row of 2048, packed ones fill one row of 16384; the documents are the same
(lengths_data.py), and packing cuts none. A useful token is one of a document. Definitions:

- useful/s: of a window of steps, from the first request for a batch to the device's last kernel, by the host's clock;
  the median of the windows, and (max - min) / median as the spread
- wait ms: what the host spends in the loader in each step, median of the windows
- parity: largest relative distance from the losses of the eager row, over three steps from the initial weights on
  the same documents; packed rows are then partly unused
- peak GiB: most memory allocated from the setup to the end of timing

The JSON is written after every row, so that a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lengths_data import Batch, Corpus, Shape
from lengths_rows import KINDS, Setting, Way
from measure import clean, machine, peak_gib, reset_peak, synchronize
from models import LMDims
from report import cell, machine_line, markdown, with_parity
from workloads import language, workloads

VERSION = 1
WARM_UP = 4
PARITY_STEPS = 3
COLUMNS = (
    "row",
    "by",
    "loader",
    "useful/s",
    "spread",
    "/ eager",
    "/ best stock",
    "padding",
    "ms a step",
    "wait ms",
)
COLUMNS += ("peak GiB", "prep s", "parity")
Result = dict[str, Any]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", default="stock,ours", help=f"of {', '.join(KINDS)}")
    p.add_argument("--match", default="", help="only rows whose name contains one of a,b,...")
    p.add_argument("--windows", type=int, default=4)
    p.add_argument("--steps", type=int, default=4, help="steps of a window")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="start no row that would end later")
    p.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    p.add_argument("--json", type=Path, help="write the results here, after every row")
    p.add_argument("--list", action="store_true", help="print the rows and stop")
    return p.parse_args(argv)


def chosen_rows(kinds: str, match: str) -> list[Way]:
    """Rows of the kinds named, in an order in which the first ones are worth most: eager, ours, then the others."""
    for kind in kinds.split(","):
        if kind not in KINDS:
            raise SystemExit(f"no rows {kind!r}; known: {', '.join(KINDS)}")
    found = [way for kind in kinds.split(",") for way in KINDS[kind]()]
    patterns = [p for p in match.split(",") if p]
    found = [w for w in found if not patterns or any(p in w.name for p in patterns)]
    if "ladder" in kinds.split(","):
        return found
    first = [w for w in found if w.name in ("eager", "lf-graph")]
    return first + [w for w in found if w not in first]


def setting_of(tiny: bool, folder: Path, device: torch.device) -> Setting:
    """The model of the baselines, or its miniature, and its documents, which are written to ``folder``."""
    if tiny:
        dims = LMDims(
            layers=2, width=32, heads=2, ffn=48, vocab=97
        )  # FlexAttention wants heads of 16 or more
        shape = Shape(97, rows=4, length=64, shortest=17, documents=200)
        workload = language("lm-64", dims, (4,), 64)
    else:
        shape, workload = Shape(50257), workloads()["lm"][-1]
    return Setting(workload, shape, Corpus(shape, folder), device)


def timed_window(step: Any, feed: Iterator[Batch], steps: int, device: torch.device) -> Result:
    """Tokens and times of some steps, loader included."""
    useful, waited = 0, 0.0
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch, tokens = next(feed)
        waited += time.perf_counter() - asked
        step(*batch)
        useful += tokens
    synchronize(device)
    seconds = time.perf_counter() - start
    return {"useful": useful, "seconds": seconds, "wait_ms": waited / steps * 1000}


def summary(windows: list[Result], steps: int, places: int) -> Result:
    """The numbers of a row."""
    rates = [w["useful"] / w["seconds"] for w in windows]
    median = statistics.median(rates)
    return {
        "units_per_s": median,
        "spread": (max(rates) - min(rates)) / median,
        "step_ms": statistics.median(w["seconds"] for w in windows) / steps * 1000,
        "wait_ms": statistics.median(w["wait_ms"] for w in windows),
        "padding": 1 - sum(w["useful"] for w in windows) / (len(windows) * steps * places),
        "rates": [round(r, 1) for r in rates],
    }


def _measure(way: Way, setting: Setting, args: argparse.Namespace) -> Result:
    device = setting.device
    reset_peak(device)
    start = time.perf_counter()
    trained = way.setup(setting)
    feed = setting.feed(way.loader, way.layout)
    try:
        same = setting.parity_batch(way)
        losses = [trained.step(*same).clone() for _ in range(PARITY_STEPS)]
        result: Result = {"losses": [float(x) for x in losses]}
        result["losses_reseeded"] = result["losses"]  # no dropout: another seed is the same run
        for _ in range(WARM_UP):
            trained.step(*next(feed)[0])
        synchronize(device)
        result["prep_s"] = time.perf_counter() - start
        windows = [timed_window(trained.step, feed, args.steps, device) for _ in range(args.windows)]
        result |= summary(windows, args.steps, setting.shape.capacity)
        return result | {"peak_gib": peak_gib(device), "facts": trained.facts()}
    finally:
        feed.close()  # type: ignore[attr-defined]  # a generator, which closes its loader
        trained.close()


def identity(way: Way, setting: Setting) -> Result:
    """What says which row a result is of."""
    return {
        "workload": "lengths",
        "batch": setting.shape.rows,
        "row": way.name,
        "source": way.source,
        "layout": way.layout,
        "loader": way.loader,
        "masters": True,
        "unit": "useful tokens",
    }


def measure(way: Way, setting: Setting, args: argparse.Namespace) -> Result:
    """Set a row up and measure it; an error becomes its result."""
    clean(setting.device)
    start = time.perf_counter()
    try:
        result = identity(way, setting) | {"status": "ok"} | _measure(way, setting, args)
    except Exception as e:  # one row must not cost the others their device time
        result = left_out(way, setting, "failed", f"{type(e).__name__}: {str(e)[:600]}")
    clean(setting.device)
    return result | {"seconds": time.perf_counter() - start}


def left_out(way: Way, setting: Setting, status: str, why: str) -> Result:
    """The result of a row that has no numbers."""
    return identity(way, setting) | {"status": status, "error": why}


def why_not(way: Way, device: torch.device, left_s: float) -> tuple[str, str] | None:
    """(status, reason) where a row is not measured."""
    if way.needs_gpu and device.type != "cuda":
        return "skipped", "needs a GPU"
    if device.type == "cuda" and way.expect_s > left_s:
        return "not run", f"takes about {way.expect_s:.0f} s, {max(0.0, left_s):.0f} s left"
    return None


def best(results: list[Result], **wanted: str) -> float | None:
    """The highest rate of the rows with these fields; None without one."""
    rates = [
        r["units_per_s"]
        for r in results
        if r["status"] == "ok" and all(r[key] == value for key, value in wanted.items())
    ]
    return max(rates, default=None)


def line(r: Result, eager: float | None, stock: float | None) -> list[str]:
    """One row of the table; ratios above 1 are faster."""
    head = [r["row"], r["source"], f"{r['layout']}, {r['loader']}"]
    if r["status"] != "ok":
        return [*head, f"{r['status']}: {r['error'][:60]}"] + [""] * (len(COLUMNS) - 4)
    rate = r["units_per_s"]
    return [
        *head,
        cell(rate, ".0f"),
        cell(r["spread"], ".1%"),
        cell(rate / eager if eager else None, ".2f"),
        cell(rate / stock if stock else None, ".3f"),
        cell(r["padding"], ".1%"),
        cell(r["step_ms"], ".1f"),
        cell(r["wait_ms"], ".2f"),
        cell(r["peak_gib"], ".1f"),
        cell(r["prep_s"], ".0f"),
        cell(r.get("parity"), ".1e"),
    ]


def table(results: list[Result]) -> str:
    """All rows in the order they ran."""
    eager, stock = best(results, row="eager"), best(results, source="stock")
    lines = [line(r, eager, stock) for r in with_parity(results)]
    return markdown(COLUMNS, lines)


def write(path: Path | None, args: argparse.Namespace, device: torch.device, results: list[Result]) -> None:
    """Write what is known so far; the file is complete at any time."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) for k, v in vars(args).items() if k != "json"}
    document = {
        "version": VERSION,
        "machine": machine(device),
        "settings": settings,
        "rows": with_parity(results),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(path)


def run(ways: list[Way], setting: Setting, args: argparse.Namespace) -> list[Result]:
    """Measure every row; one line of progress each."""
    began, results = time.perf_counter(), []
    for way in ways:
        reason = why_not(way, setting.device, args.budget_s - (time.perf_counter() - began))
        result = left_out(way, setting, *reason) if reason else measure(way, setting, args)
        results.append(result)
        said = f"{result['units_per_s']:.0f} useful/s" if result["status"] == "ok" else result["error"][:200]
        print(
            f"{way.name} [{way.source}]: {result['status']}, {said} ({result.get('seconds', 0):.0f} s)",
            flush=True,
        )
        write(args.json, args, setting.device, results)
    return results


def main(argv: list[str] | None = None) -> None:
    """Run the rows asked for and print the table."""
    args = arguments(argv)
    ways = chosen_rows(args.rows, args.match)
    if args.list:
        print("\n".join(f"{w.name} [{w.source}] about {w.expect_s:.0f} s" for w in ways))
        return
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or args.tiny):
        print("bench_lengths needs a CUDA GPU; --tiny runs what a CPU can")
        return
    torch.set_float32_matmul_precision("high")  # tf32 where float32 is multiplied, as in bench_step.py
    device = torch.device("cuda" if has_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        results = run(ways, setting_of(args.tiny, Path(folder), device), args)
    print(f"\n{machine_line(machine(device))}\n\n{table(results)}")


if __name__ == "__main__":
    main()
