"""Entry point ``vllm.general_plugins``: makes the strict and the mixed model known to vLLM by name and changes nothing else."""

from __future__ import annotations

import importlib

ARCHITECTURE = "RlkQwen3ForCausalLM"
MODEL = "rlk.rollout.vllm.model:RlkQwen3ForCausalLM"
MIXED_ARCHITECTURE = "MixedQwen3ForCausalLM"
MIXED_MODEL = "rlk.rollout.vllm.mixed:MixedQwen3ForCausalLM"


def register() -> None:
    """Register the architectures lazily, once; no engine uses one unless its ``architectures`` names it."""
    from vllm import ModelRegistry

    for architecture, model in ((ARCHITECTURE, MODEL), (MIXED_ARCHITECTURE, MIXED_MODEL)):
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, model)


def register_imported(architecture: str) -> None:
    """Register one architecture's class itself, for the process that starts an engine, so that a source tree works that is not installed.

    vLLM inspects a class that it knows by name in a process of its own, which imports everything once more.
    """
    from vllm import ModelRegistry

    module, name = {ARCHITECTURE: MODEL, MIXED_ARCHITECTURE: MIXED_MODEL}[architecture].split(":")
    ModelRegistry.register_model(architecture, getattr(importlib.import_module(module), name))
