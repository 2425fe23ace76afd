"""Operators of rlk, imported as ``rlk.kernels``; one folder per operator."""
