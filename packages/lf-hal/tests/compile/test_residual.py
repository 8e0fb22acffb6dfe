"""A shortcut added within the convolution: the same bits as added after it."""

from __future__ import annotations

import pytest
import torch
from compile_models import Block, with_statistics
from torch import nn

import lf_hal
from lf_hal.lir import Graph
from lf_hal.passes import PassOptions, optimize, store_weights


class Blocks(nn.Module):
    """Both kinds of block, a shortcut that is a convolution, and sums with other activations or none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Block(5, 19, 1, wide=False), Block(19, 6, 2, wide=True), Block(24, 6, 1, wide=True)
        )
        self.plain, self.deep = nn.Conv2d(24, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks(x)
        return torch.sigmoid(x + self.plain(x)), self.deep(x) + x


def traced() -> tuple[Graph, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    net, x = with_statistics(Blocks()), torch.randn(2, 5, 9, 8)
    graph = lf_hal.trace(net, (x,))
    return graph, dict(lf_hal.weights_of(net, graph)), x


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("fold", [True, False])
def test_fused_and_unfused_have_the_same_bits(dtype: str, fold: bool) -> None:
    graph, weights, x = traced()
    found = []
    for fuse in (True, False):
        options = PassOptions(fold_affine=fold, fuse_residual=fuse)
        kinds = [op.kind for op in store_weights(optimize(graph, options), dtype).ops]
        assert ("conv_add_act" in kinds) == (fuse and dtype != "i8")
        with lf_hal.compile(graph, weights, passes=options, weights_dtype=dtype) as made:
            found += [[y.tobytes() for y in made.run([x.numpy()], threads=t).values()] for t in (1, 3)]
    assert all(f == found[0] for f in found)


def test_every_shortcut_of_the_blocks_is_fused() -> None:
    ops = optimize(traced()[0]).ops
    assert sum(op.kind == "conv_add_act" for op in ops) == 5
    assert not any(op.kind == "binary" for op in ops)
