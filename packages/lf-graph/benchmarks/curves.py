"""Does a graph learn what eager learns? Losses of 100 steps, 3 seeds, a quarter of the layers.

    python curves.py --json curves.json --budget-s 300
    python curves.py --tiny --steps 5 --seeds 2               # on a CPU
    python curves.py --show one.json,two.json                 # the verdicts on the curves of several runs
    python curves.py --workloads vla --show one.json          # on some of them

Every row trains from the same weights on the same cycle of batches, fed into fixed addresses, with dropout from the
same seed. Eager's own spread is the largest distance between any two eager curves of a seed, which compute the same in
another order: once more (some backward kernels add atomically), with torch's other AdamW (foreach), which rounds
elsewhere, and with each attention kernel of torch. The other rows must stay within it. Where nothing is atomic and the
arithmetic is the same, curves must be equal in every bit: the captured stock row, and our step with an optimizer that
it captures as torch has it (SGD), against eager with that one.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import ours
import report
import stock
import torch
from bench_step import rows_from
from measure import Case, Row, clean, machine
from models import VLADims
from workloads import (
    LM_DIMS,
    MOE_DIMS,
    TINY_LM,
    TINY_MOE,
    TINY_VLA,
    VLA_DIMS,
    Workload,
    language,
    vision_language_action,
)

VERSION = 1
CYCLE = 8  # batches, seen again and again: losses fall because they are learned by heart
REFERENCE, AGAIN, FOREACH = "eager", "eager again", "eager, foreach AdamW"
ATTENTION = ("flash", "cudnn")
EAGER = (REFERENCE, AGAIN, FOREACH, *(f"{REFERENCE}, {kind}" for kind in ATTENTION))
SAME_ARITHMETIC = {"lf-graph, not compiled, SGD": "eager, SGD"}  # bit for bit


@dataclass(frozen=True)
class Curve:
    """Losses of one row from one seed."""

    workload: str
    row: str
    source: str
    seed: int
    losses: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a row's curves compare with the eager ones over all seeds; distances are relative."""

    workload: str
    row: str
    source: str
    seeds: int
    bit_equal: int
    distance: float
    eager_spread: float
    first: float
    last: float
    error: str = ""

    @property
    def within(self) -> bool:
        """Whether the row strays no further from eager than eager from itself."""
        return not self.error and self.distance <= self.eager_spread


