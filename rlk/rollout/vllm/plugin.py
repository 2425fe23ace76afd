"""Entry point ``vllm.general_plugins``: makes the strict and the mixed model known to vLLM by name and changes nothing else."""

from __future__ import annotations

ARCHITECTURE = "RlkQwen3ForCausalLM"
MODEL = "rlk.rollout.vllm.model:RlkQwen3ForCausalLM"
MIXED_ARCHITECTURE = "MixedQwen3ForCausalLM"
MIXED_MODEL = "rlk.rollout.vllm.mixed:MixedQwen3ForCausalLM"


def register() -> None:
    """Register the architectures lazily, once; no engine uses one unless its ``architectures`` names it.

    An engine in such a mode calls it too, so that a source tree works that is not installed.
    """
    from vllm import ModelRegistry

    for architecture, model in ((ARCHITECTURE, MODEL), (MIXED_ARCHITECTURE, MIXED_MODEL)):
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, model)
