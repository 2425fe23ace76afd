"""What vLLM 0.32 on the CPU asks of an attention backend alone: its KV layout."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheLayout

from rlk.rollout.vllm.attention import RlkAttentionBackend


class CpuAttentionBackend(RlkAttentionBackend):
    """Pages as the operator reads them."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """[blocks, KV heads, page, 2·D] per layer, K then V."""
        return (KVCacheLayout.LBHNC,)
