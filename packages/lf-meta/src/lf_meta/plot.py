"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def plot_loss(rows: Iterable[dict[str, Any]], path: Path, title: str) -> None:
    """Draw train loss, eval loss and learning rate over steps into a PNG; nothing when there are no steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    rows = list(rows)
    train = [(r["step"], r["loss"], r["lr"]) for r in rows if "loss" in r]
    held_out = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
    if not train:
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses, rates = zip(*train, strict=True)
    axes.plot(steps, losses, linewidth=1, label="train")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="eval")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    rate_axes = axes.twinx()
    rate_axes.plot(steps, rates, color="grey", linestyle=":", linewidth=1)
    rate_axes.set_ylabel("learning rate (dotted)")
    figure.savefig(path, dpi=110)
