"""Short cycles through a matrix of symmetric distances: exact to 13 points, greedy and 2-opt above."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXACT = 13  # points: 12 devices and the network
_TWO_OPT_WORK = 50_000_000  # matrix cells looked at in all


def shortest_cycle(cost: Tensor) -> list[int]:
    """The points 0 .. n - 1 from 0 in a cycle of least sum. cost: [n, n] float64, symmetric, n <= 13.

    Held and Karp, A dynamic programming approach to sequencing problems, 1962.
    """
    n = len(cost) - 1
    if n < 2:
        return list(range(n + 1))
    masks = torch.arange(1 << n)
    holds = ((masks[:, None] >> torch.arange(n)) & 1).bool()
    count = holds.sum(1)
    inner = cost[1:, 1:]
    total = torch.full((1 << n, n), math.inf, dtype=torch.float64)
    last = torch.zeros((1 << n, n), dtype=torch.int64)
    total[1 << torch.arange(n), torch.arange(n)] = cost[0, 1:]
    for size in range(2, n + 1):
        level = masks[count == size]
        for point in range(n):
            into = level[holds[level, point]]
            best = (total[into ^ (1 << point)] + inner[:, point]).min(1)
            total[into, point], last[into, point] = best.values, best.indices
    here = int((total[-1] + cost[1:, 0]).argmin())
    mask, tour = (1 << n) - 1, []
    while mask:
        tour.append(here + 1)
        here, mask = int(last[mask, here]), mask ^ (1 << here)
    return [0, *tour]


def bottleneck(cost: Tensor) -> float:
    """The least possible largest step of a cycle through all points; n <= 13. By bisection over the distances."""
    steps = torch.unique(cost)
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        kept = torch.where(cost <= steps[middle], 0.0, 1.0).to(torch.float64)
        tour = shortest_cycle(kept)
        ends = torch.tensor(tour).roll(-1)
        if float(kept[torch.tensor(tour), ends].sum()) == 0:
            high = middle
        else:
            low = middle + 1
    return float(steps[low])


def greedy_cycle(cost: Tensor) -> list[int]:
    """From 0 always to the nearest point not yet visited, then 2-opt."""
    left = cost.clone()
    left.fill_diagonal_(math.inf)
    tour = [0]
    left[:, 0] = math.inf
    for _ in range(len(cost) - 1):
        tour.append(int(left[tour[-1]].argmin()))
        left[:, tour[-1]] = math.inf
    return two_opt(cost, tour)


def two_opt(cost: Tensor, tour: list[int]) -> list[int]:
    """Turn the stretch that shortens the cycle most, until none does or a budget of work is spent; never longer.

    Croes, A method for solving traveling-salesman problems, 1958.
    """
    n = len(tour)
    if n < 4:
        return list(tour)
    points = torch.tensor(tour)
    upper = torch.ones(n, n, dtype=torch.bool).triu(2)
    for _ in range(max(_TWO_OPT_WORK // (n * n), 8)):
        following = points.roll(-1)
        steps = cost[points, following]
        change = cost[points][:, points] + cost[following][:, following] - steps[:, None] - steps
        change.masked_fill_(~upper, 0.0)
        best = int(change.argmin())
        first, second = divmod(best, n)
        if float(change[first, second]) >= -1e-9 * float(steps.max()):
            break
        points[first + 1 : second + 1] = points[first + 1 : second + 1].flip(0)
    return [int(point) for point in points]
