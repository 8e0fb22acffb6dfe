"""Schedule, seeds, metrics, sampling: the pure parts."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lf_meta.errors import NonFiniteLossError
from lf_meta.infer import Sampling, generate
from lf_meta.metrics import MetricsFile, StepMetrics, StepRecord
from lf_meta.models.gr00t_lm import build
from lf_meta.plot import plot_loss
from lf_meta.schedule import learning_rate
from lf_meta.seeding import fold, seed_all


def test_learning_rate_warms_up_peaks_and_ends_on_the_floor() -> None:
    rates = [learning_rate(s, peak=1.0, floor=0.1, warmup=10, total=100) for s in range(120)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[99] == rates[119] == pytest.approx(0.1)
    assert rates[10:100] == sorted(rates[10:100], reverse=True)


@given(st.integers(0, 500), st.integers(0, 300), st.integers(1, 300))
def test_learning_rate_stays_in_range_for_any_numbers(step: int, warmup: int, total: int) -> None:
    assert 0 < learning_rate(step, peak=1.0, floor=0.05, warmup=warmup, total=total) <= 1.0


def test_random_numbers_are_a_function_of_seed_step_and_rank() -> None:
    def draw(*parts: int) -> tuple[float, float, float]:
        seed_all(*parts)
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    assert draw(0, 5, 1) == draw(0, 5, 1)
    assert len({draw(0, 5, 1), draw(0, 5, 0), draw(0, 6, 1), draw(1, 5, 1)}) == 4


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4))
def test_fold_gives_a_seed_every_generator_takes(parts: list[int]) -> None:
    assert 0 <= fold(*parts) < 2**63


def _record(step: int, loss_sum: float, count: float) -> StepRecord:
    return StepRecord(step, 0, 1e-3, torch.tensor([loss_sum, count]), torch.tensor(0.5))


def test_flush_gives_a_row_a_step_and_empties_the_collection() -> None:
    metrics = StepMetrics()
    metrics.add(_record(1, 10.0, 5), 0.0)
    metrics.add(_record(2, 3.0, 1), 0.0)
    rows = metrics.flush()
    assert [(r["step"], r["loss"], r["tokens"]) for r in rows] == [(1, 2.0, 5), (2, 3.0, 1)]
    assert metrics.flush() == []


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    metrics = StepMetrics()
    for step, loss in [(6, 1.0), (7, math.nan), (8, math.inf)]:
        metrics.add(_record(step, loss, 1), 0.0)
    with pytest.raises(NonFiniteLossError) as caught:
        metrics.flush()
    assert caught.value.step == 7


def test_metrics_file_survives_a_torn_line_and_cuts_later_steps(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append([{"step": s, "loss": 1.0} for s in range(1, 6)])
    with file.path.open("a") as f:
        f.write('{"step": 6, "lo')
    file.truncate_after(3)
    assert [r["step"] for r in file.rows()] == [1, 2, 3]
    assert all(json.loads(line) for line in file.path.read_text().splitlines())


def test_metrics_on_a_full_disk_are_reported_once_and_do_not_stop(capsys: pytest.CaptureFixture[str]) -> None:
    file = MetricsFile(Path("/dev/full"))
    file.append([{"step": 1}])
    file.append([{"step": 2}])
    assert capsys.readouterr().err.count("cannot write /dev/full") == 1


def test_greedy_sampling_repeats_and_top_k_1_equals_it() -> None:
    torch.manual_seed(0)
    model = build("tiny", 32, layers=1)
    prompt = torch.tensor([1, 2, 3])
    greedy = generate(model, prompt, Sampling(tokens=20, temperature=0), context=16)
    assert len(greedy) == 20
    assert greedy == generate(
        model, prompt, Sampling(tokens=20, temperature=1.0, top_k=1, seed=9), context=16
    )


def test_sampling_is_a_function_of_its_seed() -> None:
    model = build("tiny", 32, layers=1)
    prompt = torch.tensor([1])
    draws = [generate(model, prompt, Sampling(tokens=30, seed=s, temperature=1.0), 16) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_top_k_never_draws_outside_the_k() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = {Sampling(temperature=2.0, top_k=2).draw(logits, generator).item() for _ in range(200)}
    assert drawn == {1, 2}


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        generate(build("tiny", 8, layers=1), torch.tensor([], dtype=torch.int64), Sampling(), 8)


def test_plot_is_a_png(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5 / s, "lr": 1e-3} for s in range(1, 20)] + [{"step": 10, "eval_loss": 0.6}]
    plot_loss(rows, tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss([], tmp_path / "none.png", "no steps")
    assert not (tmp_path / "none.png").exists()
