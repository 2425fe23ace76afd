"""What vLLM 0.24 on CUDA asks of an attention backend alone: a shape of its KV cache, and metadata that a captured graph can read again."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec

from rlk.kernels.attention.vendor import certify_pages
from rlk.rollout.vllm.attention import PagedMetadataBuilder, RlkAttentionBackend
from rlk.rollout.vllm.settings import numerics_of


class CudaMetadataBuilder(PagedMetadataBuilder):
    """A captured graph reads the addresses of its capture, so every step writes its numbers into the same buffers.

    vLLM keeps block table and slots in buffers of its own. It fills a decode step up to a captured size: the rows added have slot −1
    and belong to no request, the requests added have no rows.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs + 1
        if numerics_of(vllm_config).attention_backend("cuda") == "vendor":
            heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
            certify_pages(heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, kv_cache_spec.block_size, device)
        self._buffers = {name: torch.zeros(most, dtype=torch.int64, device=device) for name in ("query_start_loc", "seq_lens")}

    def widened(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """``numbers`` as int64, at the same address in every step."""
        return self._buffers[name][: numbers.shape[0]].copy_(numbers)


class CudaAttentionBackend(RlkAttentionBackend):
    """Pages as the operator reads them."""

    @staticmethod
    def get_builder_cls() -> type[CudaMetadataBuilder]:
        return CudaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, KV heads, page, 2·D] per layer, K then V."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size
