"""Attention backend of strict mode: keys and values into vLLM's paged cache, then the contract's paged attention over it.

What vLLM asks of a backend on one device alone, and its own names for it, is in ``attention_cpu`` and ``attention_cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from rlk.kernels.attention import paged_attention
from rlk.kernels.serving import rotate_into_cache, store_kv
from rlk.rollout.vllm.settings import EngineRefusal


@dataclass
class PagedMetadata(AttentionMetadata):
    """One step: S scheduled requests with T rows in all.

    query_start_loc: int64 [S+1]; seq_lens: int64 [S], including this step's rows; block_table: int32 [S, pages];
    slots: int64 [T], page·page_size + offset of each row's key and value, −1 for a row that has none.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Takes what the operator needs from vLLM's common metadata, once per step for all layers."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> PagedMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise EngineRefusal("strict attention is causal: leave bidirectional or dynamic masks out")
        return PagedMetadata(
            query_start_loc=self.widened("query_start_loc", step.query_start_loc[: step.num_reqs + 1]),
            seq_lens=self.widened("seq_lens", step.seq_lens[: step.num_reqs]),
            block_table=step.block_table_tensor[: step.num_reqs].contiguous(),
            slots=step.slot_mapping[: step.num_actual_tokens].long(),
        )

    def widened(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """``numbers`` as int64."""
        return numbers.long()


class RlkAttentionImpl(AttentionImpl[PagedMetadata]):
    """One layer's attention. Any feature beyond causal grouped-query attention is refused when the layer is built."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        *,
        kv_tile: int,
        kv_split: int,
        backend: str | None,
    ) -> None:
        """backend: of the operator, None for the device's own."""
        refused = {
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            "soft-capped logits": logits_soft_cap,
            "shared KV caches": kv_sharing_target_layer_name,
            f"attention of type {attn_type}": attn_type != "decoder",
        }
        for name, value in refused.items():
            if value:
                raise EngineRefusal(f"strict attention does not support {name}: use a Qwen3 dense checkpoint")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_tile, self.kv_split, self.backend = kv_tile, kv_split, backend

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, Hq, D], key and value [T, Hk, D], kv_cache [blocks, Hk, page, 2·D]; writes and returns output [T, Hq, D]."""
        if attn_metadata is None:  # a dry run before the cache exists
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise EngineRefusal("strict attention does not support fused output quantization: use a bf16 checkpoint")
        self._require_rows(query, attn_metadata)
        store_kv(key, value, kv_cache, attn_metadata.slots)
        return output.copy_(self._attend(query, kv_cache, attn_metadata))

    def attend_packed(
        self,
        layer: Attention,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        q_gamma: torch.Tensor,
        k_gamma: torch.Tensor,
        eps: float,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """:meth:`forward` from the packed projection (arguments of ``rlk.kernels.serving.rotate_into_cache``): [T, Hq·D]."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return qkv.new_zeros(qkv.shape[0], self.num_heads * self.head_size)
        mine = metadata[layer.layer_name]
        self._require_rows(qkv, mine)
        query = rotate_into_cache(qkv, q_gamma, k_gamma, eps, positions, table, layer.kv_cache, mine.slots)
        return self._attend(query, layer.kv_cache, mine).flatten(1)

    def _require_rows(self, query: torch.Tensor, metadata: PagedMetadata) -> None:
        if query.shape[0] != metadata.slots.shape[0]:
            raise EngineRefusal(f"strict attention got {query.shape[0]} rows for {metadata.slots.shape[0]} tokens: leave batch padding off")

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: PagedMetadata) -> torch.Tensor:
        return paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=self.scale,
            kv_tile=self.kv_tile,
            kv_split=self.kv_split,
            backend=self.backend,
        )


class RlkAttentionBackend(AttentionBackend):
    """Handed to each layer explicitly; vLLM's backend selection is never consulted."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The only name that vLLM accepts for a backend of somebody else."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RlkAttentionImpl]:
        return RlkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder
