"""Entry point ``vllm.general_plugins``: makes the strict model known to vLLM by name and changes nothing else."""

from __future__ import annotations

ARCHITECTURE = "RlkQwen3ForCausalLM"
MODEL = "rlk.rollout.vllm.model:RlkQwen3ForCausalLM"


def register() -> None:
    """Register the strict architecture lazily; no engine uses it unless its ``architectures`` names it."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
