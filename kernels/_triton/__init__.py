"""Shared parts of the Triton backend: launches, arithmetic and the ahead-of-time harness. Importing this package imports no Triton."""

from rlk.kernels._triton.launch import TritonSource, from_triton

__all__ = ["TritonSource", "from_triton"]
