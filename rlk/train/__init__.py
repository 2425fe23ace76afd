"""The training engine: Megatron-core with this project's operators (strict) or with its own (native)."""
