"""The three products with the weight of a head, for a vocabulary of any size.

Products with an odd dimension run on kernels of older cards that load single elements: with 50257 classes an H200
reached 98, 129 and 434 TFLOP/s, and 782, 782 and 644 with 50304 (bf16, 1536 rows, dim 2048; torch 2.11, CUDA 13.0). So
they are cut: what makes whole tiles in one product, the few classes behind in another. Nothing is copied but those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lf_graph.kernels._matmul import add_product, product

ALIGNED = 64  # columns: rows of logits start at multiples of 128 bytes, whatever the vocabulary
_FAST = 8  # a vocabulary that is a multiple of this needs no cut


def padded(vocab: int) -> int:
    """Columns of memory for a row of logits."""
    return -(-vocab // ALIGNED) * ALIGNED


class Head:
    """A weight and a bias in the dtype of the products.

    Args:
        weight: [vocab, dim].
        bias: [vocab], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        vocab = len(weight)
        cut = vocab // ALIGNED * ALIGNED if vocab % _FAST else vocab
        self._weight, self._bias, self._vocab = weight, bias, vocab
        self._parts = [part for part in (slice(0, cut), slice(cut, vocab)) if part.start < part.stop]
        self._last: Tensor | None = None  # the classes behind the cut, and zeros
        if 0 < cut < vocab and bias is None:
            self._last = weight.new_zeros(ALIGNED, weight.shape[1])
            self._last[: vocab - cut].copy_(weight[cut:])

    def logits(self, x: Tensor, buffer: Tensor) -> Tensor:
        """x @ weight.T + bias, [rows, vocab], in the memory of ``buffer`` [rows, padded(vocab)]."""
        for part in self._parts:
            self._part_of_logits(x, buffer, part)
        return buffer[:, : self._vocab]

    def _part_of_logits(self, x: Tensor, buffer: Tensor, part: slice) -> None:
        if self._bias is not None:
            torch.addmm(self._bias[part], x, self._weight[part].t(), out=buffer[:, part])
        elif part.start and self._last is not None:
            product(x, self._last.t(), buffer[:, part.start :])
        else:
            product(x, self._weight[part].t(), buffer[:, part])

    def hidden(self, derivatives: Tensor, out: Tensor) -> None:
        """out = derivatives [rows, vocab] @ weight."""
        # The small part first: its rounding is small, and the large one is added before it is rounded.
        for i, part in enumerate(reversed(self._parts)):
            (add_product if i else product)(derivatives[:, part], self._weight[part], out)

    def weight(self, derivatives: Tensor, x: Tensor, out: Tensor, add: bool) -> None:
        """out = derivatives.T @ x [vocab, dim], or out += that."""
        for part in self._parts:
            (add_product if add else product)(derivatives[:, part].t(), x, out[part])
