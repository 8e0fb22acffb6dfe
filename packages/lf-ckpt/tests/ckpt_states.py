"""Small states for tests, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch


def state(seed: int = 0, layers: int = 3, size: int = 20_000) -> dict[str, torch.Tensor]:
    """`layers` float32 vectors of `size` and a scalar step."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer{i}.weight": torch.randn(size, generator=generator) for i in range(layers)}
    return {**tensors, "step": torch.tensor(seed)}


def bits(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of a tensor of any stride and dtype."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def copy_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Deep copy."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def files_under(path: Path) -> set[str]:
    """Relative paths of all files."""
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
