"""FlashAttention 3 as vLLM ships it: one library of CUDA kernels, loaded by its path. vLLM itself is not imported."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from rlk.kernels.dispatch import BackendUnavailable

BLOCK = 128
"""Rows at whose multiples the sequences of a copy start: a multiple of the tile of keys that the library reads."""
MISSING = "backend 'vendor' needs FlashAttention 3 of a vLLM for CUDA: install rlk[cuda], or use backend 'triton'"
_ARGUMENTS = """
q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table
kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale is_causal window_size_left
window_size_right softcap is_rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin s_aux cp_world_size cp_rank
cp_tot_seqused_k
"""


class FlashAttention:
    """The library that the installed vLLM would use.

    ``kernel_id`` is ``vendor:attention:<first 12 hex digits of a hash>``, over the library, this source and torch's version.
    """

    files = tuple(sorted(Path(__file__).parent.glob("vendor*.py")))

    @functools.cached_property
    def path(self) -> Path | None:
        """None where vLLM is missing, or built without these kernels, as for a CPU."""
        found = importlib.util.find_spec("vllm")
        homes = [] if found is None else found.submodule_search_locations or []
        return next((path for home in homes for path in Path(home).glob("vllm_flash_attn/_vllm_fa3_C*.so")), None)

    @property
    def available(self) -> bool:
        """Whether this torch build and the installed vLLM hold the library."""
        return torch.version.cuda is not None and self.path is not None

    @functools.cached_property
    def version(self) -> str:
        """Of vLLM, which builds the library."""
        return importlib.metadata.version("vllm")

    @functools.cached_property
    def kernel_id(self) -> str:
        sha = hashlib.sha256(f"torch {torch.__version__}".encode())
        for path in (*self.files, self._required()):
            sha.update(path.read_bytes())
        return f"vendor:attention:{sha.hexdigest()[:12]}"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, q_starts: torch.Tensor, most_rows: int, most_keys: int,
        k_starts: torch.Tensor | None = None, lengths: torch.Tensor | None = None, table: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Causal attention with one split: out [T, Hq, D] bf16, and the natural log-sum-exp [Hq, T] fp32.

        q: [T, Hq, D]; k, v: [rows, Hk, D] with k_starts [S], or [pages, page, Hk, D] with table [S, pages]; q_starts: [S+1]; lengths: [S],
        keys of each sequence. Offsets, lengths and table are int32. most_rows and most_keys choose among kernels that add in the same
        order; a sequence may have more of either. The library is never told of few rows where it would take another tile of keys: of one
        row, for which it drops the causal mask, and at widths other than 128 of up to 64.
        """
        least = 2 if q.shape[2] == 128 else 65
        out, lse, *_ = self._function(
            q, k, v, None, None, None, None, q_starts, k_starts, None, None, lengths, max(least, most_rows), max(2, most_keys), table,
            *(None,) * 8, scale, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out, lse

    @functools.cached_property
    def _function(self) -> torch._ops.OpOverload:
        torch.ops.load_library(str(self._required()))
        function: torch._ops.OpOverload = torch.ops._vllm_fa3_C.fwd.default
        names = [argument.name for argument in function._schema.arguments]
        if names != _ARGUMENTS.split():
            raise BackendUnavailable(
                f"attention: vLLM {self.version} calls FlashAttention 3 with other arguments than vLLM 0.24: use backend 'triton'"
            )
        return function

    def _required(self) -> Path:
        if torch.version.cuda is None or self.path is None:
            raise BackendUnavailable(
                "attention: backend 'vendor' needs vLLM's FlashAttention 3: install rlk[cuda], or use backend 'triton'"
            )
        return self.path


LIBRARY = FlashAttention()
