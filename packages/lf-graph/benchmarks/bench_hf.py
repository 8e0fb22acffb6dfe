"""A Hugging Face decoder as its users train it, against the same model in TrainStep: parity, time, launches, memory.

    python bench_hf.py --json results/hf.json                   # on a GPU; rows beyond 100 s are left out, and say so
    python bench_hf.py --batches 4 --json results/hf4.json      # the other batch in a call of its own
    python bench_hf.py --budget-s 300 --json results/hf.json    # every row of both batches, one call
    python bench_hf.py --match eager,lf-graph --budget-s 200 # ours, with and without kernels, beside eager
    python bench_hf.py --tiny                                   # any machine; times of the recorder say nothing
    python report.py results/hf.json --mark hf --into ../README.md   # then name this command above the table

The model is transformers' Qwen3 with the layers of Qwen3-0.6B, 24 of them (0.53 B parameters), random weights, rows of
512 random tokens, all of it trained: bf16 autocast, float32 masters, AdamW. The row ``eager`` is plain PyTorch with the
fused AdamW; ``whole`` is torch.compile of the model; ``graph`` and ``whole+graph`` are hand-made graphs of the whole
step; the rows of lf-graph differ in ``compile=`` only, but for those with ``kernels``: these exchange norms, SwiGLU
branches and the loss for the operators of ``lf_graph.kernels`` by ``use`` and ``loss_of``, and one of them attention.

All rows get two options of transformers that help each of them: no key-value cache (training does not read it, and it
copies every key and value), and a dictionary for the mask that says "none". Otherwise transformers 5.17 builds a
dense mask whenever it is compiled or captured (``is_tracing`` in masking_utils.py; 5.24 no longer when captured), and
attention then cannot take its causal kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_step import Run
from measure import Row, installed, machine
from ours import Ours
from ours import row_of as our_row
from report import machine_line, tables
from stock import EAGER, GRAPH, WHOLE, WHOLE_GRAPH
from stock import row_of as stock_row
from torch import Tensor, nn
from workloads import Workload

from lf_graph.kernels import CausalLMLoss, use

# https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json, 24 of its 28 layers
FULL = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TINY = FULL | {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
BATCHES = (1, 4)

# in the order in which they are given up last; seconds of each row on an H200, estimated from those of the language
# model in results/lm512_h200_2026-11-30.json; ``whole`` finds the kernels that ``whole+graph`` compiled
QUICK = (replace(EAGER, fused=True, expect_s=6), replace(GRAPH, expect_s=4))
COMPILED = (replace(WHOLE_GRAPH, expect_s=50), replace(WHOLE, expect_s=8))
OURS_QUICK = (
    Ours("lf-graph, off", compile="off", expect_s=6),
    Ours("lf-graph, blocks", compile="blocks", expect_s=22),
)
OURS_COMPILED = (Ours("lf-graph, model", compile="model", expect_s=50),)
NO_MASK = {"full_attention": None}


def decoder(shape: dict[str, Any]) -> nn.Module:
    """A Qwen3ForCausalLM with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**shape))


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross entropy of the next token, float32 []; ids int64 [B, T] are their own labels."""
    (ids,) = batch
    loss: Tensor = model(input_ids=ids, labels=ids, attention_mask=NO_MASK, use_cache=False).loss
    return loss


def fused_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """The same without logits; what ``loss_of(model)`` makes, but made at every call, and so without its check."""
    (ids,) = batch
    loss = CausalLMLoss(model.get_decoder(), model.get_output_embeddings(), "mean", "auto")(ids, ids, NO_MASK)
    assert isinstance(loss, Tensor)
    return loss


def with_kernels(model: nn.Module, attention: bool = False) -> nn.Module:
    """The model with its norms and branches exchanged, which feed nothing but matrix products."""
    use(model, attention=attention, norm_outputs="autocast")
    return model


# last: the rows above are what they are compared with
KERNELS = (
    Ours("lf-graph, kernels", compile="off", change=with_kernels, loss=fused_loss, expect_s=8),
    Ours(
        "lf-graph, kernels and attention",
        compile="off",
        change=partial(with_kernels, attention=True),
        loss=fused_loss,
        expect_s=8,
    ),
    Ours("lf-graph, kernels, blocks", compile="blocks", change=with_kernels, loss=fused_loss, expect_s=25),
)


def workload(tiny: bool, batches: Sequence[int]) -> Workload:
    """The decoder in full, or in a size for a CPU."""
    shape, length = (TINY, 16) if tiny else (FULL, 512)
    vocab = shape["vocab_size"]
    return Workload(
        name=f"hf-{length}",
        build=lambda: decoder(shape),
        make_batch=lambda size, device: [torch.randint(0, vocab, (size, length), device=device)],
        blocks=lambda model: list(model.model.layers),
        batches=tuple(batches),
        length=length,
        unit="tokens",
        loss=loss_of,
    )


def rows(selected: Workload) -> list[Row]:
    """Every row, the important ones first: what compiles for long comes after what both batches need."""
    found: list[Row] = []
    for stock, ours in ((QUICK, OURS_QUICK), (COMPILED, OURS_COMPILED), ((), KERNELS)):
        for batch in selected.batches:
            found += [stock_row(selected, batch, variant) for variant in stock]
            found += [our_row(selected, batch, option) for option in ours]
    return [replace(row, urgent=True) for row in found]  # urgent rows keep this order


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; what else a run of bench_step.py is told has its default."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows of 512 tokens in a batch")
    p.add_argument("--match", default="", help="only rows whose workload|batch|name contains one of a,b,...")
    p.add_argument("--budget-s", type=float, default=100.0, help="start no row that would end after this")
    p.add_argument("--windows", type=int, default=12)
    p.add_argument("--window-steps", type=int, default=1)
    p.add_argument("--no-profile", action="store_true")
    p.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    p.add_argument("--json", type=Path, help="write the results here, after every row")
    p.set_defaults(only="", processes=1, isolate=False, workloads="hf", rows="stock,ours")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the rows and print the table."""
    args = arguments(argv)
    has_gpu = torch.cuda.is_available()
    if installed("transformers") is None:
        print("bench_hf needs transformers: pip install transformers")
        return
    if not (has_gpu or args.tiny):
        print("bench_hf needs a CUDA GPU; --tiny runs what a CPU can")
        return
    if has_gpu:
        torch.set_float32_matmul_precision("high")  # tf32 where float32 is multiplied, as in bench_step.py
    device = torch.device("cuda" if has_gpu else "cpu")
    patterns = [p for p in args.match.split(",") if p]
    chosen = rows(workload(args.tiny, [int(b) for b in args.batches.split(",")]))
    run = Run(args, device)
    run.all([r for r in chosen if not patterns or any(p in r.key for p in patterns)])
    print(f"\n{machine_line(machine(device))}\n\n{tables(run.results)}")


if __name__ == "__main__":
    main()
