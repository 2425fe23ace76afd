"""Entry point ``vllm.general_plugins``: makes the strict model known to vLLM by name and changes nothing else."""

from __future__ import annotations

ARCHITECTURE = "RlkQwen3ForCausalLM"
MODEL = "rlk.rollout.vllm.model:RlkQwen3ForCausalLM"


def register() -> None:
    """Register the strict architecture lazily, once; no engine uses it unless its ``architectures`` names it.

    An engine in strict mode calls it too, so that a source tree works that is not installed.
    """
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
