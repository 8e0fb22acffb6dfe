"""Prove that models.py computes what the baseline's classes compute, bit for bit, forward and backward.

    python same_as_baseline.py /path/to/baselines

The folder holds h200_baseline.py and h200_reach.py, which the bars were measured on. Tiny dimensions, CPU. The
baseline's VLA takes no dimensions, so a small one is put together from its own blocks and runs its own forward; the
vision width stays 1152 because that forward spells it out. Dropout draws the same numbers on both sides from the
same seed.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import models as m
import torch
import torch.nn.functional as F
import workloads as w
from torch import Tensor, nn

LM_TINY = m.LMDims(2, 32, 4, 48, vocab=97, kv_heads=2, head_dim=8)
VLA_TINY = m.VLADims(
    m.LMDims(6, 32, 4, 48, vocab=97, kv_heads=2, head_dim=8),
    image=56,
    vision_layers=1,
    vision_ffn=24,
    action_layers=4,
    action_width=32,
    action_heads=4,
    action_dim=8,
    horizon=6,
    text_tokens=5,
    text_vocab=97,
)


def load_baseline(folder: Path) -> ModuleType:
    """The baseline script as a module."""
    spec = importlib.util.spec_from_file_location("h200_baseline", folder / "h200_baseline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_grouped(folder: Path) -> Any:
    """The class GMoE alone: its script runs benchmarks when it is imported."""
    tree = ast.parse((folder / "h200_reach.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GMoE"]
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(compile(tree, "h200_reach.py", "exec"), names)
    return names["GMoE"]


def language(base: ModuleType, dims: m.LMDims) -> nn.Module:
    """The baseline's LM of these dimensions."""
    moe = (dims.experts, dims.top_k) if dims.experts else None
    model: nn.Module = base.LM(
        dims.layers, dims.width, dims.heads, dims.ffn, dims.vocab, moe, dims.kv_heads, dims.head_dim
    )
    return model


def small_vla(base: ModuleType, dims: m.VLADims) -> nn.Module:
    """The baseline's VLA with small parts; its own forward."""
    model: Any = base.VLA.__new__(base.VLA)
    nn.Module.__init__(model)
    lm, action, vision = dims.language, dims.action_width, dims.vision_width
    model.patch = nn.Conv2d(3, vision, dims.patch, dims.patch)
    model.vit = nn.ModuleList(
        base.ViTB(vision, dims.vision_heads, dims.vision_ffn) for _ in range(dims.vision_layers)
    )
    model.proj = nn.Sequential(nn.Linear(vision * 4, lm.width), nn.GELU(), nn.Linear(lm.width, lm.width))
    model.lm = language(base, lm)
    model.lm.head = None
    model.vlln = nn.LayerNorm(lm.width)
    contexts = [lm.width if i % 2 == 0 else None for i in range(dims.action_layers)]
    model.dit = nn.ModuleList(base.DiTB(action, dims.action_heads, kd) for kd in contexts)
    model.t = nn.Sequential(nn.Linear(256, action), nn.SiLU(), nn.Linear(action, action))
    model.act, model.st = nn.Linear(dims.action_dim, action), nn.Linear(dims.action_dim, action)
    model.out = nn.Linear(action, dims.action_dim)
    model.requires_grad_(False)
    for part in (model.vlln, model.dit, model.t, model.act, model.st, model.out, model.lm.b[-4:]):
        part.requires_grad_(True)
    return model


def gradients(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients under bfloat16 autocast."""
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def must_agree(name: str, theirs: nn.Module, ours: nn.Module, batch: list[Tensor]) -> None:
    """Load their weights into ours and compare everything, bit by bit."""
    ours.load_state_dict(theirs.state_dict())
    trained = [[n for n, p in x.named_parameters() if p.requires_grad] for x in (theirs, ours)]
    assert trained[0] == trained[1], f"{name}: other parameters are trained"
    (loss, grads), (our_loss, our_grads) = gradients(theirs, batch), gradients(ours, batch)
    assert torch.equal(loss, our_loss), f"{name}: loss {our_loss} instead of {loss}"
    assert grads.keys() == our_grads.keys(), f"{name}: other parameters have gradients"
    for key, gradient in grads.items():
        assert torch.equal(gradient, our_grads[key]), f"{name}: gradient of {key} differs"
    print(f"{name}: loss {float(loss):.6f} and {len(grads)} gradients are bit-equal")


def must_count(name: str, theirs: nn.Module, ours: nn.Module) -> None:
    """Full size: the same names, shapes and trained parameters."""
    shapes = [{n: (p.shape, p.requires_grad) for n, p in x.named_parameters()} for x in (theirs, ours)]
    assert shapes[0] == shapes[1], f"{name}: parameters differ"
    count = sum(p.numel() for p in ours.parameters() if p.requires_grad)
    print(f"{name}: {len(shapes[0])} parameters of the same shapes, {count / 1e9:.3f} B trained")


def main(folder: Path) -> None:
    """Compare all four models; an AssertionError names the first difference."""
    torch.manual_seed(0)
    base, cpu = load_baseline(folder), torch.device("cpu")
    ids = w.lm_batch(97, 2, 16, cpu)
    must_agree("LM", language(base, LM_TINY), m.LM(LM_TINY), ids)
    must_agree("MoE loop", language(base, w.TINY_MOE), m.LM(w.TINY_MOE), ids)
    must_agree("VLA", small_vla(base, VLA_TINY), m.VLA(VLA_TINY), w.vla_batch(VLA_TINY, 2, cpu))
    base_loop, base.MoE = base.MoE, load_grouped(folder)
    grouped = m.group_experts(m.LM(w.TINY_MOE))
    must_agree("MoE grouped", language(base, w.TINY_MOE), grouped, ids)
    base.MoE = base_loop
    with torch.device("meta"):
        must_count("LM 1.65 B", language(base, w.LM_DIMS), m.LM(w.LM_DIMS))
        must_count("MoE", language(base, w.MOE_DIMS), m.LM(w.MOE_DIMS))
        must_count("VLA", base.VLA(), m.VLA(w.VLA_DIMS))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
