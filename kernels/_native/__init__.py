"""Builds the C++ sources of the CPU backend and calls them through a C ABI (no torch headers)."""

from rlk.kernels._native.build import NativeBuildError, NativeLibrary

__all__ = ["NativeBuildError", "NativeLibrary"]