def quarter(dims: VLADims) -> VLADims:
    """A quarter of every stack of layers."""
    lm = replace(dims.language, layers=dims.language.layers // 4)
    return replace(
        dims,
        language=lm,
        tuned=max(1, dims.tuned // 4),
        vision_layers=dims.vision_layers // 4,
        action_layers=dims.action_layers // 4,
    )


def curve_workloads(names: Iterable[str], tiny: bool) -> list[Workload]:
    """Small micro-batches, where launches matter most."""
    if tiny:
        made = {
            "vla": vision_language_action("vla", TINY_VLA, (2,)),
            "lm": language("lm-8", TINY_LM, (2,), 8),
            "moe": language("moe", TINY_MOE, (2,), 8),
        }
    else:
        made = {
            "vla": vision_language_action("vla/4", quarter(VLA_DIMS), (4,)),
            "lm": language("lm-512/4", LM_DIMS, (1,), 512, layers=LM_DIMS.layers // 4),
            "moe": language("moe-512/4", MOE_DIMS, (1,), 512, layers=MOE_DIMS.layers // 4),
        }
    return [made[name] for name in names]


def curve_rows(workload: Workload, modules: Iterable[str], match: str) -> list[Row]:
    """The reference twice, the stock graph, and of other modules the rows whose name contains ``match``.

    The reference has the arithmetic of the accelerated rows: fused optimizer, bfloat16 frozen weights, grouped experts.
    """
    reference = replace(stock.EAGER_FUSED, name=REFERENCE, accelerated=True)
    foreach = replace(reference, name=FOREACH, fused=False)
    attention = [stock.pinned(reference, kind) for kind in ATTENTION]
    variants = [reference, replace(reference, name=AGAIN), foreach, *attention, stock.GRAPH]
    found = [stock.row_of(workload, workload.batches[0], v) for v in variants]
    others = [r for name in modules if name != "stock" for r in rows_from(name, workload)]
    return found + [r for r in others if match in r.name] + same_arithmetic(workload, "ours" in modules)


def same_arithmetic(workload: Workload, ours_too: bool) -> list[Row]:
    """Eager with SGD, and our uncompiled step with it."""
    eager = replace(stock.EAGER_FUSED, name="eager, SGD", accelerated=True, sgd=True)
    found = [stock.row_of(workload, workload.batches[0], eager)]
    if ours_too:
        captured = ours.Ours("lf-graph, not compiled, SGD", compile="off", sgd=True)
        found.append(ours.row_of(workload, workload.batches[0], captured))
    return found


def train(row: Row, device: torch.device, seed: int, steps: int) -> tuple[float, ...]:
    """Losses of ``steps`` steps from the weights, batches and dropout of ``seed``."""
    case = Case(row.workload, row.batch, device, seed)
    prepared = row.setup(case)
    try:
        batches = [case.inputs(1000 * seed + i + 1) for i in range(min(CYCLE, steps))]
        prepared.restart()
        torch.manual_seed(seed)
        losses = []
        for step in range(steps):
            prepared.feed(batches[step % len(batches)])
            losses.append(prepared.step().detach().clone())
        return tuple(float(x) for x in losses)
    finally:
        prepared.close()


def curve(row: Row, device: torch.device, seed: int, steps: int) -> Curve:
    """One curve; an error becomes part of it."""
    clean(device)
    who = (row.workload.name, row.name, row.source, seed)
    try:
        return Curve(*who, train(row, device, seed, steps))
    except Exception as e:  # the other rows still run
        return Curve(*who, error=f"{type(e).__name__}: {str(e)[:300]}")
    finally:
        clean(device)


def mean(values: Iterable[float]) -> float:
    """The mean; not a number of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def spread_of(eager: Iterable[Curve]) -> float:
    """The largest distance between two curves of one seed."""
    by_seed: dict[int, list[Curve]] = {}
    for c in eager:
        if not c.error:
            by_seed.setdefault(c.seed, []).append(c)
    pairs = [pair for group in by_seed.values() for pair in combinations(group, 2)]
    return max((report.distance([*a.losses], [*b.losses]) for a, b in pairs), default=0.0)


def verdict(curves: Sequence[Curve], reference: dict[int, Curve], spread: float) -> Verdict:
    """Compare one row's curves with the reference's of the same seeds."""
    good = [c for c in curves if not c.error and not reference[c.seed].error]
    one = curves[0]
    error = next((c.error or reference[c.seed].error for c in curves if c not in good), "")
    away = [report.distance([*c.losses], [*reference[c.seed].losses]) for c in good]
    return Verdict(
        one.workload,
        one.row,
        one.source,
        len(curves),
        sum(c.losses == reference[c.seed].losses for c in good),
        max(away, default=float("nan")),
        spread,
        mean(c.losses[0] for c in good),
        mean(c.losses[-1] for c in good),
        error,
    )


def verdicts(curves: Iterable[Curve]) -> list[Verdict]:
    """One verdict for each row of each workload, but for the references themselves."""
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for c in curves:
        groups.setdefault((c.workload, c.row, c.source), []).append(c)
    found = []
    for (workload, row, _), group in groups.items():
        reference = groups.get((workload, SAME_ARITHMETIC.get(row, REFERENCE), "stock"))
        eager = [c for name in EAGER for c in groups.get((workload, name, "stock"), [])]
        known = {c.seed: c for c in reference or ()}
        compared = [c for c in group if c.seed in known]
        if row in (REFERENCE, *SAME_ARITHMETIC.values()) or not compared or len(eager) == len(known):
            continue
        found.append(verdict(compared, known, 0.0 if row in SAME_ARITHMETIC else spread_of(eager)))
    return found


def table(found: Iterable[Verdict]) -> str:
    """The verdicts as Markdown."""
    header = ("workload", "row", "by", "bit-equal seeds", "max distance", "eager's own", "within", "loss")
    lines = []
    for v in found:
        loss = f"{v.first:.4f} to {v.last:.4f}"
        equal, within = f"{v.bit_equal} / {v.seeds}", "yes" if v.within else "no"
        numbers = [equal, f"{v.distance:.1e}", f"{v.eager_spread:.1e}", within, loss]
        cells = [f"failed: {v.error[:80]}", "", "", "", ""] if v.error else numbers
        lines.append([v.workload, v.row, v.source, *cells])
    return report.markdown(header, lines)


def document(curves: list[Curve], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "version": VERSION,
        "machine": machine(device),
        "settings": {k: str(v) for k, v in vars(args).items() if k != "json"},
        "verdicts": [vars(v) | {"within": v.within} for v in verdicts(curves)],
        "curves": [vars(c) for c in curves],
    }


def shown(paths: Iterable[Path], workloads: Sequence[str] = ("vla", "lm", "moe")) -> str:
    """The verdicts on the curves of several runs, of these classes of workloads.

    Raises:
        ValueError: two runs have the same curve, and its losses differ in a bit: then they cannot be mixed.
    """
    known: dict[tuple[str, str, str, int], Curve] = {}
    for path in paths:
        for fields in json.loads(path.read_text())["curves"]:
            c = Curve(**fields | {"losses": tuple(fields["losses"])})
            key = (c.workload, c.row, c.source, c.seed)
            if re.split(r"[-/]", c.workload)[0] not in workloads:
                continue
            if known.setdefault(key, c).losses != c.losses:
                raise ValueError(f"{path}: {key} has other losses than an earlier run")
    return table(verdicts(known.values()))


def run(args: argparse.Namespace, device: torch.device) -> list[Curve]:
    """All curves, seed by seed, until the budget ends; written after each."""
    started, modules = time.perf_counter(), args.rows.split(",")
    curves: list[Curve] = []
    for workload in curve_workloads(args.workloads.split(","), args.tiny):
        rows = [
            r for r in curve_rows(workload, modules, args.match) if device.type == "cuda" or not r.needs_gpu
        ]
        for seed in range(args.seeds):
            for row in rows:
                if time.perf_counter() - started > args.budget_s:
                    print(f"not run, the budget is spent: {row.key} seed {seed}", flush=True)
                    continue
                curves.append(curve(row, device, seed, args.steps))
                print(f"{row.key} seed {seed}: {curves[-1].error or curves[-1].losses[-1]}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(document(curves, device, args)))
    return curves


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workloads", default="vla,lm,moe")
    p.add_argument("--rows", default="stock,ours")
    p.add_argument("--match", default="", help="of ours, only rows whose name contains this")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--budget-s", type=float, default=float("inf"), help="start no curve after this")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json", type=Path)
    p.add_argument("--show", default="", help="JSON files a,b,...: print their verdicts, and train nothing")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, compare, print."""
    args = arguments(argv)
    if args.show:
        print(shown(map(Path, args.show.split(",")), args.workloads.split(",")))
        return
    if not (torch.cuda.is_available() or args.tiny):
        print("curves needs a CUDA GPU; --tiny runs what a CPU can")
        return
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = verdicts(run(args, device))
    print(f"\n{report.machine_line(machine(device))}\n\n{table(found)}")


if __name__ == "__main__":
    main()
