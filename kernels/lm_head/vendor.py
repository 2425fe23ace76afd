"""Vendor backend of lm_head: det_gemm's certified library under lm_head's name."""

from __future__ import annotations

from rlk.kernels.det_gemm import vendor
from rlk.kernels.det_gemm.operators import register

OPERATORS = register("lm_head", "lm_head_vendor", "cuda", vendor)
