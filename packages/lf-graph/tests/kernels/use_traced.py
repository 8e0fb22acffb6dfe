"""What torch.compile sees of a Qwen3 after use(), traced here as for a GPU, in a process without one.

    python use_traced.py same|autocast 0|1

prints, as JSON, the calls of the forward and of the backward graph; with 1 for dynamic shapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
import traced
from torch import Tensor


def calls_of(outputs: str, dynamic: bool) -> list[list[str]]:
    """Calls of both graphs, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, outputs, str(int(dynamic))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _graphs(outputs: str, dynamic: bool) -> list[list[str]]:
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

    return traced._trace(forward, [(2, 32, 64)], dynamic)


if __name__ == "__main__":
    traced._pretend_a_gpu()
    print(json.dumps(_graphs(sys.argv[1], sys.argv[2] == "1")))
