"""Every measured number in the README is in a committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lf_meta.models import build_model

HERE = Path(__file__).parent.parent
TEXT = (HERE / "README.md").read_text(encoding="utf-8")
MEASURED = TEXT.split("## Measured")[1].split("\n## ")[0]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "benchmarks" / "results" / name).read_text())
    return found


def test_the_table_is_that_of_the_committed_run() -> None:
    run = result("h200-1.6b-2026-11-29.json")
    rows = re.findall(
        r"^\| ([a-z ]+) \| ([\d.]+) \| (\d+)% \| ([\d.]+) \| (.*) \| (.*) \|$", MEASURED, re.MULTILINE
    )

    assert [r[0] for r in rows] == [r["row"] for r in run["rows"]]
    for shown, row in zip(rows, run["rows"], strict=True):
        numbers = (f"{row['step_ms']:.1f}", f"{row['spread'] * 100:.0f}", f"{row['ratio']:.3f}")
        assert shown[1:4] == numbers
        assert shown[4:] == ("", "") or (
            int(shown[4]) == round(row["save_ms"]) and abs(float(shown[5]) - row["wait_pct"]) <= 0.01
        )
    machine = " ".join(MEASURED.split())
    assert all(
        f"{key} {run['machine'][key]}" in machine for key in ("date", "gpu", "driver", "torch", "load")
    )


def test_the_run_in_the_text_is_the_committed_one() -> None:
    run = result("h200-small-2026-11-29.json")
    bare, stock, ours = run["rows"]
    text = " ".join(MEASURED.split()).replace(" %", "%")

    assert f"bare loop {bare['step_ms']:.1f} ms (spread {bare['spread']:.0%})" in text
    assert (
        f"torch pieces {stock['ratio']:.3f}, ours {ours['ratio']:.3f} (spread {ours['spread']:.0%}) of it"
        in text
    )


@pytest.mark.parametrize(
    ("name", "size", "vocabulary"),
    [
        ("gr00t_n16_lm", "tiny", 50257),
        ("gr00t_n16_lm", "small", 50257),
        ("gr00t_n16_lm", "1.6b", 50257),
        ("gr00t_n16_moe", "tiny", 50257),
        ("gr00t_n16_moe", "small", 50257),
        ("gr00t_n16_moe", "base", 50257),
        ("gr00t_n16_moe", "13b", 50257),
        ("gr00t_n16_vla", "tiny", None),
        ("gr00t_n16_vla", "3b", None),
    ],
)
def test_the_table_of_models_tells_their_parameters(name: str, size: str, vocabulary: int | None) -> None:
    kind = {} if vocabulary else {"batch_kind": "mapping"}
    with torch.device("meta"):
        model = build_model(name, size, vocabulary, {}, **kind)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    numbers = {sum(p.numel() for p in model.parameters()), getattr(model, "active_parameters", trained)}

    lines, own = TEXT.split("## Models")[1].split("\n\n")[1].splitlines(), False
    found = []
    for line in lines:
        cells = [c.strip() for c in line.strip("|").split("|")]
        own = cells[0] == f"`{name}`" or (own and not cells[0])
        sizes = cells[1].split(", ")
        if own and size in sizes:
            found += [re.findall(r"([\d.]+) ([MB])", c)[sizes.index(size)] for c in cells[2:4] if "." in c]
    shown = {(number, unit) for number, unit in found}
    assert shown
    for number, unit in shown:
        scale = {"M": 1e6, "B": 1e9}[unit]
        digits = len(number.split(".")[1])
        assert any(f"{n / scale:.{digits}f}" == number for n in numbers), (number, numbers)
