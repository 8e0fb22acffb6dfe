"""What torch.compile sees of a Qwen3 after use(), traced here as for a GPU, in a process without one."""

from __future__ import annotations

import compiling
import torch
import traced
from torch import Tensor


def calls_of(*cases: tuple[str, bool]) -> list[list[list[str]]]:
    """Calls of both graphs for each (outputs of norms, dynamic), from one process without the interpreter."""
    found: list[list[list[str]]] = compiling.call("use_traced", "_graphs", cases)
    return found


def _graphs(cases: list[tuple[str, bool]]) -> list[list[list[str]]]:
    traced.pretend_a_gpu()
    return [_graph(outputs, dynamic) for outputs, dynamic in cases]


def _graph(outputs: str, dynamic: bool) -> list[list[str]]:
    from transformers import Qwen3Config, Qwen3Model

    from lf_graph.kernels import use

    config = Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = Qwen3Model(config)
    use(model, attention=True, norm_outputs=outputs)  # type: ignore[arg-type]
    mask = torch.ones(2, 32, dtype=torch.long)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            states: Tensor = model(inputs_embeds=x, attention_mask=mask, use_cache=False)[0]
        return states

    return traced.trace(forward, [(2, 32, 64)], dynamic)
