"""What cutting a transformer block costs: five pieces (qkv, attention, o, gate, up and down) against one graph.

    python bench_pieces.py --json pieces.json          # a block of the 1.65 B language model, on a GPU
    python bench_pieces.py --tiny                      # any machine; the recorder, so times say nothing
    python bench_pieces.py --show results/pieces.json  # the table of a run

For each way: seconds to capture, graph launches, kernels and milliseconds of forward and backward, median of windows;
parity with the eager block first. The peer is ``torch.cuda.make_graphed_callables`` on the same block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import machine, synchronize, timed
from report import markdown
from torch import Tensor, nn

from lf_graph import Chain, Spec, merge, shard_block
from lf_meta.models.gr00t_lm import SIZES, Block, LMConfig, rope_tables

WINDOWS = 15
STEPS = 20
GROUPS = {"one graph": 1, "two pieces": 2, "five pieces": 5}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--json", type=Path)
    p.add_argument("--show", type=Path, help="print the table of these results, and measure nothing")
    return p.parse_args(argv)


def grouped(specs: Sequence[Spec], groups: int) -> tuple[Spec, ...]:
    """The five parts joined to one, or to attention's half and the feed-forward half, or as they are."""
    if groups == 1:
        return merge(specs)
    if groups == 2:
        return (*merge(specs[:3]), *merge(specs[3:]))
    return tuple(specs)


def chain_of(block: nn.Module, groups: int, autocast: Callable[[], Any]) -> Chain:
    """The block as a chain of so many pieces."""
    elements = [s.element() for s in grouped(shard_block(block), groups)]
    return Chain(elements, inputs=("x", "cos", "sin"), autocast=autocast, copy_outputs=False)


def step_of(call: Callable[..., Tensor], inputs: Sequence[Tensor], seed: Tensor) -> Callable[[], None]:
    """Forward and backward of one micro-batch, gradients added to ``.grad``."""

    def step() -> None:
        call(*inputs).backward(seed)

    return step


def row(
    name: str, prepare: Callable[[], Callable[..., Tensor]], inputs: Sequence[Tensor], seed: Tensor
) -> dict[str, Any]:
    """Capture and time one way."""
    device = inputs[0].device
    synchronize(device)
    start = time.perf_counter()
    call = prepare()
    synchronize(device)
    seconds = time.perf_counter() - start
    step = step_of(call, inputs, seed)
    for _ in range(3):
        step()
    windows = [timed(lambda: [step() for _ in range(STEPS)], device) / STEPS for _ in range(WINDOWS)]
    median = statistics.median(windows)
    return {"row": name, "capture_s": seconds, "ms": median, "spread": (max(windows) - min(windows)) / median}


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = arguments(argv)
    if args.show:
        print(table(json.loads(args.show.read_text())["rows"]))
        return
    if not (torch.cuda.is_available() or args.tiny):
        print("bench_pieces needs a CUDA GPU; --tiny runs what a CPU can")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LMConfig(vocab_size=16, **SIZES["tiny" if args.tiny else "1.6b"])
    torch.manual_seed(0)
    block = Block(config).to(device)
    x = torch.randn(1, args.tokens, config.hidden, device=device, requires_grad=True)
    cos, sin = rope_tables(args.tokens, config.hidden // config.heads, config.rope_base, device)
    autocast = lambda: torch.autocast(device.type, torch.bfloat16, cache_enabled=False)  # noqa: E731

    def eager(*inputs: Tensor) -> Tensor:
        with autocast():
            result: Tensor = block(*inputs)
        return result

    seed = torch.randn_like(eager(x, cos, sin))
    rows = [row("eager", lambda: eager, (x, cos, sin), seed)]
    want = gradients(eager, block, x, cos, sin, seed)
    for name, groups in GROUPS.items():
        chain = chain_of(block, groups, autocast)
        found = row(name, lambda c=chain: c.capture(x, cos, sin), (x, cos, sin), seed)  # type: ignore[misc]
        stats = chain.stats()
        found |= {"graphs": stats.graphs, "operations": stats.operations, "bytes": stats.bytes}
        found |= {
            "predicted_bytes": stats.predicted_bytes,
            "difference": distance(gradients(chain, block, x, cos, sin, seed), want),
        }
        rows.append(found)
        chain.close()
    if device.type == "cuda":
        rows.append(peer(block, autocast, (x, cos, sin), seed))
    report(rows, device, args)


def peer(
    block: nn.Module, autocast: Callable[[], Any], inputs: Sequence[Tensor], seed: Tensor
) -> dict[str, Any]:
    """torch's own callable graphs; their gradients are right for one micro-batch only (pytorch#181723)."""

    def prepare() -> Callable[..., Tensor]:
        with autocast():
            made: Callable[..., Tensor] = torch.cuda.make_graphed_callables(block, tuple(inputs))
        return made

    own = block.__dict__.get("forward")
    try:
        return row("make_graphed_callables", prepare, inputs, seed)
    finally:
        if own is None:
            block.__dict__.pop("forward", None)


def gradients(
    call: Callable[..., Tensor], block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, seed: Tensor
) -> list[Tensor]:
    """Gradients of one forward and backward."""
    block.zero_grad()
    x.grad = None
    call(x, cos, sin).backward(seed)
    assert x.grad is not None
    return [x.grad.clone(), *[p.grad.clone() for p in block.parameters() if p.grad is not None]]


def distance(found: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest relative difference."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    """Results as Markdown."""
    whole = next(r["ms"] for r in rows if r["row"] == "one graph")
    header = ("way", "ms", "spread", "/ one graph", "capture s", "graphs", "kernels", "gradients differ")
    lines = []
    for r in rows:
        cells = [r["row"], f"{r['ms']:.3f}", f"{r['spread']:.1%}", f"{r['ms'] / whole:.2f}"]
        cells += [f"{r['capture_s']:.2f}", str(r.get("graphs", "")), str(r.get("operations", ""))]
        lines.append([*cells, f"{r['difference']:.1e}" if "difference" in r else ""])
    return markdown(header, lines)


def report(rows: list[dict[str, Any]], device: torch.device, args: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    print(table(rows))
    if args.json:
        known = {"version": 1, "machine": machine(device), "tokens": args.tokens, "rows": rows}
        args.json.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
