"""Triton kernels for training, each beside a plain PyTorch twin that computes the same."""

from lf_graph.kernels._choice import Implementation, KernelUnavailableError

__all__ = ["Implementation", "KernelUnavailableError"]
